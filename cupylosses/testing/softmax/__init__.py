"""Checks of losses of rows of logits: the softmax engine's part of :mod:`cupylosses.testing`."""
