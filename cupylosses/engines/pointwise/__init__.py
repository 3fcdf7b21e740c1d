"""The pointwise engine: losses of elements, their reductions and the gradients of broadcast operands."""

from cupylosses.engines.pointwise.engine import POINTWISE

__all__ = ["POINTWISE"]
