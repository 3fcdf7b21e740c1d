"""Accuracy of softmax losses of a linear layer: that of the loss of the logits, after the layer.

The weight is the identity, so that matrix products are exact, and the logits and the gradient of the input are those of
the in-place row kernels. The rows are those of :mod:`tools.softmax.accuracy`. The gradient of the weight is a sum over
all rows, and has no truth for a single row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from cupylosses import functional
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from tools.softmax.accuracy import SoftmaxSweep

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LinearSoftmaxSweep(SoftmaxSweep):
    """Sweep over rows of ``loss``, the loss of the logits, computed by ``of_layer``, the loss of the layer."""

    Definition: ClassVar = LinearSoftmaxLoss

    of_layer: LinearSoftmaxLoss | None = None

    @classmethod
    def sweeps(
        cls, loss: LinearSoftmaxLoss, dtypes: Sequence[tuple[str, ...]], **where: Any
    ) -> Iterator[LinearSoftmaxSweep]:
        inner, function = loss.of_logits, behind_identity(loss)
        for kind, case, names in product(inner.targets, loss.cases, dtypes):
            found = cls(inner, case, names, kind=kind, function=function, of_layer=loss, **where)
            if found.check.possible:
                yield found

    @property
    def words(self) -> tuple[str, str, str]:
        _, case, dtypes = super().words
        return (self.of_layer or self.loss).name, case, dtypes


def behind_identity(loss: LinearSoftmaxLoss) -> Callable[..., Tensor]:
    """Returns the loss as a function of its logits: the weight of the layer is the identity."""
    function = getattr(functional, loss.name)

    def call(input: Tensor, target: Tensor, class_dim: int | None = None, **options: Any) -> Tensor:
        import torch

        weight = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device)
        return function(input, weight, target, **options)

    return call
