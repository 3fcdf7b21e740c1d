"""Points all over the domain of a loss, to measure its accuracy.

Errors hide where magnitudes differ, where terms cancel and where a formula switches. So some points are independent in
each operand, from the smallest number to the largest and around 0 and 1; in some, two operands are nearly equal, or
opposite; some lie around the declared kinks; and the edges of ``samples.py`` are included.

Excluded are points that no formula can get right: infinities, which are a matter of conventions; operands that are
subnormal in the arithmetic's dtype; and operands whose sum or difference is subnormal or too large for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations
from math import isfinite, log2
from typing import TYPE_CHECKING, Any

import numpy

from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import samples

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Points = NDArray[numpy.float64]

#: Exponents of 2 between which most operands in practice are.
USUAL = (-12.0, 8.0)


def points(loss: Loss, values: Mapping[str, Any], dtypes: Sequence[str], count: int, seed: int = 0) -> list[Tensor]:
    """About ``count`` points: a tensor of shape (points, 1) per operand, on the CPU.

    Args:
        loss: The definition.
        values: Every parameter and flag by name.
        dtypes: A floating dtype per operand, to which the points are rounded.
        count: The number of points to draw. Edges are added; repeated points and points outside the domain are dropped.
        seed: Equal seeds give equal points.
    """
    import torch

    generator = numpy.random.default_rng(seed)
    axes = [_Axis(x.domain_for(values), name, generator) for x, name in zip(loss.operands, dtypes, strict=True)]
    kinks = [k.operands for k in loss.kinks(**values) if all(map(isfinite, k.operands))]
    few = count // 5 if kinks else 0
    drawn = [
        _independent(axes, count // 2),
        _close(axes, count - count // 2 - few, generator),
        _around(kinks, axes, few, generator),
        _edges(loss, values, dtypes, count // 4, generator),
    ]
    kinds = [getattr(torch, name) for name in dtypes]
    rounded = [torch.from_numpy(x).to(kind) for x, kind in zip(numpy.concatenate(drawn).T, kinds, strict=True)]
    exact = numpy.unique(numpy.stack([x.double().numpy() for x in rounded], axis=1), axis=0)
    inside = numpy.all([axis.has(x) for axis, x in zip(axes, exact.T, strict=True)], axis=0)
    inside &= _within(exact, "float64" if "float64" in dtypes else "float32")
    return [torch.from_numpy(x[:, None]).to(kind) for x, kind in zip(exact[inside].T, kinds, strict=True)]


class _Axis:
    """The range of one operand."""

    def __init__(self, domain: str, dtype: str, generator: numpy.random.Generator) -> None:
        import torch

        info = torch.finfo(getattr(torch, dtype))
        self.domain, self.generator = domain, generator
        self.tiny, self.largest, self.digits = info.tiny, info.max, int(-log2(info.eps))

    @property
    def discrete(self) -> bool:
        """True if there are only two numbers."""
        return self.domain in ("sign", "binary")

    def draw(self, count: int) -> Points:
        """Random numbers of all magnitudes."""
        if self.discrete:
            return self.generator.choice([-1.0 if self.domain == "sign" else 0.0, 1.0], count)
        if self.domain == "probability":
            return self._probabilities(count)
        magnitudes = self._magnitudes(count)
        if self.domain == "positive":
            return magnitudes
        if self.domain == "log_probability":
            near_one = numpy.log1p(-self._small(count))
            return numpy.where(self.generator.random(count) < 0.25, near_one, -magnitudes)
        magnitudes[self.generator.random(count) < 0.03] = 0.0
        return magnitudes if self.domain == "nonnegative" else magnitudes * self._signs(count)

    def _magnitudes(self, count: int) -> Points:
        usual = numpy.exp2(self.generator.uniform(*USUAL, count))
        any_size = numpy.exp2(self.generator.uniform(log2(self.tiny), log2(self.largest), count))
        near_one = 1 + self._signs(count) * self._small(count)
        ends = numpy.where(self.generator.random(count) < 0.5, self.tiny, self.largest / 4)
        ends *= numpy.exp2(self.generator.uniform(0, 2, count))
        choice = self.generator.choice(4, count, p=[0.4, 0.3, 0.2, 0.1])
        return numpy.choose(choice, [usual, any_size, near_one, ends])

    def _probabilities(self, count: int) -> Points:
        near_zero = numpy.exp2(self.generator.uniform(log2(self.tiny), 0, count))
        choices = [self.generator.random(count), near_zero, 1 - self._small(count), self.generator.choice(2, count)]
        return numpy.choose(self.generator.choice(4, count, p=[0.35, 0.3, 0.3, 0.05]), choices)

    def _small(self, count: int) -> Points:
        """Returns 2^-k, down to less than the dtype can add to 1."""
        return numpy.exp2(-self.generator.uniform(1, self.digits + 2, count))

    def _signs(self, count: int) -> Points:
        return self.generator.choice([-1.0, 1.0], count)

    def nudged(self, x: Points) -> Points:
        """Returns numbers near given ones, within the domain."""
        with numpy.errstate(over="ignore"):
            near = x * (1 + self._signs(len(x)) * self._small(len(x)))
        return numpy.clip(near, 0, 1) if self.domain == "probability" else near

    def has(self, x: Points) -> NDArray[numpy.bool_]:
        """True for numbers inside the domain."""
        if self.discrete:
            return numpy.isin(x, [-1.0 if self.domain == "sign" else 0.0, 1.0])
        lowest, highest = {
            "probability": (0.0, 1.0), "log_probability": (-self.largest, 0.0), "positive": (5e-324, self.largest),
            "nonnegative": (0.0, self.largest),
        }.get(self.domain, (-self.largest, self.largest))  # fmt: skip
        return (x >= lowest) & (x <= highest)


def _independent(axes: Sequence[_Axis], count: int) -> Points:
    return numpy.stack([axis.draw(count) for axis in axes], axis=1)


def _close(axes: Sequence[_Axis], count: int, generator: numpy.random.Generator) -> Points:
    """Returns points where one operand is nearly another, or its opposite, or its logarithm in a logarithmic domain."""
    drawn = _independent(axes, count)
    pairs = [(i, j) for i, j in permutations(range(len(axes)), 2) if not (axes[i].discrete or axes[j].discrete)]
    for part, (i, j) in zip(numpy.array_split(numpy.arange(count), max(len(pairs), 1)), pairs, strict=False):
        beside = _converted(drawn[part, j], axes[j].domain, axes[i].domain)
        if axes[i].domain == axes[j].domain == "real":
            beside *= generator.choice([1.0, 1.0, 1.0, -1.0], len(part))
        drawn[part, i] = axes[i].nudged(beside)
    return drawn


def _converted(x: Points, given: str, wanted: str) -> Points:
    def convert(name: str, function: Callable[[Points], Points], x: Points) -> Points:
        return function(x) if name == "log_probability" and given != wanted else x

    with numpy.errstate(all="ignore"):
        return convert(wanted, numpy.log, convert(given, numpy.exp, x))


def _around(
    kinks: Sequence[tuple[float, ...]], axes: Sequence[_Axis], count: int, generator: numpy.random.Generator
) -> Points:
    """Returns points around kinks, half of them translated, since most kinks are those of a difference."""
    if not kinks:
        return numpy.empty((0, len(axes)))
    at = numpy.array(kinks, dtype=numpy.float64)[generator.integers(len(kinks), size=count)]
    moved = (generator.random(count) < 0.5) * generator.normal(scale=samples.SPREAD, size=count)
    columns = []
    for axis, x in zip(axes, at.T, strict=True):
        if not axis.discrete:
            x = axis.nudged(numpy.where(x == 0, generator.integers(2, size=count) * axis._small(count), x))
            x = x + moved if axis.domain == "real" else x
        columns.append(x)
    return numpy.stack(columns, axis=1)


def _edges(
    loss: Loss, values: Mapping[str, Any], dtypes: Sequence[str], most: int, generator: numpy.random.Generator
) -> Points:
    edges = numpy.stack([x.double().numpy() for x in samples.edges(loss, values, dtypes)], axis=1)
    edges = edges[numpy.isfinite(edges).all(axis=1)]
    return edges if len(edges) <= most else generator.permutation(edges)[:most]


def _within(exact: Points, computed: str) -> NDArray[numpy.bool_]:
    """True where operands, and their sums and differences, are in the range of the arithmetic."""
    info = numpy.finfo(computed)
    with numpy.errstate(over="ignore"):
        columns = [*exact.T, *(f(a, b) for a, b in combinations(exact.T, 2) for f in (numpy.add, numpy.subtract))]
    sizes = [numpy.abs(x) for x in columns]
    return numpy.all([(x == 0) | ((x >= info.tiny) & (x <= info.max)) for x in sizes], axis=0)
