"""Workloads of losses of boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from benchmarking import figures, workloads
from benchmarking.draw import Draw
from benchmarking.figures import BOXES
from benchmarking.selection import Run
from benchmarking.workloads import Workload
from cupylosses.engines.boxes.definition import BoxLoss
from cupylosses.testing.boxes.eager import twin
from cupylosses.testing.eager import Call


@dataclass(frozen=True)
class BoxWorkload(Workload):
    """A loss of boxes. ``shapes`` has the shape of each operand, with the four components in the last dimension."""

    Definition: ClassVar = BoxLoss
    section = "throughput"
    cliffs = "boxes_cliffs"

    loss: BoxLoss

    @property
    def drawn(self) -> tuple[str, ...]:
        return (self.dtype,) * len(self.loss.operands)

    @property
    def values(self) -> int:
        return self.elements // self.shape[-1]

    def draw(self, shapes: Sequence[Sequence[int]], seed: int) -> Sequence[torch.Tensor]:
        """Random boxes; most pairs overlap."""
        generator = torch.Generator(workloads.DEVICE).manual_seed(seed)
        found = []
        for shape in shapes:
            x = torch.rand(tuple(shape), generator=generator, device=workloads.DEVICE)
            x[..., 2:] += x[..., :2] + 0.125
            found.append(x.to(getattr(torch, self.dtype)))
        return found

    def torchs(self) -> Call | None:
        return twin(self.loss, self.loss.values(self.case), self.reduction)

    def compiled_in(self, modes: Sequence[str], quick: bool) -> list[str]:
        return [x for x in modes if x == "forward+backward" and not quick]

    @classmethod
    def chosen(cls, run: Run) -> list[BoxWorkload]:
        if run.quick:
            return []
        return [
            boxes(loss, count, dtype) for loss in run.losses_of(cls) for count, dtype in BOXES if dtype in run.dtypes
        ]

    @classmethod
    def tiny(cls, loss: BoxLoss) -> BoxWorkload:
        return boxes(loss, 64, "float32")

    @classmethod
    def large(cls, loss: BoxLoss) -> BoxWorkload:
        return boxes(loss, *BOXES[0])

    @classmethod
    def fitting(cls, loss: BoxLoss, free: int) -> BoxWorkload:
        count, dtype = BOXES[0]
        fits = free // (4 * getattr(torch, dtype).itemsize)
        return boxes(loss, min(count, 1 << max(0, fits.bit_length() - 1)), dtype)

    @classmethod
    def random(cls, loss: BoxLoss, draw: Draw) -> BoxWorkload:
        found = boxes(loss, draw.size(1 << 8, 1 << 23), draw.dtype())
        case, reduction = draw.options(loss.cases), draw.choice(figures.REDUCTIONS)
        return replace(found, title=figures.RANDOM, case=case, reduction=reduction)


def boxes(loss: BoxLoss, count: int, dtype: str) -> BoxWorkload:
    """A workload with ``count`` pairs of boxes."""
    return BoxWorkload(loss, ((count, 4),) * len(loss.operands), dtype, figures.BOX_PAIRS)
