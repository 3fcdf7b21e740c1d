"""The accuracy of a loss over its whole domain, in units in the last place.

Every point is a result of its own (``reduction="none"``, upstream gradient 1), compared with the truth of ``exact.py``.
Its error is divided by two units:

- *plain*: the unit in the last place of the result's dtype at the truth;
- *conditioned*, which the bar applies to: the plain unit, or the unit of the arithmetic's dtype at the size of the
  result, whichever is larger. The size is that of ``truth.py``: how far a result moves, relative to the movement, when
  the operands do. It is much larger than the result only where rounded terms cancel. For 16-bit results the
  arithmetic's unit is 2^-16.

Numbers beyond the range of the dtype count as infinity. Next to the smallest normal number of the arithmetic nothing is
measured, since a float32 may be flushed there, at the end or on the way, and others have few digits left: an error of
up to four such numbers counts as none, and a result also passes if it is right with 0 for exponentials that underflow.
At a jump of the result, such as a gradient's at a kink, rounding may decide on which side a point lies; there a result
also passes if it is right for operands one unit in the last place away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import tolerance
from cupylosses.testing.check import bind, run
from cupylosses.testing.tolerance import arithmetic, conditioned_unit, dtype_name, ulp
from tools import exact
from tools.exact import Figure
from tools.sweep import points

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    #: The truth at points, with exponentials below a number taken as 0.
    Truth = Callable[[NDArray[Any], float], Figure]

#: The largest accepted error, in conditioned units in the last place.
BAR = 4.0

#: An error up to this many smallest normal numbers of the arithmetic counts as none.
FLUSHED = 4.0

#: Points to draw for each case and dtype.
COUNT = 2000

#: This many of the worst points over the bar are examined for a nearby jump or an underflow.
LOOKED_AT = 400


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
class Sweep:
    """A loss, by its function, with parameters and dtypes, the number of points and the device.

    ``dtypes`` has one entry for all operands, or one for each; the last entry serves the remaining operands.
    """

    function: Callable[..., Tensor]
    case: Mapping[str, Any]
    dtypes: tuple[str, ...]
    device: str = "cpu"
    count: int = COUNT
    seed: int = 0

    @property
    def loss(self) -> Loss:
        """The definition."""
        return self.function.loss  # type: ignore[attr-defined]

    @property
    def values(self) -> dict[str, Any]:
        """Every parameter and flag by name."""
        return self.loss.values(self.case)

    def operands(self) -> list[Tensor]:
        """The points, on the device, each as a row: some losses have one result element per row."""
        names = [self.dtypes[min(i, len(self.dtypes) - 1)] for i in range(len(self.loss.operands))]
        return [x.to(self.device) for x in points(self.loss, self.values, names, self.count, self.seed)]

    def results(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The value and the gradient of each operand at each point, on the CPU."""
        call = bind(self.function, self.loss, self.values, "none")
        found = run(call, operands, (True,) * len(operands), 1.0)
        return [x.flatten().cpu() for x in (found.value, *found.gradients) if x is not None]


def measure(sweep: Sweep) -> list[Accuracy]:
    """The accuracy of the value, and of the gradient of each operand."""
    import torch

    operands = sweep.operands()
    computed = max((arithmetic(dtype_name(x.dtype)) for x in operands), key=exact.DIGITS.__getitem__)

    def truth(at: NDArray[Any], smallest: float = 0.0) -> list[Figure]:
        found = exact.evaluate(sweep.loss, list(at.T), sweep.values, exact.DIGITS[computed], smallest)
        return [Figure(*map(torch.from_numpy, x)) for x in (found.value, *found.gradients)]

    at = numpy.stack([x.flatten().double().cpu().numpy() for x in operands], axis=1)
    names = ["value", *(x.name for x in sweep.loss.operands)]
    return [
        _accuracy(name, at, result, figure, computed, lambda *at, k=k: truth(*at)[k])
        for k, (name, result, figure) in enumerate(zip(names, sweep.results(operands), truth(at), strict=True))
    ]


def _accuracy(name: str, at: NDArray[Any], result: Tensor, figure: Figure, computed: str, truth: Truth) -> Accuracy:
    conditioned, plain = errors(result, figure, computed)
    expected = figure.high.clone()
    over = conditioned.argsort(descending=True)[: min(LOOKED_AT, int((conditioned > BAR).sum()))]
    if len(over):
        part = Figure(*(x[over] for x in figure))
        found = _excused(at[over.numpy()], result[over], part, computed, truth)
        conditioned[over], plain[over], expected[over] = found
    i = int(conditioned.argmax())
    worst = Worst(float(conditioned[i]), tuple(at[i].tolist()), float(result[i]), float(expected[i]))
    return Accuracy(name, len(at), int((conditioned > BAR).sum()), float(plain.max()), worst)


def _excused(
    at: NDArray[Any], result: Tensor, figure: Figure, computed: str, truth: Truth
) -> tuple[Tensor, Tensor, Tensor]:
    """The errors and the truth. A result that is right beside a jump, or by an underflow, gets the error and truth of
    that case.
    """
    import torch

    best = (*errors(result, figure, computed), figure.high)
    step = numpy.spacing(abs(at).astype(computed)).astype(numpy.float64)
    for move in product((-1, 0, 1), repeat=at.shape[1]):
        for smallest in (0.0, float(numpy.finfo(computed).tiny)):
            other = truth(at + step * move, smallest)
            found = errors(result, other, computed)
            unit = conditioned_unit(figure.high, figure.size, result.dtype, computed)
            jumps = ~((other.high - figure.high).abs() <= BAR * unit)
            excused = jumps & (found[0] <= BAR)
            best = tuple(torch.where(excused, x, y) for x, y in zip((*found, other.high), best, strict=True))
    return best


def errors(result: Tensor, figure: Figure, computed: str) -> tuple[Tensor, Tensor]:
    """The conditioned and the plain error of each result; infinite if a NaN or an infinity is misplaced.

    ``computed`` is the dtype of the arithmetic.
    """
    import torch

    within = (figure.high.abs() <= torch.finfo(result.dtype).max) & result.isfinite()
    difference = (result.double() - figure.high) - figure.low
    error = torch.where(within, difference.abs(), tolerance.errors(result, figure.high))
    error = torch.where(error <= FLUSHED * torch.finfo(getattr(torch, computed)).tiny, 0.0, error)
    unit = conditioned_unit(figure.high, figure.size, result.dtype, computed)
    return error / unit, error / ulp(figure.high, result.dtype)
