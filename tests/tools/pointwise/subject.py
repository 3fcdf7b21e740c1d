"""Element-wise losses as subjects of `tools.transforms`."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cupylosses.engines.pointwise import reference as pointwise_reference
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import samples
from cupylosses.testing.check import by_position
from tools.transforms import Subject


class PointwiseSubject(Subject):
    """An element-wise loss."""

    Definition: ClassVar = Loss

    def __init__(self, loss: Loss, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(loss, device, seed)
        self.function = by_position(loss)

    def draw(self, *shapes: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> list[Tensor]:
        count = len(self.loss.operands)
        shapes = (*shapes, *(shapes[-1],) * count)[:count]
        drawn = samples.operands(self.loss, self.loss.values(), (dtype,) * count, shapes, self.device, self.seed + seed)
        positive = [x.domain_for(self.loss.values()) == "nonnegative" for x in self.loss.operands]
        return [x + 0.25 if p else x for x, p in zip(drawn, positive, strict=True)]

    def truth(self, *operands: Tensor) -> Tensor:
        return pointwise_reference.elements(self.loss, operands, self.loss.values()).mean()
