"""Checks of losses of sequences: the sequence engine's part of :mod:`cupylosses.testing`."""
