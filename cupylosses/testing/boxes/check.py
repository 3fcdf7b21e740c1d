"""Checks of losses of boxes. A layout determines how the engine processes boxes, or how operands are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cupylosses import checks
from cupylosses.engines.boxes.definition import BoxLoss
from cupylosses.testing.boxes import eager
from cupylosses.testing.boxes.truth import truth
from cupylosses.testing.check import GIVEN, Check
from cupylosses.testing.tolerance import dtype_name
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Layout(NamedTuple):
    """Shape of the boxes without their components, and the storage of operands.

    ``lies`` is "" (contiguous), "transposed" (components outermost), "columns" (of a wider array), "strided" (the first
    two dimensions are exchanged in memory), or "broadcast" (the last operand has size 1 in the first dimension).
    """

    boxes: tuple[int, ...]
    lies: str = ""


LAYOUTS: Mapping[str, Layout] = {
    "flat": Layout((37,)),
    "rows": Layout((5, 70)),
    "one": Layout(()),
    "transposed": Layout((37,), "transposed"),
    "columns": Layout((6, 7), "columns"),
    "strided": Layout((9, 6), "strided"),
    "broadcast": Layout((70, 3), "broadcast"),
}

#: Edges of boxes are multiples of 1 / GRID below LARGEST: 8-bit numbers, whose differences and products are exact.
GRID, LARGEST = 8, 16


def draw(shape: Sequence[int], seed: int, box_format: str = "xyxy") -> Tensor:
    """Draws boxes in float64: some overlap, some share edges."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, LARGEST * GRID // 2, (*shape, 2), generator=generator)
    # Even sizes, so that centres are on the grid.
    sizes = 2 * ((sizes + 1) // 2)
    corners = torch.randint(0, LARGEST * GRID // 2, (*shape, 2), generator=generator)
    first = {"xyxy": corners, "xywh": corners, "cxcywh": corners + sizes // 2}[box_format]
    second = corners + sizes if box_format == "xyxy" else sizes
    return torch.cat((first, second), -1).double() / GRID


@dataclass(frozen=True)
class BoxCheck(Check):
    """Check of a loss of boxes. ``shape`` is a requested shape of the operands, with the components last."""

    Definition: ClassVar = BoxLoss

    loss: BoxLoss
    layout: str = "flat"
    shape: tuple[int, ...] | None = None

    @cached_property
    def values(self) -> dict[str, Any]:
        """All parameters and flags by name."""
        return self.loss.values(self.case)

    @cached_property
    def operand_dtypes(self) -> tuple[str, ...]:
        """Dtype of each operand."""
        return tuple(self.dtypes[min(i, len(self.dtypes) - 1)] for i in range(len(self.loss.operands)))

    @cached_property
    def laid(self) -> Layout:
        """Sizes and storage."""
        return Layout(self.shape[:-1]) if self.shape else LAYOUTS[self.layout]

    @cached_property
    def gradients_of(self) -> tuple[bool, ...]:
        return (True,) * len(self.loss.operands)

    @property
    def possible(self) -> bool:
        known = self.layout in LAYOUTS or (self.layout == GIVEN and bool(self.shape) and self.shape[-1] == 4)
        return known and all(x in checks.FLOATING for x in self.operand_dtypes)

    @property
    def options(self) -> dict[str, Any]:
        return {**self.values, "reduction": self.reduction}

    def small(self, layout: str | None = None) -> BoxCheck:
        return replace(self, layout=layout or next(iter(LAYOUTS)), shape=None)

    def operands(self) -> list[Tensor]:
        import torch

        boxes, lies = self.laid
        operands = []
        for i, dtype in enumerate(self.operand_dtypes):
            x = draw(boxes, 2 * self.seed + i, self.values["box_format"])
            if lies == "broadcast" and i == len(self.operand_dtypes) - 1:
                x = x[:1]
            x = x.to(self.device, getattr(torch, dtype))
            if lies == "transposed":
                x = x.movedim(-1, 0).contiguous().movedim(0, -1)
            elif lies == "columns":
                x = torch.cat((x[..., :1], x, x[..., :1]), -1)[..., 1:5]
            elif lies == "strided":
                x = x.transpose(0, 1).contiguous().transpose(0, 1)
            operands.append(x)
        return operands

    def torch(self) -> list[Callable[..., Tensor]]:
        twin = eager.twin(self.loss, self.values, self.reduction)
        return [] if twin is None else [twin]

    def result(self, operands: Sequence[Tensor]) -> tuple[tuple[int, ...], dtype]:
        import torch

        kind = torch.float64 if "float64" in self.operand_dtypes else torch.float32
        return self.laid.boxes if self.reduction == "none" else (), kind

    def truth(self, operands: Sequence[Tensor], grad_output: Any, where: str) -> Truth:
        moved = [x.detach().to(where) for x in operands]
        result = dtype_name(self.result(operands)[1])
        return truth(self.loss, moved, self.values, self.reduction, grad_output, self.gradients_of, result)
