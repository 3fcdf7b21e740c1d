"""The tools that know the losses of sequences."""
