"""Checks of region losses: that engine's part of :mod:`cupylosses.testing`."""
