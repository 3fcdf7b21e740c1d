"""Tools for losses of rows of scores."""
