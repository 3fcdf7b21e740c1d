"""Softmax losses of a linear layer's output, in chunks of rows, so that the logits never exist as a whole."""

from cupylosses.engines.linear_softmax.engine import LINEAR_SOFTMAX

__all__ = ["LINEAR_SOFTMAX"]
