"""Workloads of losses of sequences; the section `sequences` measures them at their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from benchmarking import figures, workloads
from benchmarking.draw import Draw
from benchmarking.figures import LARGE_SEQUENCES, MODES, SEQUENCES, TINY_SEQUENCES
from benchmarking.selection import Run
from benchmarking.workloads import Workload
from cupylosses import functional
from cupylosses.engines.sequence.definition import SequenceLoss
from cupylosses.testing.eager import Call
from cupylosses.testing.sequence.eager import twin


@dataclass(frozen=True)
class SequenceWorkload(Workload):
    """A loss of the logits of sequences, log-softmax included.

    ``shapes`` are those of the logits, the targets, the input lengths and the target lengths. All sequences have full
    length.
    """

    Definition: ClassVar = SequenceLoss
    section = None
    moves_memory = False
    cliffs = "sequence_cliffs"

    loss: SequenceLoss

    @property
    def drawn(self) -> tuple[str, ...]:
        return (self.dtype, "int64", "int64", "int64")

    @property
    def values(self) -> int:
        return self.shapes[0][-2]

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(MODES)[:2]

    def differentiated(self, mode: str) -> int:
        return 1 if MODES[mode] else 0

    def draw(self, shapes: Sequence[Sequence[int]], seed: int) -> Sequence[torch.Tensor]:
        given: dict[str, Any] = {
            "generator": torch.Generator(workloads.DEVICE).manual_seed(seed),
            "device": workloads.DEVICE,
        }
        frames, _, classes = self.shape
        labels = self.shapes[1][-1]
        first, targets, *lengths = map(tuple, shapes)
        ends = [torch.full(x, n, device=workloads.DEVICE) for x, n in zip(lengths, (frames, labels), strict=True)]
        logits = torch.randn(first, dtype=getattr(torch, self.dtype), **given)
        return [logits, torch.randint(1, classes, targets, **given), *ends]

    def ours(self) -> Call:
        """This library's function of logits, after torch's log-softmax if it expects log-probabilities."""
        function, options = getattr(functional, self.loss.name), {**self.case, "reduction": self.reduction}
        if self.loss.logits:
            return lambda x, *others: function(x, *others, **options)
        return lambda x, *others: function(x.log_softmax(-1), *others, **options)

    def torchs(self) -> Call | None:
        return twin(True, {**self.case, "reduction": self.reduction})

    def compiled_in(self, modes: Sequence[str], quick: bool) -> list[str]:
        return []

    @classmethod
    def chosen(cls, run: Run) -> list[SequenceWorkload]:
        shapes = list(SEQUENCES)[: 1 if run.quick else None]
        return [sequences(loss, sizes, "float32") for loss in run.losses_of(cls) for sizes in shapes]

    @classmethod
    def tiny(cls, loss: SequenceLoss) -> SequenceWorkload:
        return sequences(loss, *TINY_SEQUENCES)

    @classmethod
    def large(cls, loss: SequenceLoss) -> SequenceWorkload:
        return sequences(loss, *LARGE_SEQUENCES)

    @classmethod
    def fitting(cls, loss: SequenceLoss, free: int) -> SequenceWorkload:
        """The large workload, with as many of its samples as fit."""
        (frames, samples, classes, labels), dtype = LARGE_SEQUENCES
        fits = max(1, free // (frames * classes * getattr(torch, dtype).itemsize))
        return sequences(loss, (frames, min(samples, fits), classes, labels), dtype)

    @classmethod
    def random(cls, loss: SequenceLoss, draw: Draw) -> SequenceWorkload:
        frames, classes, samples = draw.size(8, 3000), draw.size(4, 8000), draw.size(1, 256)
        while frames * samples * classes > 1 << 27:
            samples, classes = max(1, samples // 2), max(4, classes // 2)
        labels = draw.size(1, min(500, max(1, frames // 3)))
        found = sequences(loss, (frames, samples, classes, labels), draw.choice(("float32", "float32", "float64")))
        return replace(found, title=figures.RANDOM, reduction=draw.choice(figures.REDUCTIONS))

    def __str__(self) -> str:
        return " ".join([self.loss.name, self.dtype, figures.spell_shape((*self.shape, self.shapes[1][-1]))])


def sequences(loss: SequenceLoss, sizes: Sequence[int], dtype: str, **fields: Any) -> SequenceWorkload:
    """A workload with these numbers of frames, samples, classes and labels."""
    frames, samples, classes, labels = sizes
    shapes = ((frames, samples, classes), (samples, labels), (samples,), (samples,))
    return SequenceWorkload(loss, shapes, dtype, figures.OF_SEQUENCES, **fields)
