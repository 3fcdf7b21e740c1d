"""Tools for losses of row statistics."""
