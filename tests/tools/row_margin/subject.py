"""Losses of rows of scores as subjects of `tools.transforms`: functions of the scores, with fixed labels."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cupylosses import functional
from cupylosses.engines.row_margin.definition import MarginLoss
from tools.softmax.subject import OF_CURVED, OF_POINTWISE
from tools.transforms import Subject, Transform


class MarginSubject(Subject):
    """The loss as a function of its scores alone."""

    Definition: ClassVar = MarginLoss

    def __init__(self, loss: MarginLoss, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(_Mean(loss), device, seed)
        self.rows, self.function = loss, self._call

    @classmethod
    def suits(cls, transform: Transform, loss: MarginLoss) -> bool:
        """True if a transform can be tried; those that need a GPU are tried with element-wise losses only."""
        return not transform.gpu and transform.name not in (*OF_POINTWISE, *OF_CURVED)

    def draw(self, *shapes: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
        return [drawn.to(self.device, getattr(torch, dtype))]

    def _call(self, x: Tensor, reduction: str = "mean") -> Tensor:
        function = getattr(functional, self.rows.name)
        return function(x, self._labels(x), reduction=reduction, class_dim=-1)

    def truth(self, x: Tensor) -> Tensor:
        """Returns the mean by operations that torch differentiates twice, unlike its own functions."""
        labels = self._labels(x)
        labels = labels if self.rows.several else labels[..., None]
        own = x.gather(-1, labels.expand(*x.shape[:-1], labels.shape[-1]))
        excess = self.rows.values()["margin"] + x[..., None, :] - own[..., None]
        other = (labels[..., None] != torch.arange(x.shape[-1], device=x.device)).all(-2)
        return (excess.relu() * other[..., None, :]).sum((-2, -1)).mean() / x.shape[-1]

    def _labels(self, x: Tensor) -> Tensor:
        """Returns labels, which all samples of a batch share: one for each row, or lists of two."""
        count = x[..., 0].numel()
        labels = (torch.arange(count, device=x.device) * 7 % x.shape[-1]).reshape(x.shape[:-1])
        return torch.stack([labels, (labels + 1) % x.shape[-1]], -1) if self.rows.several else labels


class _Mean:
    """The fields of a definition that transforms use."""

    warn_broadcast = True
    mean_of_rows = True

    def __init__(self, loss: MarginLoss) -> None:
        self.operands, self.class_name, self.name = loss.operands[:1], loss.class_name, loss.name
