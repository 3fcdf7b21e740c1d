"""Checks of element-wise losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from cupylosses import checks
from cupylosses.definition.base import MASK
from cupylosses.engines.pointwise.codegen import title
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.pointwise.reduction import Resolved, Static, resolve
from cupylosses.testing import samples
from cupylosses.testing.check import EDGES, Check
from cupylosses.testing.eager import promoted
from cupylosses.testing.layouts import LAYOUTS, SHAPE, Shape
from cupylosses.testing.pointwise import eager
from cupylosses.testing.pointwise.truth import OVERFLOWING, truth
from cupylosses.testing.tolerance import SUMMED_BY_TORCH, TABLE, dtype_name
from cupylosses.testing.truth import Truth, common_shape, flushes, runs_kernels

if TYPE_CHECKING:
    from torch import Tensor, dtype


#: Shape of small operands: sizes that differ and are powers of two, so that divisions by them are exact.
SMALL: Shape = (8, 16)


@dataclass(frozen=True)
class PointwiseCheck(Check):
    """Check of an element-wise loss in one of `cupylosses.testing.layouts.LAYOUTS`, or on the edges of its domain.

    ``wanted`` has a flag per operand that requires grad, by default all; integers never do. ``dim`` are the dimensions
    to reduce over.
    """

    Definition: ClassVar = Loss

    loss: Loss
    wanted: tuple[bool, ...] | None = None
    shape: Shape = SHAPE
    dim: tuple[int, ...] | None = None

    @cached_property
    def values(self) -> dict[str, Any]:
        """All parameters and flags by name."""
        return self.loss.values(self.case)

    @cached_property
    def operand_dtypes(self) -> tuple[str, ...]:
        """Dtype of each operand."""
        dtypes = self.dtypes
        return tuple("bool" if x is MASK else dtypes[min(i, len(dtypes) - 1)] for i, x in enumerate(self.loss.operands))

    @cached_property
    def gradients_of(self) -> tuple[bool, ...]:
        wanted = self.wanted or (True,) * len(self.loss.operands)
        return tuple(w and name in checks.FLOATING for w, name in zip(wanted, self.operand_dtypes, strict=True))

    @property
    def possible(self) -> bool:
        accepted = all(
            name in checks.FLOATING or operand.integer
            for name, operand in zip(self.operand_dtypes, self.loss.operands, strict=True)
        )
        return accepted and (self.layout == EDGES or len(self.shape) >= LAYOUTS[self.layout].rank)

    @property
    def has_truth(self) -> bool:
        return self.layout != EDGES or not any((self.loss.name, name) in OVERFLOWING for name in self.operand_dtypes)

    @property
    def title(self) -> str:
        return title(self.loss)

    @property
    def id(self) -> str:
        return super().id if self.dim is None else f"{super().id}-dim={self.dim}"

    @property
    def options(self) -> dict[str, Any]:
        return {**self.values, "reduction": self.reduction, **({} if self.dim is None else {"dim": self.dim})}

    def small(self, layout: str | None = None) -> PointwiseCheck:
        return replace(self, shape=SMALL, layout=layout or self.layout)

    def operands(self) -> list[Tensor]:
        if self.layout == EDGES:
            return samples.edges(self.loss, self.values, self.operand_dtypes, self.device)
        layout = LAYOUTS[self.layout]
        shapes = layout.shapes_of(self.loss, self.shape)
        drawn = samples.operands(self.loss, self.values, self.operand_dtypes, shapes, self.device, self.seed)
        return layout.place(drawn)

    def torch(self) -> list[Callable[..., Tensor]]:
        if self.dim is not None:
            return []
        calls = (
            eager.twin(self.loss, self.values, self.reduction),
            eager.formula(self.loss, self.values, self.reduction),
        )
        return [x for x in calls if x is not None]

    def reduces(self, operands: Sequence[Tensor]) -> bool:
        return self.resolved(operands).dims is None

    def resolved(self, operands: Sequence[Tensor]) -> Resolved:
        """Returns the reduction, resolved for these operands."""
        return resolve(self.loss, Static(self.reduction, self.dim), common_shape(operands))

    def result(self, operands: Sequence[Tensor]) -> tuple[tuple[int, ...], dtype]:
        return self.resolved(operands).shape, promoted(operands)

    def truth(self, operands: Sequence[Tensor], grad_output: Any, where: str) -> Truth:
        moved = [x.detach().to(where) for x in operands]
        return truth(
            self.loss,
            moved,
            self.values,
            self.reduction,
            grad_output,
            self.gradients_of,
            flush=flushes(operands),
            dim=self.dim,
        )

    def biases(self, operands: Sequence[Tensor]) -> Sequence[float | None]:
        return biases(operands)


def biases(operands: Sequence[Tensor]) -> list[float | None]:
    """Returns the bias of the gradient of each operand, for broadcast operands; None for the others.

    The gradient of a broadcast operand is a sum. Its terms share the factor that depends on that operand alone, with
    the error of one element. On the CPU, torch computes the sum.
    """
    elements = prod(common_shape(operands))
    ours = [runs_kernels(x) and x.is_floating_point() for x in operands]
    shared = [TABLE[dtype_name(x.dtype)].element if o else SUMMED_BY_TORCH for x, o in zip(operands, ours, strict=True)]
    return [bias if x.numel() < elements else None for x, bias in zip(operands, shared, strict=True)]
