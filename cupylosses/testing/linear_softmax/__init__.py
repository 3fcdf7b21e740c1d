"""Checks of softmax losses of a linear layer: the linear softmax engine's part of :mod:`cupylosses.testing`."""
