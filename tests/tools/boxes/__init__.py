"""The tools that know losses of boxes."""
