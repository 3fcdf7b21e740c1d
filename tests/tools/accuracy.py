"""Accuracy of a loss over its whole domain, in units in the last place.

Every point, or every row of logits, is a result of its own (``reduction="none"``, upstream gradient 1), compared with a
truth of many digits. Its error is divided by two units:

- *plain*: the unit in the last place of the result's dtype at the truth;
- *conditioned*, which the bar applies to: the plain unit, or the unit of the arithmetic's dtype at the size of the
  result, whichever is larger. The size is that of the truth in float64: the distance that a result moves when its
  operands move, relative to their movement. It is much larger than the result only where rounded terms cancel. For
  16-bit results the arithmetic's unit is 2^-16.

Numbers beyond the range of the dtype count as infinity. Errors next to the smallest normal number of the arithmetic are
not measured, since a float32 may be flushed there, at the end or on the way, and other dtypes have few digits left: an
error of up to four such numbers counts as none, and a result also passes if it is correct with 0 for exponentials that
underflow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from cupylosses.definition.base import Definition
from cupylosses.testing import tolerance
from cupylosses.testing.by_engine import ByEngine
from cupylosses.testing.check import Check, run
from cupylosses.testing.tolerance import conditioned_unit, ulp
from tools.exact import Figure

if TYPE_CHECKING:
    from torch import Tensor

#: The largest accepted error, in conditioned units in the last place.
BAR = 4.0

#: An error up to this many smallest normal numbers of the arithmetic counts as none.
FLUSHED = 4.0


class Worst(NamedTuple):
    """The point where a result is farthest from the truth, in conditioned units."""

    ulps: float
    operands: tuple[float, ...]
    got: float
    expected: float


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of one result, ``value`` or the gradient of an operand: the worst point, and the largest plain error."""

    result: str
    points: int
    over: int
    plain: float
    worst: Worst

    @property
    def ok(self) -> bool:
        """True if no point is over the bar."""
        return not self.over


@dataclass(frozen=True)
class Sweep(ByEngine, ABC, modules="tools.{}.accuracy"):
    """Sweep over points of a loss, with parameters and dtypes, on a device.

    ``Sweep(loss, ...)`` makes an instance of the subclass for the loss's engine.

    ``dtypes`` has one entry for all operands, or one for each; the last entry serves the remaining operands.
    ``function`` is a function that claims to be the loss, used instead of the library's.
    """

    loss: Definition
    case: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32",)
    device: str = "cpu"
    count: int = 0
    seed: int = 0
    function: Callable[..., Tensor] | None = None

    @classmethod
    @abstractmethod
    def sweeps(cls, loss: Any, dtypes: Sequence[tuple[str, ...]], **where: Any) -> Iterator[Sweep]:
        """Yields the sweeps of a loss: each case, dtype and kind of target."""

    @property
    @abstractmethod
    def check(self) -> Check:
        """The calls of the sweep, as a check."""

    @property
    @abstractmethod
    def labels(self) -> list[str]:
        """Names of the numbers of a point."""

    @abstractmethod
    def operands(self) -> list[Tensor]:
        """The points, on the device."""

    @abstractmethod
    def measure(self) -> list[Accuracy]:
        """Returns the accuracy of the value, and of the gradient of each operand."""

    @property
    def case_words(self) -> str:
        """The case, as printed in tables."""
        return " ".join(f"{k}={v}" for k, v in self.case.items())

    @property
    def words(self) -> tuple[str, str, str]:
        """Loss, case and dtypes, as printed in tables."""
        return self.loss.name, self.case_words or "defaults", "+".join(self.dtypes)

    def results(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Returns the value and the gradient of each operand at each point, on the CPU."""
        found = run(self.check.ours(), operands, self.check.gradients_of, 1.0)
        return [x.cpu() for x in (found.value, *found.gradients) if x is not None]


def errors(result: Tensor, figure: Figure, computed: str) -> tuple[Tensor, Tensor]:
    """Returns the conditioned and the plain error of each result; infinite if a NaN or an infinity is misplaced.

    ``computed`` is the dtype of the arithmetic.
    """
    import torch

    within = (figure.high.abs() <= torch.finfo(result.dtype).max) & result.isfinite()
    difference = (result.double() - figure.high) - figure.low
    error = torch.where(within, difference.abs(), tolerance.errors(result, figure.high))
    error = torch.where(error <= FLUSHED * torch.finfo(getattr(torch, computed)).tiny, 0.0, error)
    unit = conditioned_unit(figure.high, figure.size, result.dtype, computed)
    return error / unit, error / ulp(figure.high, result.dtype)
