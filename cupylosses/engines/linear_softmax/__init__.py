"""Softmax losses of a linear layer's output, computed in chunks of rows without storing all logits."""

from cupylosses.engines.linear_softmax.engine import LINEAR_SOFTMAX

__all__ = ["LINEAR_SOFTMAX"]
