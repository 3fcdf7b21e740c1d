"""Checks of boxes, with messages in the style of :mod:`cupylosses.checks`."""

from __future__ import annotations

from collections.abc import Sequence

from cupylosses.engines.boxes.definition import COMPONENTS, BoxLoss


def components(loss: BoxLoss, name: str, shape: Sequence[int]) -> None:
    """Checks that the last dimension of an operand has the four components of boxes."""
    if not shape or shape[-1] != COMPONENTS:
        raise ValueError(
            f"{loss.name}: `{name}` must have the four components of each box in its last dimension, shape (..., 4), "
            f"got shape {tuple(shape)}. Move them there with `.movedim(dim, -1)`, or reshape it."
        )
