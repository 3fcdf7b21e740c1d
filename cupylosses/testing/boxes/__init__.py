"""Checks of losses of boxes: the boxes engine's part of :mod:`cupylosses.testing`."""
