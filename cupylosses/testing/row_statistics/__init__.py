"""Checks of losses of row statistics: that engine's part of :mod:`cupylosses.testing`."""
