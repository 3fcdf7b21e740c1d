"""Region losses as subjects of `tools.transforms`: functions of their logits, with fixed labels."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from cupylosses import functional
from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.testing.regions.eager import twin
from tools.softmax.subject import OF_POINTWISE
from tools.transforms import Subject, Transform


class RegionSubject(Subject):
    """The loss as a function of its logits alone, with classes in the last dimension and voxels in the one before."""

    Definition: ClassVar = RegionLoss

    def __init__(self, loss: RegionLoss, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(_Mean(loss), device, seed)
        self.regions, self.function = loss, self._call

    @classmethod
    def suits(cls, transform: Transform, loss: RegionLoss) -> bool:
        """True if a transform can be tried; those that need a GPU are tried with element-wise losses only."""
        return not transform.gpu and transform.name not in OF_POINTWISE

    def draw(self, *shapes: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
        return [x.to(self.device, getattr(torch, dtype))]

    def _call(self, x: Tensor, reduction: str = "mean") -> Tensor:
        # A single row is one voxel, which has a loss for each class: the comparison uses their mean.
        one = self.regions.has_voxels or x.dim() < 2
        options: dict[str, Any] = {} if one else {"reduction": reduction}
        return getattr(functional, self.regions.name)(*self._whole(x), class_dim=-1, **options)

    def truth(self, *operands: Tensor) -> Tensor:
        """Returns the mean, by torch's operators."""
        (x,) = operands
        whole, labels = self._whole(x)
        expression = twin(self.regions, self.regions.values(), "mean", whole.dim() - 1, None)
        assert expression is not None
        return expression(whole, labels)

    def _whole(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits with a dimension of samples, and labels that all samples of a batch share."""
        whole = x[None] if x.dim() < 3 else x
        shape = whole.shape[:-1]
        count = 1
        for n in shape:
            count *= n
        return whole, (torch.arange(count, device=x.device) * 7 % x.shape[-1]).reshape(shape)


class _Mean:
    """The fields of a definition that transforms use."""

    warn_broadcast = True
    mean_of_rows = True

    def __init__(self, loss: RegionLoss) -> None:
        self.operands, self.class_name, self.name = loss.operands[:1], loss.class_name, loss.name
