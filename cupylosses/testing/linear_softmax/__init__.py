"""Checks of softmax losses of a linear layer: that engine's part of :mod:`cupylosses.testing`."""
