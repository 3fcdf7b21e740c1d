"""Checks of losses of rows of scores: that engine's part of :mod:`cupylosses.testing`."""
