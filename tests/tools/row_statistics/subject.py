"""Losses of row statistics as subjects of `tools.transforms`: functions of their vectors, with fixed labels."""

from __future__ import annotations

from typing import ClassVar

import array_api_compat.torch as xp
import torch
from torch import Tensor

from cupylosses import functional
from cupylosses.engines.row_statistics.definition import StatisticsLoss
from tools.softmax.subject import OF_POINTWISE
from tools.transforms import Subject, Transform


class StatisticsSubject(Subject):
    """The loss as a function of its vectors alone."""

    Definition: ClassVar = StatisticsLoss

    def __init__(self, loss: StatisticsLoss, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(_Mean(loss), device, seed)
        self.rows, self.function = loss, self._call

    @classmethod
    def suits(cls, transform: Transform, loss: StatisticsLoss) -> bool:
        """True if a transform can be tried; those that need a GPU are tried with element-wise losses only."""
        return not transform.gpu and transform.name not in OF_POINTWISE

    def draw(self, *shapes: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(shapes[0], generator=generator, dtype=torch.float64) for _ in self.loss.operands]
        return [x.to(self.device, getattr(torch, dtype)) for x in drawn]

    def _call(self, *vectors: Tensor, reduction: str = "mean") -> Tensor:
        names = [x.name for x in self.rows.operands]
        operands = dict(zip(names, [*vectors, *self._labels(vectors[0])], strict=True))
        return getattr(functional, self.rows.name)(**operands, reduction=reduction)

    def truth(self, *operands: Tensor) -> Tensor:
        """Returns the mean by the formula."""
        labels = self._labels(operands[0])
        return self.rows.reference(xp, *operands, *labels, **self.rows.values()).mean()

    def _labels(self, x: Tensor) -> list[Tensor]:
        """Returns labels, which all samples of a batch share: those of similar pairs, whose loss is smooth."""
        ones = torch.ones(x.shape[:-1], device=x.device, dtype=torch.int64)
        return [ones] * len(self.rows.row_operands)


class _Mean:
    """The fields of a definition that transforms use."""

    warn_broadcast = True
    mean_of_rows = True

    def __init__(self, loss: StatisticsLoss) -> None:
        self.operands = loss.operands[: len(loss.operands) - len(loss.row_operands)]
        self.class_name, self.name = loss.class_name, loss.name
