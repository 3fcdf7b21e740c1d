"""The tools that know element-wise losses."""
