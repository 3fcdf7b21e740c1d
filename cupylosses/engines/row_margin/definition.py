"""Definition of a margin loss: the scores of labels should exceed those of all other classes by a margin.

    z_ij = margin + (x_i - x_j)                   for each label j and each class i that is not a label
    value = (w_y / C) sum over i and j of h(z_ij) where z_ij > 0

A row has either one label y, with class weight w_y, or a list of labels that ends at the first -1; each label counts as
often as it is listed. The gradient follows from the derivative of the hinge h. Up to the factor w_y / C, the gradient
of class i is the sum of h'(z_ij) over the labels j, and that of label j is minus the sum of h'(z_ij) over the classes
i. A pair with z = 0 contributes 0.

This module imports no array library, no CUDA and no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cupylosses.definition.base import COMMON_TEXTS, LEGACY, Definition, Operand, code_of
from cupylosses.definition.expressions import Part, check
from cupylosses.definition.registry import define as enter
from cupylosses.engines.softmax.definition import IGNORED, REDUCTIONS, describe_row_operand, row_annotations

#: Name of z in the expression of a hinge. It is also the hinge h(z) = z, for which active pairs can be counted.
EXCESS = "excess"

#: The number that ends a list of labels.
END = -1


@dataclass(frozen=True, eq=False, kw_only=True)
class MarginLoss(Definition):
    """A margin loss of rows of scores. It must have a parameter ``margin``.

    ``several``    True if a row has a list of labels; otherwise it has one label, which may have a class weight.
    ``hinge``      Cost of a pair whose ``excess`` z is greater than 0: an expression of ``excess``.
    ``reference``  The hinge through the array API: a function of ``xp``, ``excess``, and parameters and flags by name.
    ``linear``     Pairs of a flag and a value: if all flags have these values, the hinge is the excess itself.
    """

    several: bool = False
    hinge: str = EXCESS
    reference: Callable[..., Any]
    linear: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if "margin" not in [x.name for x in self.parameters]:
            raise ValueError(f"{self.name}: a loss of rows of scores needs the parameter `margin`")

    def check_expressions(self) -> None:
        super().check_expressions()
        names = [EXCESS, *(x.name for x in self.options), *self.constants]
        check(self.hinge, names, Part(self.name, "hinge", self.places.get("hinge")))

    def is_linear(self, flags: Sequence[int]) -> bool:
        """True if, with these choices of flags, the hinge is the excess itself."""
        choices = {x.name: x.choices[i] for x, i in zip(self.flags, flags, strict=True)}
        return self.hinge == EXCESS or (bool(self.linear) and all(choices[n] == x for n, x in self.linear))

    @property
    def identity(self) -> tuple[Any, ...]:
        own = (self.operands, self.several, self.hinge, self.constants, self.parameters, self.flags, self.linear)
        return (*own, code_of(self.reference))

    @cached_property
    def array_names(self) -> tuple[str, ...]:
        return (*(x.name for x in self.operands), "None" if self.several else "weight", "mask", "normalizer")

    @cached_property
    def setting_names(self) -> tuple[str, ...]:
        return (*(x.name for x in self.options), *(x for x in self.common if x not in self.array_names))

    @cached_property
    def common(self) -> Mapping[str, Any]:
        of_one = {} if self.several else {"weight": None, "ignore_index": IGNORED}
        defaults = {"class_dim": None, "mask": None, "normalizer": None, "out_dtype": None, "check_targets": "lazy"}
        return {"reduction": "mean", **of_one, **defaults}

    @property
    def annotations(self) -> Mapping[str, str]:
        return row_annotations(self.common)

    @property
    def reserved(self) -> Collection[str]:
        return {*self.common, *LEGACY, EXCESS, "self"}

    @property
    def keywords(self) -> tuple[str, ...]:
        return self.keyword_only

    @property
    def reductions(self) -> tuple[str, ...]:
        return REDUCTIONS

    # ------------------------------------------------------------------------------------------------------------------
    # Documentation

    def describe_operand(self, operand: Operand) -> str:
        return describe_row_operand(self, operand)

    @property
    def common_texts(self) -> Mapping[str, str]:
        label = "a class, before the first -1" if self.several else "a class nor `ignore_index`"
        return _COMMON_TEXTS | {
            "check_targets": f"When a label that is {'not' if self.several else 'neither'} {label} raises: 'sync' at "
            "once, which waits for the GPU; 'lazy' at the next call after a kernel has found it; 'off' never. The loss "
            "is NaN meanwhile, and the gradient of the row 0. On CPU arrays 'lazy' is 'sync'.",
        }

    @property
    def symbols(self) -> str:
        if self.several:
            return "with T the labels of the row, and C the number of classes."
        return "with y the label, w_c the class weights, 1 by default, and C the number of classes."

    @property
    def result_text(self) -> str:
        counts = "" if self.several else ", whatever their class weights"
        return (
            "With reduction 'none' one value per row, in the shape of the rows; otherwise an array without dimensions. "
            f"'mean' divides the sum by the number of rows that count{counts}, 'batchmean' by the size of the first "
            "dimension of the rows. A mean of nothing is NaN, with gradients of 0. Differences and sums are computed "
            "in float64. The result belongs to the library and the device of the first operand, and has its dtype "
            "(float32 under autocast) unless `out_dtype` is given."
        )

    @property
    def gradient_text(self) -> str:
        return (
            f"`{self.operands[0].name}` is differentiable. {self.convention} Where the loss of a row is NaN, so is the "
            "gradient of the whole row."
        )

    @property
    def errors(self) -> Mapping[str, str]:
        cause = "not a class" if self.several else "neither a class nor `ignore_index`"
        return {**super().errors, "IndexError": f"A label is {cause}; see `check_targets`."}

    @property
    def example_operands(self) -> Mapping[str, Any]:
        first, second = self.operands
        return {first.name: _SCORES, second.name: _LISTS if self.several else _LABELS}


#: Rows of the examples in docstrings, one label for each, and lists of labels.
_SCORES = ((0.1, 0.2, 0.4, 0.8), (0.5, -0.25, 1.0, 0.0))
_LABELS = (3, 0)
_LISTS = ((3, 0, -1, -1), (2, -1, -1, -1))

_COMMON_TEXTS = COMMON_TEXTS | {
    "weight": "Weight w_c of each class, floating, of shape (C,), without a gradient. It multiplies the loss of the "
    "row, which with a weight of 0 is 0 whatever the row holds. Default None, no weights.",
    "ignore_index": "Label of rows that do not count. Their scores are not read, and their gradients are 0.",
    "class_dim": "Dimension of the classes, from either end. Default None: 1, or 0 for a single row.",
    "mask": "Bool array that broadcasts to the shape of the rows, True where a row counts. The scores of the others "
    "are not read, their gradients are 0, and a mean does not count them. Default None, no mask.",
}


def define_margin(**fields: Any) -> MarginLoss:
    """Makes a :class:`MarginLoss` and enters it in the registry, from which its public functions are built."""
    return enter(MarginLoss(**fields))
