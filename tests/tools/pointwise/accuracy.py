"""Accuracy of element-wise losses: points all over the domain, compared with the truth of ``exact.py``.

At a jump of the result, such as a gradient's at a kink, rounding may decide on which side a point falls; there a result
also passes if it is correct for operands one unit in the last place away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy

from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing.pointwise.check import PointwiseCheck
from cupylosses.testing.tolerance import arithmetic, conditioned_unit, dtype_name
from tools import exact
from tools.accuracy import BAR, Accuracy, Sweep, Worst, errors
from tools.exact import Figure
from tools.sweep import points

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    #: Computes the truth at points, with exponentials below a number taken as 0.
    Truth = Callable[[NDArray[Any], float], Figure]

#: Number of the worst points over the bar that are examined for a nearby jump or an underflow.
LOOKED_AT = 400


@dataclass(frozen=True)
class PointwiseSweep(Sweep):
    """Sweep over points of an element-wise loss."""

    Definition: ClassVar = Loss

    loss: Loss
    count: int = 2000

    @classmethod
    def sweeps(cls, loss: Loss, dtypes: Sequence[tuple[str, ...]], **where: Any) -> Iterator[PointwiseSweep]:
        return (cls(loss, case, names, **where) for case, names in product(loss.cases, dtypes))

    @property
    def check(self) -> PointwiseCheck:
        return PointwiseCheck(self.loss, self.case, self.dtypes, "none", device=self.device, function=self.function)

    @property
    def labels(self) -> list[str]:
        return [x.name for x in self.loss.operands]

    @property
    def values(self) -> dict[str, Any]:
        """Every parameter and flag by name."""
        return self.loss.values(self.case)

    def operands(self) -> list[Tensor]:
        # Each point is a row: some losses have one result element per row.
        names = [self.dtypes[min(i, len(self.dtypes) - 1)] for i in range(len(self.loss.operands))]
        return [x.to(self.device) for x in points(self.loss, self.values, names, self.count, self.seed)]

    def measure(self) -> list[Accuracy]:
        import torch

        operands = self.operands()
        computed = max((arithmetic(dtype_name(x.dtype)) for x in operands), key=exact.DIGITS.__getitem__)

        def truth(at: NDArray[Any], smallest: float = 0.0) -> list[Figure]:
            found = exact.evaluate(self.loss, list(at.T), self.values, exact.DIGITS[computed], smallest)
            return [Figure(*map(torch.from_numpy, x)) for x in (found.value, *found.gradients)]

        at = numpy.stack([x.flatten().double().cpu().numpy() for x in operands], axis=1)
        names = ["value", *(x.name for x in self.loss.operands)]
        results = [x.flatten() for x in self.results(operands)]
        return [
            _accuracy(name, at, result, figure, computed, lambda *at, k=k: truth(*at)[k])
            for k, (name, result, figure) in enumerate(zip(names, results, truth(at), strict=True))
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
    """Returns the conditioned errors, the plain errors and the truth.

    A result that is correct on the other side of a jump, or with an underflow, gets the errors and truth of that case.
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
