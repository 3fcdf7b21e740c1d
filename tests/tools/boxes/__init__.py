"""Tools for losses of boxes."""
