"""Checks of losses of row statistics. A layout determines how the engine processes rows, or how operands are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cupylosses import checks
from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.testing.check import GIVEN, Check
from cupylosses.testing.eager import promoted
from cupylosses.testing.row_statistics import eager
from cupylosses.testing.row_statistics.truth import truth
from cupylosses.testing.tolerance import dtype_name
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Layout(NamedTuple):
    """Rows, features, and storage of operands: "" (contiguous), "transposed", or "broadcast" (the last operand).

    A broadcast operand has size 1 in the first dimension.
    """

    rows: tuple[int, ...]
    features: int
    lies: str = ""


LAYOUTS: Mapping[str, Layout] = {
    "lanes": Layout((37,), 24),
    "odd": Layout((5, 7), 43),
    "block": Layout((5,), 2080),
    "long": Layout((2,), 20000),
    "transposed": Layout((37,), 24, "transposed"),
    "broadcast": Layout((6, 7), 24, "broadcast"),
}


@dataclass(frozen=True)
class StatisticsCheck(Check):
    """Check of a loss of row statistics. ``shape`` is a requested shape of the operands, with the features last."""

    Definition: ClassVar = StatisticsLoss

    loss: StatisticsLoss
    layout: str = "lanes"
    shape: tuple[int, ...] | None = None

    @cached_property
    def values(self) -> dict[str, Any]:
        """All parameters and flags by name."""
        return self.loss.values(self.case)

    @cached_property
    def operand_dtypes(self) -> tuple[str, ...]:
        """Dtype of each operand; labels are integers if the loss accepts them."""
        dtypes = self.dtypes
        return tuple(
            "int64" if x.integer and x.name in self.loss.row_operands else dtypes[min(i, len(dtypes) - 1)]
            for i, x in enumerate(self.loss.operands)
        )

    @cached_property
    def laid(self) -> Layout:
        """Sizes and storage."""
        return Layout(self.shape[:-1], self.shape[-1]) if self.shape else LAYOUTS[self.layout]

    @cached_property
    def gradients_of(self) -> tuple[bool, ...]:
        return tuple(x in checks.FLOATING for x in self.operand_dtypes)

    @property
    def possible(self) -> bool:
        vectors = zip(self.operand_dtypes, self.loss.operands, strict=True)
        floating = all(d in checks.FLOATING for d, x in vectors if x.name not in self.loss.row_operands)
        return floating and (self.layout in LAYOUTS or (self.layout == GIVEN and bool(self.shape)))

    @property
    def options(self) -> dict[str, Any]:
        return {**self.values, "reduction": self.reduction}

    def small(self, layout: str | None = None) -> StatisticsCheck:
        return replace(self, layout=layout or next(iter(LAYOUTS)), shape=None)

    def operands(self) -> list[Tensor]:
        import torch

        rows, features, lies = self.laid
        generator = torch.Generator().manual_seed(self.seed)
        common = torch.randn(*rows, features, generator=generator, dtype=torch.float64)
        vectors = [x.name for x in self.loss.operands if x.name not in self.loss.row_operands]
        operands = []
        for operand, name in zip(self.loss.operands, self.operand_dtypes, strict=True):
            if operand.name in self.loss.row_operands:
                x = torch.randn(rows, generator=generator, dtype=torch.float64).sign()
            else:
                # The vectors are similar, so that hinges are active.
                x = common + torch.randn(*rows, features, generator=generator, dtype=torch.float64)
                if lies == "broadcast" and operand.name == vectors[-1]:
                    x = x[:1]
                if lies == "transposed":
                    x = x.movedim(-1, 0).contiguous().movedim(0, -1)
            operands.append(x.to(self.device, getattr(torch, name)))
        return operands

    def torch(self) -> list[Callable[..., Tensor]]:
        twin = eager.twin(self.loss, self.values, self.reduction)
        return [] if twin is None else [twin]

    def result(self, operands: Sequence[Tensor]) -> tuple[tuple[int, ...], dtype]:
        floating = [x for x in operands if x.is_floating_point()]
        return self.laid.rows if self.reduction == "none" else (), promoted(floating)

    def truth(self, operands: Sequence[Tensor], grad_output: Any, where: str) -> Truth:
        moved = [x.detach().to(where) for x in operands]
        result = dtype_name(self.result(operands)[1])
        return truth(self.loss, moved, self.values, self.reduction, grad_output, self.gradients_of, result)
