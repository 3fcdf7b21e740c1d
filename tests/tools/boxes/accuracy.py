"""Accuracy of losses of boxes: every pair of boxes is a result of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cupylosses.engines.boxes.definition import COMPONENTS, BoxLoss
from cupylosses.testing.boxes.check import BoxCheck
from tools.samples import SampleSweep


@dataclass(frozen=True)
class BoxSweep(SampleSweep):
    """Sweep over pairs of boxes."""

    Definition: ClassVar = BoxLoss
    Check: ClassVar = BoxCheck

    loss: BoxLoss

    @property
    def shape(self) -> tuple[int, ...]:
        return self.count, COMPONENTS

    @property
    def labels(self) -> list[str]:
        return [f"{x.name}[{i}]" for x in self.loss.operands for i in range(COMPONENTS)]
