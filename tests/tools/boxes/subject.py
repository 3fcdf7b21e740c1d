"""Losses of boxes as subjects of `tools.transforms`."""

from __future__ import annotations

from typing import ClassVar

import array_api_compat.torch as xp
import torch
from torch import Tensor

from cupylosses import functional
from cupylosses.engines.boxes.definition import COMPONENTS, BoxLoss
from tools.softmax.subject import OF_POINTWISE
from tools.transforms import Subject, Transform


class BoxSubject(Subject):
    """The loss as a function of its boxes."""

    Definition: ClassVar = BoxLoss

    def __init__(self, loss: BoxLoss, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(_Mean(loss), device, seed)
        self.boxes, self.function = loss, self._call

    @classmethod
    def suits(cls, transform: Transform, loss: BoxLoss) -> bool:
        """True if a transform can be tried; those that need a GPU are tried with element-wise losses only."""
        return not transform.gpu and transform.name not in OF_POINTWISE

    def draw(self, *shapes: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        found = []
        for _ in self.boxes.operands:
            shape = (*shapes[0][:-1], shapes[0][-1] // COMPONENTS * COMPONENTS or COMPONENTS)
            x = torch.rand(*shape, generator=generator, dtype=torch.float64)
            found.append(x.to(self.device, getattr(torch, dtype)))
        return found

    def _call(self, *boxes: Tensor, reduction: str = "mean") -> Tensor:
        return getattr(functional, self.boxes.name)(*boxes, reduction=reduction)

    def truth(self, *operands: Tensor) -> Tensor:
        """Returns the mean by the formula."""
        return self.boxes.reference(xp, *operands, **self.boxes.values()).mean()


class _Mean:
    """The fields of a definition that transforms use."""

    warn_broadcast = True
    mean_of_rows = True

    def __init__(self, loss: BoxLoss) -> None:
        self.operands = loss.operands
        self.class_name, self.name = loss.class_name, loss.name
