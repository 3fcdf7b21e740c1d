"""The tools that know losses of row statistics."""
