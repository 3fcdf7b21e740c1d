"""Accuracy of region losses: each sample and class is a result of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.testing.regions.check import RegionCheck
from tools.samples import SampleSweep

if TYPE_CHECKING:
    from torch import Tensor

#: Classes and voxels of a sample.
CLASSES, VOXELS = 3, 64


@dataclass(frozen=True)
class RegionSweep(SampleSweep):
    """Sweep over samples of a few voxels."""

    Definition: ClassVar = RegionLoss
    Check: ClassVar = RegionCheck

    loss: RegionLoss
    count: int = 100

    @classmethod
    def sweeps(cls, loss: RegionLoss, dtypes: Sequence[tuple[str, ...]], **where: Any) -> Iterator[RegionSweep]:
        # Labels have no dtype of their own here.
        return super().sweeps(loss, list(dict.fromkeys(x[:1] for x in dtypes)), **where)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.count, CLASSES, VOXELS

    @property
    def reduction(self) -> str:
        return "mean" if self.loss.has_voxels else "none"

    @property
    def computed(self) -> str:
        return "float64" if "float64" in self.dtypes else "float32"

    @property
    def labels(self) -> list[str]:
        return ["sample", "class"]

    def point(self, operands: Sequence[Tensor], result: Tensor, i: int) -> list[float]:
        import torch

        return [float(j) for j in torch.unravel_index(torch.tensor(i), result.shape)][:2] if result.dim() else [0.0]
