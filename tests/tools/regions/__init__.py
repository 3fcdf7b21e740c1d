"""The tools that know losses of regions."""
