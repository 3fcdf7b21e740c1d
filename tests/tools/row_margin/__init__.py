"""The tools that know losses of rows of scores."""
