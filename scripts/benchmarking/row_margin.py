"""Workloads of margin losses: losses of rows of scores that the labels' scores should exceed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from benchmarking import figures, workloads
from benchmarking.draw import Draw
from benchmarking.figures import LABELS, MODES, SCORES
from benchmarking.selection import Run
from benchmarking.workloads import Workload
from cupylosses.engines.row_margin.definition import END, MarginLoss
from cupylosses.testing.eager import Call
from cupylosses.testing.row_margin.eager import twin


@dataclass(frozen=True)
class MarginWorkload(Workload):
    """A loss of rows of scores.

    ``shapes`` are those of the scores and of the labels. Lists of labels have as many places as there are classes,
    because torch's function requires it.
    """

    Definition: ClassVar = MarginLoss
    section = "throughput"
    cliffs = "row_margin_cliffs"

    loss: MarginLoss

    @property
    def drawn(self) -> tuple[str, ...]:
        return (self.dtype, "int64")

    @property
    def least_read(self) -> int:
        if not self.loss.several:
            return self.bytes
        # Only the labels of a list and its end marker must be read.
        return self.operand_bytes[0] + 8 * (min(LABELS, self.shape[-1] - 1) + 1) * self.values

    @property
    def values(self) -> int:
        return self.elements // self.shape[-1]

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(MODES)[:2]

    def draw(self, shapes: Sequence[Sequence[int]], seed: int) -> Sequence[torch.Tensor]:
        generator = torch.Generator(workloads.DEVICE).manual_seed(seed)
        given = {"generator": generator, "device": workloads.DEVICE}
        scores = torch.randn(tuple(shapes[0]), dtype=getattr(torch, self.dtype), **given)
        if not self.loss.several:
            return [scores, torch.randint(self.shape[-1], tuple(shapes[1]), **given)]
        target = torch.full(tuple(shapes[1]), END, device=workloads.DEVICE)
        count = min(LABELS, self.shape[-1] - 1)
        target[..., :count] = torch.randint(self.shape[-1], (*target.shape[:-1], count), **given)
        return [scores, target]

    def torchs(self) -> Call | None:
        return twin(self.loss, self.loss.values(self.case), self.reduction)

    def compiled_in(self, modes: Sequence[str], quick: bool) -> list[str]:
        # torch.compile's result for lists of labels is wrong, and it stores all pairs in memory.
        return [x for x in modes if x != "forward" and not quick and not self.loss.several]

    @classmethod
    def chosen(cls, run: Run) -> list[MarginWorkload]:
        if run.quick:
            return []
        return [scores(loss, *x) for loss in run.losses_of(cls) for x in SCORES if x[1] in run.dtypes]

    @classmethod
    def tiny(cls, loss: MarginLoss) -> MarginWorkload:
        return scores(loss, (64, 10), "float32")

    @classmethod
    def large(cls, loss: MarginLoss) -> MarginWorkload:
        return scores(loss, *SCORES[0])

    @classmethod
    def fitting(cls, loss: MarginLoss, free: int) -> MarginWorkload:
        (rows, classes), dtype = SCORES[0]
        # A list of labels has 8 bytes per class.
        each = classes * (getattr(torch, dtype).itemsize + 8 * loss.several)
        return scores(loss, (min(rows, 1 << max(0, (free // each).bit_length() - 1)), classes), dtype)

    @classmethod
    def random(cls, loss: MarginLoss, draw: Draw) -> MarginWorkload:
        elements = draw.size(1 << 10, 1 << 25)
        classes = draw.size(2, min(elements, 100000))
        found = scores(loss, (max(1, elements // classes), classes), draw.dtype())
        case, reduction = draw.options(loss.cases), draw.choice(figures.REDUCTIONS)
        return replace(found, title=figures.RANDOM, case=case, reduction=reduction)


def scores(loss: MarginLoss, shape: Sequence[int], dtype: str) -> MarginWorkload:
    """A workload with scores of this shape, classes last."""
    labels = tuple(shape) if loss.several else tuple(shape[:-1])
    return MarginWorkload(loss, (tuple(shape), labels), dtype, figures.SCORE_ROWS)
