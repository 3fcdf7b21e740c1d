"""Losses of sequences as subjects of `tools.transforms`: functions of the frames of one sample, with a fixed label."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cupylosses import functional
from cupylosses.engines.sequence.definition import SequenceLoss
from tools.sequence.truth import by_matrices
from tools.softmax.subject import OF_POINTWISE
from tools.transforms import Subject, Transform

#: Target that any number of frames can be aligned with.
TARGET = [1]


class SequenceSubject(Subject):
    """The loss of one sample; a vector counts as its only frame."""

    Definition: ClassVar = SequenceLoss

    def __init__(self, loss: SequenceLoss, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(_Sample(loss), device, seed)
        self.sequences, self.function = loss, self._call

    @classmethod
    def suits(cls, transform: Transform, loss: SequenceLoss) -> bool:
        """True if a transform can be tried; those that need a GPU are tried with element-wise losses only."""
        return not transform.gpu and transform.name not in OF_POINTWISE

    def draw(self, *shapes: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shapes[0], generator=generator, dtype=torch.float64).to(self.device, getattr(torch, dtype))]

    def _call(self, x: Tensor, reduction: str = "mean") -> Tensor:
        target = torch.tensor(TARGET, device=x.device)
        x = x if x.dim() > 1 else x[None]
        return getattr(functional, self.sequences.name)(x, target, None, None, reduction=reduction)

    def truth(self, *operands: Tensor) -> Tensor:
        """Returns the loss by matrix products."""
        (x,) = operands
        x = x if x.dim() > 1 else x[None]
        return by_matrices(x.log_softmax(-1) if self.sequences.logits else x, TARGET)


class _Sample:
    """The fields of a definition that transforms use."""

    warn_broadcast = True
    mean_of_rows = True

    def __init__(self, loss: SequenceLoss) -> None:
        self.operands = loss.operands[:1]
        self.class_name, self.name = loss.class_name, loss.name
