"""Checks of losses of boxes: that engine's part of :mod:`cupylosses.testing`."""
