"""Accuracy of losses of rows of scores: every row is a result of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cupylosses.engines.row_margin.definition import MarginLoss
from cupylosses.testing.row_margin.check import PLACES, MarginCheck
from tools.samples import SampleSweep

#: Classes of a row: more than one, and not a multiple of a vector.
CLASSES = 5


@dataclass(frozen=True)
class MarginSweep(SampleSweep):
    """Sweep over rows of scores."""

    Definition: ClassVar = MarginLoss
    Check: ClassVar = MarginCheck

    loss: MarginLoss

    @property
    def shape(self) -> tuple[int, ...]:
        return self.count, CLASSES

    @property
    def labels(self) -> list[str]:
        first, second = (x.name for x in self.loss.operands)
        several = [f"{second}[{i}]" for i in range(PLACES)] if self.loss.several else [second]
        return [*(f"{first}[{i}]" for i in range(CLASSES)), *several]
