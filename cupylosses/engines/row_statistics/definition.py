"""Definition of a loss whose value per row is a formula of statistics: sums over the features of the row, or norms.

    s_k = sum_i e_k(x_i)                  for each statistic, with x_i the operands at feature i
    s_k = (sum_i |e_k(x_i)|^p)^(1/p)      for each norm; the maximum of |e_k(x_i)| if p is infinite
    value = f(s, row operands)            once per row, in double

Derivatives follow from the expressions. With a_k = df / ds_k, the gradient at feature i is sum_k a_k de_k / dx_i; the
term of a norm has the additional factor sign(e_k) (|e_k| / s_k)^(p - 1).

This module imports no array library, no CUDA and no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, ClassVar

from cupylosses.definition.base import ANNOTATIONS, COMMON_TEXTS, LEGACY, Definition, Operand, code_of
from cupylosses.definition.expressions import Part, check
from cupylosses.definition.registry import define as enter
from cupylosses.definition.registry import define_function

#: Keyword arguments that all losses of the engine share, with their defaults.
COMMON: Mapping[str, Any] = {
    "reduction": "mean", "weight": None, "mask": None, "normalizer": None, "feature_dim": -1, "out_dtype": None,
}  # fmt: skip


#: Maximum number of inputs of the formula of a row: statistics, norms, row operands and the weight. Each is one slot
#: of the dual numbers (``kernels/core/dual.cuh``).
MAX_SLOTS = 12

#: Name of the parameter that is the degree of the norms.
DEGREE = "p"
#: Largest degree for which kernels sum powers of float32 components without scaling: ``kMostDegree`` in
#: row_statistics.cuh.
MOST_DEGREE = 6
#: Largest degree for which ``narrow_power`` is accurate to float32.
MOST_NARROW_DEGREE = 64
#: Largest degree for which kernels sum powers relative to a scale that is a power of two: ``kShiftedPowers``.
MOST_SHIFTED_DEGREE = 256


#: Types of arguments in stubs.
_ANNOTATIONS: Mapping[str, str] = {
    **ANNOTATIONS,
    "feature_dim": "int",
    "distance_function": "Callable[[Any, Any], Any] | None",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class StatisticsLoss(Definition):
    """A loss of rows of features.

    ``row_operands``  Names of the operands that have one value per row and no feature dimension.
    ``statistics``    Maps the name of each statistic to its summand, an expression of the operands with features.
    ``norms``         Maps the name of each norm to its component, likewise. The degree of all norms is the parameter
                      ``p`` > 0, or 2 if there is none. Kernels are specialised on small integers and infinity.
    ``only_with``     Maps the name of a statistic or norm to a flag: it is computed only if the flag is set.
    ``first``         Maps a name to an operand: the name stands for the operand's first element in the row and is
                      differentiated as a constant. Subtracting it preserves digits in sums of squares; it must not
                      change the value otherwise.
    ``let``           Named subexpressions of the value: expressions of the statistics, the row operands and ``count``,
                      the number of features.
    ``value``         Value of a row, an expression of these names.
    ``reference``     Value of each row through the array API: a function of ``xp``, of the operands in float64 with
                      the features last, and of parameters and flags by name. Losses defined by users may omit it.
    """

    row_operands: tuple[str, ...] = ()
    statistics: Mapping[str, str] = field(default_factory=dict)
    norms: Mapping[str, str] = field(default_factory=dict)
    only_with: Mapping[str, str] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)
    let: Mapping[str, str] = field(default_factory=dict)
    value: str
    reference: Callable[..., Any] | None = None

    derivatives_by_formula: ClassVar[str] = "third derivatives, or second ones with many statistics,"

    #: Name of the argument that selects the feature dimension.
    dimension: ClassVar[str] = "feature_dim"

    def chosen(
        self, arrays: tuple[Any, ...], settings: tuple[Any, ...]
    ) -> tuple[Definition, tuple[Any, ...], tuple[Any, ...]]:
        """Returns the definition that computes this call, with its arrays and settings."""
        return self, arrays, settings

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.constants, *self.first, *self.statistics, *self.norms, *self.let)

    def check_expressions(self) -> None:
        super().check_expressions()
        self._check_terms()
        known = [*(x.name for x in self.options), *self.constants]
        features = [x.name for x in self.operands if x.name not in self.row_operands]
        for name, expression in self.terms().items():
            check(expression, [*features, *self.first, *known], Part(self.name, name, self.places.get(name)))
        names = [*known, *self.terms(), *self.first, *self.row_operands, "count"]
        for name, expression in self.let.items():
            check(expression, names, Part(self.name, name, self.places.get(name)))
            names.append(name)
        check(self.value, names, Part(self.name, "value", self.places.get("value")))

    def _check_terms(self) -> None:
        """Raises ValueError if there are more terms than kernels support, or if a name refers to nothing."""
        terms, features = self.terms(), {x.name for x in self.operands} - {*self.row_operands}
        if not features:
            raise ValueError(f"{self.name}: expected an operand with features, got only `row_operands`")
        size = len(terms) + len(self.row_operands) + 1  # a weight
        if not terms or size > MAX_SLOTS:
            most = MAX_SLOTS - 1 - len(self.row_operands)
            raise ValueError(f"{self.name}: expected 1 to {most} `statistics` and `norms`, got {len(terms)}")
        for name, operand in self.first.items():
            if operand not in features:
                raise ValueError(
                    f"{self.name}: `first` names {operand!r} for `{name}`, expected one of {sorted(features)}"
                )
        if len({*self.first.values()}) != len(self.first):
            raise ValueError(f"{self.name}: `first` must have one name for each operand, got {dict(self.first)}")
        for name, flag in self.only_with.items():
            if name not in terms or flag not in {x.name for x in self.flags}:
                raise ValueError(
                    f"{self.name}: `only_with` must name a flag for a statistic or norm, got {flag!r} for {name!r}"
                )

    @property
    def identity(self) -> tuple[Any, ...]:
        own = (
            self.operands,
            self.row_operands,
            self.statistics,
            self.norms,
            self.first,
            self.value,
            self.let,
            self.constants,
        )
        return (*own, self.only_with, self.parameters, self.flags, code_of(self.reference))

    def terms(self, flags: Sequence[int] | None = None) -> dict[str, str]:
        """Returns the expressions of statistics and norms by name, without those that these choices of flags disable
        (see ``only_with``).
        """
        terms = {**self.statistics, **self.norms}
        if flags is None:
            return terms
        enabled = {x.name for x, i in zip(self.flags, flags, strict=True) if x.choices[i]}
        return {name: x for name, x in terms.items() if self.only_with.get(name) in (None, *enabled)}

    def norm_of(self, parameters: Sequence[float]) -> str:
        """Returns the kernels' name for the degree of norms of float32: a small integer; "p" for any other degree up to
        `MOST_DEGREE`; "narrow" or "shifted" for larger degrees; "inf"; "scaled" for all others; "" without norms.
        """
        if not self.norms:
            return ""
        degree = dict(zip([x.name for x in self.parameters], parameters, strict=False)).get(DEGREE, 2.0)
        if degree <= MOST_DEGREE:
            return f"{degree:.0f}" if degree == int(degree) else "p"
        if degree <= MOST_SHIFTED_DEGREE:
            return "narrow" if degree <= MOST_NARROW_DEGREE else "shifted"
        return "inf" if degree == inf else "scaled"

    @cached_property
    def vector_slots(self) -> tuple[int, ...]:
        """Positions of the operands with features."""
        return tuple([i for i, x in enumerate(self.operands) if x.name not in self.row_operands])

    @cached_property
    def setting_names(self) -> tuple[str, ...]:
        return ("reduction", *(x.name for x in self.options), "feature_dim", "out_dtype")

    @property
    def common(self) -> Mapping[str, Any]:
        return COMMON

    @property
    def annotations(self) -> Mapping[str, str]:
        return _ANNOTATIONS

    @property
    def reserved(self) -> Collection[str]:
        return {*COMMON, *LEGACY, "unweighted", "count", "self"}

    @property
    def keywords(self) -> tuple[str, ...]:
        return tuple(x for x in COMMON if x != "reduction")

    # ------------------------------------------------------------------------------------------------------------------
    # Documentation

    def describe_operand(self, operand: Operand) -> str:
        dtypes = "floating, integer or bool" if operand.integer else "floating"
        shape = (
            "The shape of the rows, or one that broadcasts to it"
            if operand.name in self.row_operands
            else "Shape (N, D), (D,), or any shape that broadcasts with the others, with the features in `feature_dim`"
        )
        return f"{operand.doc} {shape}; {dtypes}. Domain: {operand.domain_text}."

    @property
    def common_texts(self) -> Mapping[str, str]:
        return _COMMON_TEXTS

    @property
    def result_text(self) -> str:
        return (
            "With reduction 'none' one value per row, in the broadcast shape without `feature_dim`; otherwise an array "
            "without dimensions. 'mean' divides the sum by the number of rows that the mask keeps, 'weighted_mean' by "
            "the sum of their weights, 'batchmean' by the size of the first dimension of the rows. A mean of nothing "
            "is NaN, with gradients of 0. Sums over rows and their formula are computed in float64. The result belongs "
            "to the library and the device of the first operand, and has the promoted dtype of all operands unless "
            "`out_dtype` is given."
        )

    @property
    def gradient_text(self) -> str:
        return (
            f"Every floating operand is differentiable. {self.convention} Where the loss of a row is NaN, so is the "
            "gradient of the whole row."
        )

    @property
    def example_operands(self) -> Mapping[str, Any]:
        vectors = iter(_SAMPLES)
        return {x.name: _SIGNS if x.name in self.row_operands else next(vectors) for x in self.operands}


@dataclass(frozen=True, eq=False, kw_only=True)
class StatisticsFunction(StatisticsLoss):
    """A function of rows that is not a loss: it returns one value per row and has no reduction.

    ``dim``  Default of the argument ``dim``, the feature dimension. With None there is no such argument: the features
             are in the last dimension. If the flag ``keepdim`` is set, the result has a last dimension of size 1.
    """

    packs: ClassVar[bool] = True
    dimension: ClassVar[str] = "dim"

    dim: int | None = None

    @cached_property
    def array_names(self) -> tuple[str, ...]:
        return (*(x.name for x in self.operands), "None", "None", "None")

    @cached_property
    def setting_names(self) -> tuple[str, ...]:
        return ('"none"', *(x.name for x in self.options), "-1" if self.dim is None else "dim", "out_dtype")

    @property
    def common(self) -> Mapping[str, Any]:
        return {**({} if self.dim is None else {"dim": self.dim}), "out_dtype": None}

    @property
    def annotations(self) -> Mapping[str, str]:
        return {**_ANNOTATIONS, "dim": "int"}

    @property
    def reserved(self) -> Collection[str]:
        return {"dim", "out_dtype", "unweighted", "count", "self"}

    @property
    def keywords(self) -> tuple[str, ...]:
        return tuple(self.common)

    @property
    def reductions(self) -> tuple[str, ...]:
        return ("none",)

    def describe_operand(self, operand: Operand) -> str:
        lies = "last" if self.dim is None else "in `dim`"
        return f"{operand.doc} Any shape that broadcasts with the other, with the features {lies}; floating."

    @property
    def common_texts(self) -> Mapping[str, str]:
        return _COMMON_TEXTS | {"dim": "Dimension of the features in the broadcast shape, from either end."}

    @property
    def result_text(self) -> str:
        return (
            "One value per row, in the broadcast shape without the dimension of the features, of the library and on "
            "the device of the first operand, in the promoted dtype of the operands unless `out_dtype` is given. Sums "
            "over rows and their formula are computed in float64."
        )

    @property
    def gradient_text(self) -> str:
        return f"Both operands are differentiable. {self.convention}"


#: Operands of the examples in docstrings: rows of features, and one label per row.
_SAMPLES: Sequence[Any] = (
    ((1.0, 2.0, 2.0), (0.5, -1.0, 0.0)),
    ((2.0, 0.0, 1.0), (1.0, -2.0, 0.5)),
    ((0.0, 1.0, 4.0), (-1.0, 1.0, 1.0)),
)
_SIGNS = (1.0, -1.0)

_COMMON_TEXTS = COMMON_TEXTS | {
    "weight": "Factor of each row: a number, or an array that broadcasts to the shape of the rows; differentiable. A "
    "row of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN. Default "
    "None, no weights.",
    "mask": "Bool array that broadcasts to the shape of the rows, True where a row counts. The others are not read, "
    "their gradients are 0, and a mean does not count them. Default None, no mask.",
    "feature_dim": "Dimension of the features in the broadcast shape, from either end.",
}


def define_statistics(
    kind: type[StatisticsLoss] = StatisticsLoss,
    *,
    operands: tuple[Operand, ...],
    row_operands: tuple[Operand, ...] = (),
    **fields: Any,
) -> StatisticsLoss:
    """Makes a :class:`StatisticsLoss` and enters it in the registry, from which the public functions are built."""
    names = tuple(x.name for x in row_operands)
    return enter(kind(operands=(*operands, *row_operands), row_operands=names, **fields))


def define_statistics_function(**fields: Any) -> StatisticsFunction:
    """Makes a :class:`StatisticsFunction` and enters it in the registry, from which its public function is built."""
    return define_function(StatisticsFunction(**fields))
