"""Checks of losses of row statistics: the row statistics engine's part of :mod:`cupylosses.testing`."""
