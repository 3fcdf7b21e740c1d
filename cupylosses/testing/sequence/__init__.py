"""Checks of losses of sequences: that engine's part of :mod:`cupylosses.testing`."""
