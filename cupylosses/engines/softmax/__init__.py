"""The softmax engine: losses of rows of logits, with class indices or dense targets."""

from cupylosses.engines.softmax.engine import SOFTMAX

__all__ = ["SOFTMAX"]
