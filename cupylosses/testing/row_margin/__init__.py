"""Checks of losses of rows of scores: the row margin engine's part of :mod:`cupylosses.testing`."""
