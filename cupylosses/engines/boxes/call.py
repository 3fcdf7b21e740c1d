"""The arrays of a call of a loss of boxes. Its static part is that of row statistics."""

from __future__ import annotations

from typing import Any

from cupylosses.engines.row_statistics.call import Static, has_features


def boxes_of(loss: Any, static: Static) -> tuple[bool, ...]:
    """True for each array of a call that has boxes: operands and, behind weight and mask, their tangents."""
    own = has_features(loss, static)
    return (*own, *[boxes for boxes, moves in zip(own, static.has_tangent, strict=False) if moves])
