"""The truth in high precision: a reference formula on numbers of many digits, and its derivatives.

``loss.reference(xp, *operands)`` runs unchanged on NumPy arrays of :class:`Jet`: mpmath numbers that carry their
derivatives with respect to the operands, like the dual numbers of the kernels. :data:`xp` is the array namespace of
such arrays. So there is no second formula, and a branch (``where``) or a convention at a kink (``abs``) is that of the
reference. First derivatives are the gradients; the second derivatives determine how well-conditioned these are.

Nothing overflows or underflows, and terms may cancel that floating-point formulas must keep apart. Only the rounding
within a reference remains: a constant from ``math`` is accurate to a relative error of 2^-53.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy
from mpmath import mp, mpf

from cupylosses import checks
from cupylosses.engines.pointwise.definition import Loss

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Decimal digits by dtype of the kernels' arithmetic: enough that the dtype's smallest number does not vanish next to
#: 1.
DIGITS = {"float32": 64, "float64": 350}

#: The exponential of more than 2^LARGE is infinite, that of less than -2^LARGE is 0: no dtype comes near these.
LARGE = 32


class Figure(NamedTuple):
    """Numbers to twice the digits of a float64 (``high`` + ``low``), and their size in the sense of ``truth.py``."""

    high: NDArray[numpy.float64]
    low: NDArray[numpy.float64]
    size: NDArray[numpy.float64]


class Exact(NamedTuple):
    """Value of a loss at each point, and its derivative with respect to each operand."""

    value: Figure
    gradients: tuple[Figure, ...]


def evaluate(
    loss: Loss,
    operands: Sequence[NDArray[Any]],
    values: Mapping[str, Any],
    digits: int,
    smallest: float = 0.0,
) -> Exact:
    """Computes the truth at each point.

    Args:
        loss: The definition.
        operands: One-dimensional arrays of numbers.
        values: Every parameter and flag by name (``loss.values(case)``).
        digits: The number of decimal digits of the computation.
        smallest: An exponential below this counts as 0, as in a dtype with this smallest number.

    Raises:
        NotImplementedError: the reference calls a function that :data:`xp` lacks.
    """
    if loss.reference is None:
        raise checks.no_reference(loss)
    # NumPy checks the processor's floating-point flags even where it only calls Python.
    with mp.workdps(digits), _underflow(mpf(smallest)), numpy.errstate(all="ignore"):
        numbers = {x.name: Jet(mpf(values[x.name])) for x in loss.parameters}
        arrays = [_array(Jet(mpf(float(x)), {i: _ONE}) for x in operand) for i, operand in enumerate(operands)]
        found = _lifted(loss.reference(xp, *arrays, **{**values, **numbers}))
        points = list(zip(found.tolist(), *([x.value for x in a] for a in arrays), strict=True))
        value = _figure((y.value, y.size(x)) for y, *x in points)
        return Exact(value, tuple(_figure(_derivative(y, i, x) for y, *x in points) for i in range(len(arrays))))


def _derivative(y: Jet, i: int, x: Sequence[mpf]) -> tuple[mpf, mpf]:
    """Returns a derivative and its size; NaN where the value is NaN, as in the kernels."""
    if mp.isnan(y.value):
        return y.value, _ZERO
    seconds = {j: y.second[min(i, j), max(i, j)] for j in range(len(x)) if (min(i, j), max(i, j)) in y.second}
    derivative = Jet(y.first.get(i, _ZERO), seconds)
    return derivative.value, derivative.size(x)


def _figure(pairs: Iterator[tuple[mpf, mpf]]) -> Figure:
    def split(x: mpf) -> tuple[float, float]:
        high = float(x)
        return high, float(x - high) if abs(high) != inf else 0.0

    rows = [(*split(x), float(size)) for x, size in pairs]
    return Figure(*numpy.array(rows, dtype=numpy.float64).reshape(-1, 3).T)


# ----------------------------------------------------------------------------------------------------------------------
# Numbers with derivatives

_ZERO, _ONE = mpf(0), mpf(1)


class Jet:
    """A number with its derivatives: ``first[i]`` by operand i, ``second[i, j]`` by i <= j. A missing derivative is 0.

    A missing derivative is never multiplied, so 0 * inf arises only where the formula has it.
    """

    __slots__ = ("first", "second", "value")

    def __init__(
        self,
        value: mpf,
        first: Mapping[int, mpf] | None = None,
        second: Mapping[tuple[int, int], mpf] | None = None,
    ) -> None:
        self.value, self.first, self.second = value, first or {}, second or {}

    def size(self, x: Sequence[mpf]) -> mpf:
        """Returns the distance that the number moves when the operands move, relative to their movement.

        The distance is at least the absolute value of the number.
        """
        size = abs(self.value)
        moved = mp.fsum(abs(x[i] * d) for i, d in self.first.items() if mp.isfinite(d))
        return max(moved, size) if mp.isfinite(size) else _ZERO

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        return f"Jet({mp.nstr(self.value)})"

    def __add__(self, other: Any) -> Any:
        return _binary(_add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _binary(_add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _binary(_subtract, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _binary(_subtract, other, self)

    def __mul__(self, other: Any) -> Any:
        return _binary(_multiply, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _binary(_multiply, other, self)

    def __truediv__(self, other: Any) -> Any:
        return _binary(_divide, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _binary(_divide, other, self)

    def __pow__(self, other: Any) -> Any:
        return _binary(_power, self, other)

    def __rpow__(self, other: Any) -> Any:
        return _binary(_power, other, self)

    def __neg__(self) -> Jet:
        return _multiply(Jet(-_ONE), self)

    def __pos__(self) -> Jet:
        return self

    def __abs__(self) -> Jet:
        return _FUNCTIONS["abs"](self)

    def __lt__(self, other: Any) -> Any:
        return _compared(mpf.__lt__, self, other)

    def __le__(self, other: Any) -> Any:
        return _compared(mpf.__le__, self, other)

    def __gt__(self, other: Any) -> Any:
        return _compared(mpf.__gt__, self, other)

    def __ge__(self, other: Any) -> Any:
        return _compared(mpf.__ge__, self, other)

    def __eq__(self, other: Any) -> Any:
        return _compared(mpf.__eq__, self, other)

    def __ne__(self, other: Any) -> Any:
        return _compared(mpf.__ne__, self, other)

    __hash__ = None  # type: ignore[assignment]


def _lift(x: Any) -> Jet:
    return x if isinstance(x, Jet) else Jet(mpf(int(x) if isinstance(x, (bool, numpy.bool_, numpy.integer)) else x))


def _binary(operator: Callable[[Jet, Jet], Jet], a: Any, b: Any) -> Any:
    if isinstance(a, numpy.ndarray) or isinstance(b, numpy.ndarray):
        return NotImplemented  # Makes NumPy process the elements one by one.
    return operator(_lift(a), _lift(b))


def _compared(relation: Callable[[mpf, mpf], bool], a: Jet, b: Any) -> Any:
    return NotImplemented if isinstance(b, numpy.ndarray) else bool(relation(a.value, _lift(b).value))


def _chain(
    value: mpf, arguments: Sequence[Jet], slopes: Sequence[mpf], curvatures: Mapping[tuple[int, int], mpf]
) -> Jet:
    """Applies the chain rule to a function of ``arguments`` with these first and second partial derivatives."""
    first: dict[int, mpf] = {}
    second: dict[tuple[int, int], mpf] = {}
    for argument, slope in zip(arguments, slopes, strict=True):
        for i, x in argument.first.items():
            first[i] = first.get(i, _ZERO) + slope * x
        for ij, x in argument.second.items():
            second[ij] = second.get(ij, _ZERO) + slope * x
    for (k, m), curvature in curvatures.items():
        for i, x in arguments[k].first.items():
            for j, y in arguments[m].first.items():
                # For two arguments, (i, j) and (j, i) are two terms of one derivative; for one, they are the same.
                if k != m or i <= j:
                    term = curvature * x * y
                    ij = min(i, j), max(i, j)
                    second[ij] = second.get(ij, _ZERO) + (2 * term if k != m and i == j else term)
    return Jet(value, first, second)


def _add(a: Jet, b: Jet) -> Jet:
    return _chain(a.value + b.value, (a, b), (_ONE, _ONE), {})


def _subtract(a: Jet, b: Jet) -> Jet:
    return _chain(a.value - b.value, (a, b), (_ONE, -_ONE), {})


def _multiply(a: Jet, b: Jet) -> Jet:
    return _chain(a.value * b.value, (a, b), (b.value, a.value), {(0, 1): _ONE})


def _divide(a: Jet, b: Jet) -> Jet:
    if not b.first:
        inverse = _quotient(_ONE, b.value)
        return _chain(_quotient(a.value, b.value), (a,), (inverse,), {})
    return _multiply(a, _FUNCTIONS["reciprocal"](b)) if a.first else _over(a.value, b)


def _over(a: mpf, b: Jet) -> Jet:
    value = _quotient(a, b.value)
    slope = -_quotient(value, b.value)
    return _chain(value, (b,), (slope,), {(0, 0): -2 * _quotient(slope, b.value)})


def _power(a: Jet, b: Jet) -> Jet:
    x, n = a.value, b.value
    value = _raised(x, n)
    slope = n * _raised(x, n - 1) if n else _ZERO
    if not b.first:
        curvature = n * (n - 1) * _raised(x, n - 2) if n not in (0, 1) else _ZERO
        return _chain(value, (a,), (slope,), {(0, 0): curvature})
    log = _log(x)
    by_exponent = value * log if value else _ZERO
    curvatures = {
        (0, 0): n * (n - 1) * _raised(x, n - 2) if n not in (0, 1) else _ZERO,
        (0, 1): _raised(x, n - 1) + slope * log,
        (1, 1): by_exponent * log if value else _ZERO,
    }
    return _chain(value, (a, b), (slope, by_exponent), curvatures)


# ----------------------------------------------------------------------------------------------------------------------
# Functions of numbers, with the limits and NaNs of floating-point arithmetic

_NAN, _INF = mpf("nan"), mpf("inf")


def _quotient(a: mpf, b: mpf) -> mpf:
    if b:
        return a / b
    return a * _INF


def _sign(x: mpf) -> mpf:
    return x if mp.isnan(x) else mpf((x > 0) - (x < 0))


#: Exponentials below this are 0; see `evaluate`.
_smallest = _ZERO


@contextmanager
def _underflow(smallest: mpf) -> Iterator[None]:
    global _smallest
    before, _smallest = _smallest, smallest
    try:
        yield
    finally:
        _smallest = before


def _exp(x: mpf) -> mpf:
    if mp.isfinite(x) and mp.mag(x) > LARGE:
        return _INF if x > 0 else _ZERO
    y = mp.exp(x)
    return _ZERO if y < _smallest else y


def _expm1(x: mpf) -> mpf:
    return mp.expm1(x) if abs(x) < 1 else _exp(x) - 1


def _log(x: mpf) -> mpf:
    if x > 0:
        return mp.log(x)
    return -_INF if x == 0 else _NAN


def _log1p(x: mpf) -> mpf:
    return mp.log1p(x) if abs(x) < 0.5 else _log(1 + x)


def _sqrt(x: mpf) -> mpf:
    return mp.sqrt(x) if x >= 0 else _NAN


def _raised(x: mpf, n: mpf) -> mpf:
    if n == 0:
        return _ONE
    if x == 0:
        return _ZERO if n > 0 else _INF
    if not (mp.isfinite(x) and mp.isfinite(n)):
        return _exp(n * _log(x))
    return mp.power(x, n) if x > 0 or mp.isint(n) else _NAN


def _sinh(x: mpf) -> mpf:
    return mp.sinh(x) if abs(x) < 1 else (_exp(x) - _exp(-x)) / 2


def _cosh(x: mpf) -> mpf:
    return (_exp(x) + _exp(-x)) / 2


def _squared_secant(x: mpf) -> mpf:
    # Not 1 - tanh^2, which soon cancels to 0 at any number of digits.
    return _quotient(_ONE, _cosh(x) ** 2)


def _of(
    value: Callable[[mpf], mpf],
    slope: Callable[[mpf, mpf], mpf] | None = None,
    curvature: Callable[[mpf, mpf], mpf] | None = None,
) -> Callable[[Jet], Jet]:
    """Makes a function of jets from a function of numbers, and its derivatives in terms of x and the value.

    A missing derivative is 0.
    """

    def function(x: Jet) -> Jet:
        y = value(x.value)
        if not x.first or slope is None:
            return Jet(y)
        bent = {} if curvature is None else {(0, 0): curvature(x.value, y)}
        return _chain(y, (x,), (slope(x.value, y),), bent)

    return function


def _logarithm(base: int | None) -> Callable[[Jet], Jet]:
    def slope(x: mpf, _: mpf) -> mpf:
        return _quotient(_ONE, x) if base is None else _quotient(_ONE, x * mp.log(base))

    value = _log if base is None else (lambda x: _log(x) / mp.log(base))
    return _of(value, slope, lambda x, y: -_quotient(slope(x, y), x))


_FUNCTIONS: dict[str, Callable[[Jet], Jet]] = {
    "abs": _of(abs, lambda x, _: _sign(x)),
    "sign": _of(_sign),
    "floor": _of(mp.floor),
    "ceil": _of(mp.ceil),
    "round": _of(mp.nint),
    "square": _of(lambda x: x * x, lambda x, _: 2 * x, lambda *_: mpf(2)),
    "reciprocal": _of(
        lambda x: _quotient(_ONE, x), lambda x, y: -_quotient(y, x), lambda x, y: _quotient(2 * y, x * x)
    ),
    "sqrt": _of(_sqrt, lambda _, y: _quotient(_ONE, 2 * y), lambda x, y: -_quotient(_ONE, 4 * x * y)),
    "exp": _of(_exp, lambda _, y: y, lambda _, y: y),
    "expm1": _of(_expm1, lambda x, _: _exp(x), lambda x, _: _exp(x)),
    "log": _logarithm(None),
    "log2": _logarithm(2),
    "log10": _logarithm(10),
    "log1p": _of(_log1p, lambda x, _: _quotient(_ONE, 1 + x), lambda x, _: -_quotient(_ONE, (1 + x) ** 2)),
    "sin": _of(mp.sin, lambda x, _: mp.cos(x), lambda _, y: -y),
    "cos": _of(mp.cos, lambda x, _: -mp.sin(x), lambda _, y: -y),
    "sinh": _of(_sinh, lambda x, _: _cosh(x), lambda _, y: y),
    "cosh": _of(_cosh, lambda x, _: _sinh(x), lambda _, y: y),
    "tanh": _of(mp.tanh, lambda x, _: _squared_secant(x), lambda x, y: -2 * y * _squared_secant(x)),
    "atan": _of(mp.atan, lambda x, _: _quotient(_ONE, 1 + x * x), lambda x, _: -_quotient(2 * x, (1 + x * x) ** 2)),
}


# ----------------------------------------------------------------------------------------------------------------------
# Arrays of jets


class Jets(numpy.ndarray):
    """An array of jets."""

    #: A zero on paper is an exact zero here.
    exact = True

    def detach(self) -> Jets:
        """Returns the numbers as constants, like torch's ``detach``."""
        return numpy.frompyfunc(lambda x: Jet(x.value), 1, 1)(self)


