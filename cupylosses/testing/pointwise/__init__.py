"""Checks of element-wise losses: the pointwise engine's part of :mod:`cupylosses.testing`."""
