"""Losses of rows as subjects of `tools.transforms`: functions of their floating operands, with fixed labels."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cupylosses import functional
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing.softmax.eager import twin
from tools.transforms import Subject, Transform

#: Transforms that are not tried: a Module takes labels too, which a subject holds itself.
OF_POINTWISE = ("copies of a Module",)

#: Transforms that differentiate the gradient, which is constant here and has no graph in the truth.
OF_CURVED = ("`create_graph=True`", "third derivatives")


class SoftmaxSubject(Subject):
    """A loss of rows as a function of its floating operands alone."""

    Definition: ClassVar = SoftmaxLoss

    def __init__(self, loss: SoftmaxLoss, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(_Mean(loss), device, seed)
        self.rows, self.function = loss, self._call

    @classmethod
    def suits(cls, transform: Transform, loss: SoftmaxLoss) -> bool:
        """True if a transform can be tried; those that need a GPU are tried with element-wise losses only."""
        return not transform.gpu and transform.name not in (*OF_POINTWISE, *(() if loss.softmax else OF_CURVED))

    def draw(self, *shapes: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        count = floating(self.rows)
        drawn = [torch.randn(shapes[0], generator=generator, dtype=torch.float64) for _ in range(count)]
        if not self.rows.softmax:
            drawn[0] = torch.log_softmax(drawn[0], -1)
        if self.rows.dense == "probabilities" and count == 2:
            drawn[1] = torch.softmax(drawn[1], -1)
        return [x.to(self.device, getattr(torch, dtype)) for x in drawn]

    def _call(self, x: Tensor, *others: Tensor, reduction: str = "mean") -> Tensor:
        return getattr(functional, self.rows.name)(x, *(others or [self._labels(x)]), reduction=reduction, class_dim=-1)

    def truth(self, *operands: Tensor) -> Tensor:
        """Returns the mean as torch defines it."""
        x, *others = operands
        expression = twin(self.rows, {}, "mean", class_dim=-1)
        if expression is None:
            raise ValueError(
                f"torch has nothing like {self.rows.name}: give `testing.softmax.eager.EXPRESSIONS` what stands for it"
            )
        return expression(x, *(others or [self._labels(x)]))

    def _labels(self, x: Tensor) -> Tensor:
        """Returns labels, which all samples of a batch share."""
        count = x[..., 0].numel()
        return (torch.arange(count, device=x.device) * 7 % x.shape[-1]).reshape(x.shape[:-1])


class _Mean:
    """The fields of a definition that transforms use."""

    warn_broadcast = True
    mean_of_rows = True

    def __init__(self, loss: SoftmaxLoss) -> None:
        self.operands, self.class_name, self.name = loss.operands[: floating(loss)], loss.class_name, loss.name


def floating(loss: SoftmaxLoss) -> int:
    """Returns the number of operands given to a subject, which holds its labels itself."""
    return 1 if loss.row else 2
