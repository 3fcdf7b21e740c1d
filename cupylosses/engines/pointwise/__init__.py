"""The pointwise engine: element-wise losses, their reductions, and the gradients of broadcast operands."""

from cupylosses.engines.pointwise.engine import POINTWISE

__all__ = ["POINTWISE"]
