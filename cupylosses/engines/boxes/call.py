"""Arrays of a call of a box loss. The static part of the call is that of row statistics."""

from __future__ import annotations

from typing import Any

from cupylosses.engines.row_statistics.call import Static, has_features


def boxes_of(loss: Any, static: Static) -> tuple[bool, ...]:
    """Returns, for each array of a call, True if it has boxes. The arrays are operands, weight, mask, and tangents."""
    has_boxes = has_features(loss, static)
    return (*has_boxes, *[boxes for boxes, moves in zip(has_boxes, static.has_tangent, strict=False) if moves])