def _array(jets: Iterable[Jet]) -> Jets:
    listed = list(jets)
    array = numpy.empty(len(listed), dtype=object)
    array[:] = listed
    return array.view(Jets)


def _lifted(x: Any) -> Jets:
    """Converts an array of jets and other numbers to an array of jets."""
    return numpy.asarray(numpy.frompyfunc(_lift, 1, 1)(x)).view(Jets)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return _lifted(numpy.where(condition, a, b))


def _larger(a: Any, b: Any) -> Any:
    """Returns the larger number; as in torch, equal numbers count half each, and NaN with anything is NaN."""
    return _where(_is(mp.isnan, a) | (a > b), a, _where(_is(mp.isnan, b) | (b > a), b, (a + b) / 2))


def _smaller(a: Any, b: Any) -> Any:
    return -_larger(-a, -b)


def _clipped(x: Any, min: Any = None, max: Any = None) -> Any:
    """Returns ``x`` within bounds; on a bound its derivative is 1, as in torch."""
    x = x if min is None else _where(x < min, min, x)
    return x if max is None else _where(x > max, max, x)


def _is(test: Callable[[mpf], bool], x: Any) -> Any:
    return numpy.frompyfunc(lambda y: bool(test(_lift(y).value)), 1, 1)(x).astype(bool)


