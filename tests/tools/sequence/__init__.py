"""Tools for losses of sequences."""
