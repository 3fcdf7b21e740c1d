"""Accuracy of losses of sequences: every sample of a few frames is a result of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cupylosses.engines.sequence.definition import SequenceLoss
from cupylosses.testing.sequence.check import SequenceCheck
from tools.samples import SampleSweep

if TYPE_CHECKING:
    from torch import Tensor

#: Frames and classes of a sample.
FRAMES, CLASSES = 13, 5


@dataclass(frozen=True)
class SequenceSweep(SampleSweep):
    """Sweep over samples of a few frames."""

    Definition: ClassVar = SequenceLoss
    Check: ClassVar = SequenceCheck

    loss: SequenceLoss
    count: int = 500

    @property
    def shape(self) -> tuple[int, ...]:
        return FRAMES, self.count, CLASSES

    @property
    def labels(self) -> list[str]:
        return [f"{self.loss.operands[0].name}[{t}, {c}]" for t in range(FRAMES) for c in range(CLASSES)]

    def samples_first(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if x.dim() > 1 else x

    def point(self, operands: Sequence[Tensor], result: Tensor, i: int) -> list[float]:
        return super().point(operands[:1], result, i)
