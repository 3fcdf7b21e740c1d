"""Workloads of softmax losses of a linear layer; the section `linear` measures them at their shapes and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from benchmarking import figures, workloads
from benchmarking.draw import Draw
from benchmarking.figures import LARGE_LAYER, LINEAR, MODES, TINY_LAYER
from benchmarking.selection import Run
from benchmarking.workloads import Workload
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from cupylosses.testing.eager import Call
from cupylosses.testing.softmax.eager import twin


@dataclass(frozen=True)
class LinearSoftmaxWorkload(Workload):
    """A loss of a linear layer with class indices.

    ``shapes`` are those of the input, the weight and the target. If ``ignored``, every second label is ignored.
    """

    Definition: ClassVar = LinearSoftmaxLoss
    section = None
    moves_memory = False
    mixes = False
    cliffs = "linear_softmax_cliffs"

    loss: LinearSoftmaxLoss
    ignored: bool = False

    @property
    def drawn(self) -> tuple[str, ...]:
        return (self.dtype, self.dtype, "int64")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.shapes[0][:-1], self.shapes[1][0])

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(MODES)[:2]

    def differentiated(self, mode: str) -> int:
        return 2 if MODES[mode] else 0

    def draw(self, shapes: Sequence[Sequence[int]], seed: int) -> Sequence[torch.Tensor]:
        given: dict[str, Any] = {
            "generator": torch.Generator(workloads.DEVICE).manual_seed(seed),
            "device": workloads.DEVICE,
        }
        kind = getattr(torch, self.dtype)
        x, w = (torch.randn(tuple(shape), dtype=kind, **given) for shape in shapes[:2])
        labels = torch.randint(self.shape[-1], tuple(shapes[2]), **given)
        if self.ignored:
            labels[..., ::2] = -100
        # This scale gives the logits unit variance.
        return [x, w.mul_(w.shape[-1] ** -0.5), labels]

    def torchs(self) -> Call | None:
        expression = twin(self.loss.of_logits, {}, self.reduction)
        if expression is None:
            return None
        return lambda input, weight, target: expression(torch.nn.functional.linear(input, weight), target)

    def compiled_in(self, modes: Sequence[str], quick: bool) -> list[str]:
        return []

    @classmethod
    def chosen(cls, run: Run) -> list[LinearSoftmaxWorkload]:
        return []

    @classmethod
    def tiny(cls, loss: LinearSoftmaxLoss) -> LinearSoftmaxWorkload:
        return layer(loss, *TINY_LAYER)

    @classmethod
    def large(cls, loss: LinearSoftmaxLoss) -> LinearSoftmaxWorkload:
        return layer(loss, *LARGE_LAYER)

    @classmethod
    def fitting(cls, loss: LinearSoftmaxLoss, free: int) -> LinearSoftmaxWorkload:
        """The large layer, with all sizes halved until the logits fit."""
        (rows, features, classes), dtype = LARGE_LAYER
        while rows * classes * getattr(torch, dtype).itemsize > free and classes > 2:
            rows, features, classes = (max(2, n // 2) for n in (rows, features, classes))
        return layer(loss, (rows, features, classes), dtype)

    @classmethod
    def random(cls, loss: LinearSoftmaxLoss, draw: Draw) -> LinearSoftmaxWorkload:
        rows, features, classes = draw.size(8, 8192), draw.size(8, 2048), draw.size(8, 100000)
        while rows * classes > 1 << 28:
            rows, classes = rows // 2, classes // 2
        found = layer(loss, (rows, features, classes), draw.choice(("float32", "bfloat16", "float16")))
        return replace(found, title=figures.RANDOM, reduction=draw.choice(figures.REDUCTIONS))

    def __str__(self) -> str:
        words = [self.loss.name, self.dtype, figures.spell_shape((*self.shapes[0], self.shapes[1][0]))]
        return " ".join([*words, *([figures.spell_case(self.case)] if self.case else [])])


def layer(loss: LinearSoftmaxLoss, sizes: Sequence[int], dtype: str, **fields: Any) -> LinearSoftmaxWorkload:
    """A workload with these numbers of rows, features and classes."""
    rows, features, classes = sizes
    shapes = ((rows, features), (classes, features), (rows,))
    return LinearSoftmaxWorkload(loss, shapes, dtype, LINEAR, **fields)
