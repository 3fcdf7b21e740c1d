"""Workloads of losses of row statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from benchmarking import figures, workloads
from benchmarking.draw import Draw
from benchmarking.figures import LENGTH_LOSSES, LENGTHS, VECTORS
from benchmarking.selection import Run
from benchmarking.workloads import Workload
from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.testing.eager import Call
from cupylosses.testing.row_statistics.eager import twin


@dataclass(frozen=True)
class StatisticsWorkload(Workload):
    """A loss of vectors. ``shapes`` has the shape of each operand, with the features in the last dimension."""

    Definition: ClassVar = StatisticsLoss
    section = "throughput"
    cliffs = "row_statistics_cliffs"

    loss: StatisticsLoss

    @property
    def drawn(self) -> tuple[str, ...]:
        return tuple("int64" if x.name in self.loss.row_operands else self.dtype for x in self.loss.operands)

    @property
    def values(self) -> int:
        return self.elements // self.shape[-1]

    def draw(self, shapes: Sequence[Sequence[int]], seed: int) -> Sequence[torch.Tensor]:
        generator = torch.Generator(workloads.DEVICE).manual_seed(seed)
        found = []
        for shape, name in zip(shapes, self.drawn, strict=True):
            kind = torch.float32 if name == "int64" else getattr(torch, name)
            x = torch.randn(tuple(shape), generator=generator, device=workloads.DEVICE, dtype=kind)
            found.append(x.sign().long() if name == "int64" else x)
        return found

    def torchs(self) -> Call | None:
        return twin(self.loss, self.loss.values(self.case), self.reduction)

    def compiled_in(self, modes: Sequence[str], quick: bool) -> list[str]:
        return [x for x in modes if x != "forward" and not quick]

    @classmethod
    def chosen(cls, run: Run) -> list[StatisticsWorkload]:
        if run.quick:
            return []
        found = [vectors(loss, *x) for loss in run.losses_of(cls) for x in VECTORS]
        lengths = [x for x in run.losses_of(cls) if x.name in LENGTH_LOSSES]
        found += [vectors(loss, *x, figures.VECTOR_LENGTHS) for loss in lengths for x in LENGTHS]
        return [x for x in found if x.dtype in run.dtypes]

    @classmethod
    def tiny(cls, loss: StatisticsLoss) -> StatisticsWorkload:
        return vectors(loss, (64, 16), "float32")

    @classmethod
    def large(cls, loss: StatisticsLoss) -> StatisticsWorkload:
        return vectors(loss, *VECTORS[0])

    @classmethod
    def fitting(cls, loss: StatisticsLoss, free: int) -> StatisticsWorkload:
        (rows, features), dtype = VECTORS[0]
        fits = free // (features * getattr(torch, dtype).itemsize)
        return vectors(loss, (min(rows, 1 << max(0, fits.bit_length() - 1)), features), dtype)

    @classmethod
    def random(cls, loss: StatisticsLoss, draw: Draw) -> StatisticsWorkload:
        elements = draw.size(1 << 10, 1 << 26)
        features = draw.size(1, elements)
        found = vectors(loss, (max(1, elements // features), features), draw.dtype(), figures.RANDOM)
        return replace(found, case=draw.options(loss.cases), reduction=draw.choice(figures.REDUCTIONS))


def vectors(
    loss: StatisticsLoss, shape: Sequence[int], dtype: str, title: str = figures.VECTOR_ROWS
) -> StatisticsWorkload:
    """A workload with vectors of this shape, features last."""
    shapes = [tuple(shape[:-1]) if x.name in loss.row_operands else tuple(shape) for x in loss.operands]
    return StatisticsWorkload(loss, tuple(shapes), dtype, title)
