"""Tools for losses of regions."""
