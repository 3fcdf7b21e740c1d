"""Accuracy of losses of row statistics: every row of a few features is a result of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.testing.row_statistics.check import StatisticsCheck
from tools.samples import SampleSweep

#: Features of a row: more than one, and not a multiple of a vector.
FEATURES = 5


@dataclass(frozen=True)
class StatisticsSweep(SampleSweep):
    """Sweep over rows of vectors."""

    Definition: ClassVar = StatisticsLoss
    Check: ClassVar = StatisticsCheck

    loss: StatisticsLoss

    @property
    def shape(self) -> tuple[int, ...]:
        return self.count, FEATURES

    @property
    def labels(self) -> list[str]:
        found: list[str] = []
        for x in self.loss.operands:
            label = x.name in self.loss.row_operands
            found += [x.name] if label else [f"{x.name}[{i}]" for i in range(FEATURES)]
        return found
