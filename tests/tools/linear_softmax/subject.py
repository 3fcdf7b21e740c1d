"""Softmax losses of a linear layer as subjects of `tools.transforms`.

They are functions of the features, with a fixed weight and fixed labels.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cupylosses import functional
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from cupylosses.testing.softmax.eager import twin
from tools.softmax.subject import OF_POINTWISE
from tools.transforms import Subject, Transform

CLASSES = 5


class LinearSoftmaxSubject(Subject):
    """The loss as a function of the features alone."""

    Definition: ClassVar = LinearSoftmaxLoss

    def __init__(self, loss: LinearSoftmaxLoss, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(_Mean(loss), device, seed)
        self.of_layer, self.function = loss, self._call

    @classmethod
    def suits(cls, transform: Transform, loss: LinearSoftmaxLoss) -> bool:
        """True if a transform can be tried; those that need a GPU are tried with element-wise losses only."""
        return not transform.gpu and transform.name not in OF_POINTWISE

    def draw(self, *shapes: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
        return [x.to(self.device, getattr(torch, dtype))]

    def _weight(self, x: Tensor) -> Tensor:
        sizes = torch.arange(CLASSES * x.shape[-1], device=x.device, dtype=x.dtype).reshape(CLASSES, -1)
        return sizes.sin()

    def _call(self, x: Tensor, reduction: str = "mean") -> Tensor:
        function = getattr(functional, self.of_layer.name)
        return function(x, self._weight(x), self._labels(x), reduction=reduction)

    def truth(self, *operands: Tensor) -> Tensor:
        """Returns the mean as torch defines it."""
        (x,) = operands
        expression = twin(self.of_layer.of_logits, {}, "mean", class_dim=-1)
        return expression(x @ self._weight(x).T, self._labels(x))

    def _labels(self, x: Tensor) -> Tensor:
        """Returns labels, which all samples of a batch share."""
        count = x[..., 0].numel()
        return (torch.arange(count, device=x.device) * 7 % CLASSES).reshape(x.shape[:-1])


class _Mean:
    """The fields of a definition that transforms use."""

    warn_broadcast = True
    mean_of_rows = True

    def __init__(self, loss: LinearSoftmaxLoss) -> None:
        self.operands, self.class_name, self.name = loss.operands[:1], loss.class_name, loss.name
