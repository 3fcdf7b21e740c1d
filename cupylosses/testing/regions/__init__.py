"""Checks of region losses: the regions engine's part of :mod:`cupylosses.testing`."""
