"""Tools for element-wise losses."""
