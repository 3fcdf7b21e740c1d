"""Definition of a correct result: one metric, one table, one rule.

The metric is the error in units in the last place (ulp) of the result's own dtype. NaN equals only NaN, an infinity
equals itself, and zeros are equal whatever their sign. A finite truth beyond the largest number of the dtype stands for
infinity, which counts as the number after the largest one.

A result is accepted if its error is at most half a unit for rounding, plus an error for the arithmetic: :data:`TABLE`
times the epsilon of the arithmetic type, relative to the size of the terms (:class:`Expected`). Beyond that, an element
is still accepted if it is at least as close to the truth as torch's own result. A NaN or an infinity in the wrong place
is never accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import frexp, inf, ldexp, log2
from typing import TYPE_CHECKING, NamedTuple

from cupylosses.testing.pieces import part, pieces

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Tolerance(NamedTuple):
    """Allowed errors of the arithmetic, in epsilons of the arithmetic type.

    ``element`` is the allowed error of one element: two operations, and an ``exp`` or ``log`` that is accurate to 2
    units. ``bias`` is the additional error allowed to a sum. Errors of single elements are independent and add up like
    their root mean square, so what remains in a long sum is their common part: the rounding of a factor in every term,
    such as the logarithm of a broadcast target, which is accurate to one unit.
    """

    element: float
    bias: float


#: Tolerance by the dtype of the result. Below float64 the kernels compute in float32, and errors are measured in its
#: epsilons. For 16-bit results they compute to 2^-16, by polynomials whose error may have one sign everywhere: in
#: float16, a sixteenth of the rounding error. For float64 the truth is no more accurate than the arithmetic, so its own
#: errors add up.
TABLE: dict[str, Tolerance] = {
    "float16": Tolerance(element=128, bias=64),
    "bfloat16": Tolerance(element=128, bias=64),
    "float32": Tolerance(element=4, bias=1),
    "float64": Tolerance(element=8, bias=4),
}


#: Bias of the gradient of a broadcast operand on the CPU, where torch sums it in the arithmetic type. Kernels sum in
#: float64.
SUMMED_BY_TORCH = 8.0


#: Unit of the arithmetic at 1 for 16-bit results ("kNarrow" in ``kernels/core/scalars.cuh``).
NARROW = 2.0**-16

#: Error that flushing may cause, in multiples of the smallest normal number: 1 times the largest upstream gradient of
#: any test.
FLUSHED = 2.25


@dataclass(frozen=True)
class Expected:
    """Truth in float64, and the sizes in which errors of the arithmetic are measured.

    A result is a sum of terms. The size of a term is at least its absolute value, and larger if the term is
    ill-conditioned (see ``truth.py``). ``rms`` is the root of the sum of the squared sizes, ``total`` the sum of the
    sizes. If a result has one term, both are its size.
    """

    exact: Tensor
    rms: Tensor
    total: Tensor

    def times(self, factor: float) -> Expected:
        """Returns the truth of ``factor`` times the result."""
        return Expected(self.exact * factor, self.rms * abs(factor), self.total * abs(factor))


@dataclass(frozen=True)
class Comparison:
    """Largest error of a result, and that of another result.

    ``ulps`` is in units in the last place of the result, ``conditioned`` in units of `conditioned_unit`; ``other_...``
    are the errors of the other result.
    """

    elements: int = 0
    rejected: int = 0
    ulps: float = 0.0
    other_ulps: float | None = None
    first: str = ""
    conditioned: float = 0.0
    other_conditioned: float | None = None

    @property
    def ok(self) -> bool:
        """True if every element was accepted."""
        return self.rejected == 0

    def __str__(self) -> str:
        if self.ok:
            return f"{self.elements} elements within {self.ulps:.3g} ulp"
        return f"{self.rejected} of {self.elements} elements are wrong (up to {self.ulps:.3g} ulp), first {self.first}"


def arithmetic(name: str) -> str:
    """Returns the dtype in which a result of dtype ``name`` is computed."""
    return "float64" if name == "float64" else "float32"


def dtype_name(kind: dtype) -> str:
    """Returns the name of a dtype: ``float32`` for ``torch.float32``."""
    return str(kind).removeprefix("torch.")


def ulp(x: Tensor, kind: dtype) -> Tensor:
    """Returns the distance between adjacent numbers of dtype ``kind`` at each finite ``x``."""
    import torch

    info = torch.finfo(kind)
    lowest, highest = int(log2(info.tiny)), frexp(info.max)[1] - 1
    exponent = torch.frexp(x.double()).exponent - 1
    exponent = torch.where(x == 0, lowest, exponent).clamp(lowest, highest)
    return torch.exp2(exponent.double() + log2(info.eps))


def conditioned_unit(exact: Tensor, size: Tensor, kind: dtype, computed: str) -> Tensor:
    """Returns the unit in the last place of a result of dtype ``kind``, or that of the arithmetic if it is larger.

    The unit of the arithmetic (dtype ``computed``) is that at the size of the result. It is larger if rounded terms
    cancel.
    """
    import torch

    info = torch.finfo(getattr(torch, computed))
    # A finite size may be beyond the range of the arithmetic.
    size = torch.where(size.isfinite(), size, info.max)
    eps = max(info.eps, NARROW) if kind.itemsize == 2 and computed == "float32" else info.eps
    of_size = torch.exp2((torch.frexp(size).exponent - 1).double()) * eps
    return torch.maximum(ulp(exact, kind), of_size)


def errors(result: Tensor, exact: Tensor) -> Tensor:
    """Returns the absolute error of each element; infinite if a NaN or an infinity is in the wrong place."""
    import torch

    beyond = _beyond(result.dtype)
    value = result.double()
    finite = exact.isfinite()
    value = torch.where(finite & value.isinf(), value.sign() * beyond, value)
    wanted = torch.where(finite, exact.clamp(-beyond, beyond), exact)
    same = (value == wanted) | (value.isnan() & wanted.isnan())
    distance = torch.where(same, 0.0, (value - wanted).abs())
    return torch.where(distance.isnan(), inf, distance)


def _beyond(kind: dtype) -> float:
    """Returns the number after the largest number of a dtype; infinity if float64 cannot represent it."""
    import torch

    exponent = frexp(torch.finfo(kind).max)[1]
    return ldexp(1.0, exponent) if exponent < 1024 else inf


def allowed(expected: Expected, kind: dtype, bias: float | None = None) -> Tensor:
    """Returns the error that the table allows each element of a result of dtype ``kind``.

    ``bias`` overrides the table's.
    """
    import torch

    name = dtype_name(kind)
    tolerance, compute = TABLE[name], torch.finfo(getattr(torch, arithmetic(name)))
    computed = compute.eps * (tolerance.element * expected.rms + (bias or tolerance.bias) * expected.total)
    # The GPU flushes float32 below the smallest normal number to zero, even before an upstream gradient enlarges it.
    flushed = FLUSHED * compute.tiny if name != "float64" else 0.0
    finite = torch.where(computed.isfinite(), computed, 0.0)
    return 0.5 * ulp(expected.exact, kind) + finite + flushed


def compare(
    result: Tensor, expected: Expected, other: Tensor | None = None, bias: float | None = None, factor: float = 1.0
) -> Comparison:
    """Compares a result with ``factor`` times the truth, by the rule above.

    ``other`` is torch's own result, ``bias`` overrides the table's.

    Raises:
        ValueError: The result and the truth have different shapes.
    """
    if result.shape != expected.exact.shape:
        raise ValueError(f"the result has shape {tuple(result.shape)}, the truth {tuple(expected.exact.shape)}")
    nothing = None if other is None else 0.0
    comparison = Comparison(other_ulps=nothing, other_conditioned=nothing)
    for index in pieces(result.shape):
        cut = Expected(*(part(x, index) for x in (expected.exact, expected.rms, expected.total))).times(factor)
        theirs = None if other is None else other[index]
        comparison = _merge(comparison, _piece(result[index], cut, theirs, index, bias))
    return comparison


def _piece(
    result: Tensor, expected: Expected, other: Tensor | None, index: tuple[slice, ...], bias: float | None
) -> Comparison:
    unit = ulp(expected.exact, result.dtype)
    error = errors(result, expected.exact)
    accepted = error <= allowed(expected, result.dtype, bias)
    other_ulps = other_conditioned = None
    if other is not None:
        their_error = errors(other, expected.exact)
        accepted |= error.isfinite() & (error <= their_error)
        other_ulps, other_conditioned = _largest(their_error / unit), _conditioned(their_error, expected, result.dtype)
    rejected = int((~accepted).sum())
    first = ""
    if rejected:
        at = tuple((~accepted).nonzero()[0].tolist())
        place = tuple((i.start or 0) + n for i, n in zip(index, at, strict=True))
        first = f"at {place}: got {result[at].item()!r}, expected {expected.exact[at].item()!r}"
    ulps = _largest(error / unit), other_ulps
    conditioned = _conditioned(error, expected, result.dtype)
    return Comparison(result.numel(), rejected, *ulps, first, conditioned, other_conditioned)


def _conditioned(error: Tensor, expected: Expected, kind: dtype) -> float:
    """Returns the largest error in conditioned units; errors that flushing explains count as 0."""
    import torch

    computed = arithmetic(dtype_name(kind))
    error = torch.where(error <= FLUSHED * torch.finfo(getattr(torch, computed)).tiny, 0.0, error)
    return _largest(error / conditioned_unit(expected.exact, expected.rms, kind, computed))


def _merge(a: Comparison, b: Comparison) -> Comparison:
    return replace(
        a,
        elements=a.elements + b.elements,
        rejected=a.rejected + b.rejected,
        ulps=max(a.ulps, b.ulps),
        other_ulps=None if b.other_ulps is None else max(a.other_ulps or 0.0, b.other_ulps),
        first=a.first or b.first,
        conditioned=max(a.conditioned, b.conditioned),
        other_conditioned=(
            None if b.other_conditioned is None else max(a.other_conditioned or 0.0, b.other_conditioned)
        ),
    )


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True if two tensors agree in dtype, shape and every bit."""
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(word), b.contiguous().view(word))


def equal_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """True if both are None, or if both are tensors with the same bits."""
    return a is b if a is None or b is None else same_bits(a, b)


def require(condition: bool, message: str, *values: object) -> None:
    """Raises AssertionError with the message unless the condition holds, even under ``python -O``.

    ``values`` fill the braces of the message only then: printing a tensor takes longer than most conditions.
    """
    if not condition:
        raise AssertionError(message.format(*values) if values else message)