class Namespace:
    """The functions of the array API that references use, for arrays of jets. dtypes and devices are ignored."""

    inf, nan = inf, float("nan")
    float32 = float64 = None
    e = property(lambda _: Jet(+mp.e))
    pi = property(lambda _: Jet(+mp.pi))

    where = staticmethod(_where)
    maximum = staticmethod(_larger)
    minimum = staticmethod(_smaller)
    clip = staticmethod(_clipped)
    add = staticmethod(lambda a, b: a + b)
    subtract = staticmethod(lambda a, b: a - b)
    multiply = staticmethod(lambda a, b: a * b)
    divide = staticmethod(lambda a, b: _lifted(a) / b)
    pow = staticmethod(lambda a, b: _lifted(a) ** b)
    negative = staticmethod(lambda x: -x)
    isnan = staticmethod(lambda x: _is(mp.isnan, x))
    isinf = staticmethod(lambda x: _is(mp.isinf, x))
    isfinite = staticmethod(lambda x: _is(mp.isfinite, x))
    logical_and, logical_or, logical_not = map(staticmethod, (numpy.logical_and, numpy.logical_or, numpy.logical_not))
    zeros_like = staticmethod(lambda x, **_: _lifted(numpy.zeros(numpy.shape(x))))
    ones_like = staticmethod(lambda x, **_: _lifted(numpy.ones(numpy.shape(x))))
    full_like = staticmethod(lambda x, value, **_: _lifted(numpy.full(numpy.shape(x), value, dtype=object)))
    asarray = staticmethod(lambda x, **_: _lifted(x))
    astype = staticmethod(lambda x, *_, **__: _lifted(x))
    broadcast_to = staticmethod(numpy.broadcast_to)
    broadcast_arrays = staticmethod(numpy.broadcast_arrays)

    def __getattr__(self, name: str) -> NoReturn:
        raise NotImplementedError(
            f"a reference formula calls `xp.{name}`, which {__name__} does not have; add it there, with its derivatives"
        )


for _name, _function in _FUNCTIONS.items():
    setattr(Namespace, _name, staticmethod(numpy.frompyfunc(lambda x, of=_function: of(_lift(x)), 1, 1)))

xp = Namespace()
