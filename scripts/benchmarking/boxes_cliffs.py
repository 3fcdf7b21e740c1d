"""Off-headline cases of losses of boxes, with their bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarking.boxes import boxes
from benchmarking.cases import Case, Layout, case, transposed
from benchmarking.figures import DTYPES, HVP
from cupylosses.definition.registry import registry
from cupylosses.engines.boxes.definition import BoxLoss

F32 = "float32"

BOXES, SECOND = "boxes", "second derivatives of boxes"

MANY = 1 << 22


def cases() -> Iterator[Case]:
    """All cases."""
    across = transposed(2)
    for dtype in DTYPES:
        yield _case("complete_box_iou_loss", MANY, dtype)
        yield _case("iou_loss", MANY, dtype, {0: across})
        yield _case("generalized_box_iou_loss", MANY, dtype, reduction="none")
        yield _case("distance_box_iou_loss", MANY, dtype, {0: Layout(step=2)})
    yield _case("iou_loss", MANY, F32, {0: Layout(padding=1), 1: Layout(offset=1)}, mode="all gradients")
    yield _case("generalized_box_iou_loss", 256, F32)
    for dtype in DTYPES:
        yield _case("iou_loss", MANY, dtype, group=SECOND, mode=HVP, copy_bar=0.4)
        yield _case("complete_box_iou_loss", MANY, dtype, group=SECOND, mode=HVP, copy_bar=0.4)


def _case(name: str, count: int, dtype: str, layouts: Mapping[int, Layout] | None = None, **fields: Any) -> Case:
    return case(fields.pop("group", BOXES), boxes(registry(BoxLoss)[name], count, dtype), layouts, **fields)
