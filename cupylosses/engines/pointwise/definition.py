"""Definitions of element-wise losses, and losses modified by numbers, weights and masks.

A call may add a weight and a mask to a loss, and pass numbers instead of operands. The result is a loss of its own
(:class:`ModifiedLoss`), so the engine has no special case for weights and masks: they are operands like the others,
broadcast like them, and read in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from itertools import compress, product
from typing import Any

from cupylosses.definition.base import (
    COMMON_TEXTS,
    MASK,
    WEIGHT,
    Definition,
    Kink,
    Operand,
    Parameter,
    code_of,
)
from cupylosses.definition.expressions import Part, check
from cupylosses.definition.registry import define as enter
from cupylosses.definition.registry import remember
from cupylosses.reference_math import follows, tangent_plane


def _no_kinks(**_: Any) -> Sequence[Kink]:
    return ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Loss(Definition):
    """An element-wise loss.

    Attributes:
        value: CUDA expression of an element.
        reference: Formula of an element through the array API.
        let: Named parts of the expression, in order.
        derivatives: Hand-written derivatives of the value by name of the operand, where those of the dual numbers
            cancel.
        mean_of_rows: True if an element of the result is the mean over the last dimension.
        warn_broadcast: True if operands of different shapes warn, as in torch's function.
        heavy: Cost of an element: 1 if four vectors in flight would spill registers, 2 if two vectors of 16-bit numbers
            would, too, 3 if one would in tiles, or beside sums of gradients along columns.
        tentative: Condition on the parameters under which 16-bit elements are evaluated tentatively first, without what
            only the edges of the domain need.
        kinks: Function of parameters and flags that returns the points where the derivative is a convention.
    """

    value: str
    reference: Callable[..., Any] | None = None
    let: Mapping[str, str] = field(default_factory=dict)
    derivatives: Mapping[str, str] = field(default_factory=dict)
    mean_of_rows: bool = False
    warn_broadcast: bool = False
    heavy: int = 0
    tentative: str = ""
    kinks: Callable[..., Sequence[Kink]] = _no_kinks

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.constants, *self.let)

    def check_expressions(self) -> None:
        super().check_expressions()
        names = [*(x.name for x in self.operands), *(x.name for x in self.options), *self.constants]
        for name, expression in self.let.items():
            check(expression, names, Part(self.name, name, self.places.get(name)))
            names.append(name)
        check(self.value, names, Part(self.name, "value", self.places.get("value")))
        if self.tentative:
            numbers = [*(x.name for x in self.parameters), *(x.name for x in self.operands if x.default is not None)]
            check(self.tentative, numbers, Part(self.name, "tentative", self.places.get("tentative")), functions={})
        for name, expression in self.derivatives.items():
            if name not in {x.name for x in self.operands}:
                raise ValueError(f"{self.name}: a derivative for {name!r}, which is no operand")
            part = f"derivatives.{name}"
            check(expression, names, Part(self.name, part, self.places.get(part)))

    @property
    def identity(self) -> tuple[Any, ...]:
        attributes = (
            self.operands,
            self.value,
            self.let,
            self.constants,
            self.derivatives,
            self.parameters,
            self.flags,
        )
        return (*attributes, self.tentative, code_of(self.reference))

    @cached_property
    def modifications(self) -> Mapping[Any, Loss]:
        """Every modified loss that a call can make of this one (:func:`all_modified`)."""
        return all_modified(self)

    def resolve(self) -> None:
        super().resolve()
        for x in self.modifications.values():
            _ = x.key

    @cached_property
    def takes_numbers(self) -> bool:
        """True if a number may replace one of the operands."""
        return any(x.number or x.default is not None for x in self.operands)

    # ------------------------------------------------------------------------------------------------------------------
    # Documentation

    def describe_operand(self, operand: Operand) -> str:
        dtypes = "floating, integer or bool" if operand.integer else "floating"
        number = ", or a number" if operand.number else ""
        shape = "Any shape" if len(self.operands) == 1 else "Any shape that broadcasts with the other operands"
        if operand.per_row:
            shape = (
                f"The shape of `{self.operands[0].name}`, or with 1 for dimensions that share a value, or without the "
                "last dimension for one value per row"
            )
        default = "" if operand.default is None else f" Default {operand.default:g}."
        return f"{operand.doc} {shape}; {dtypes}{number}. Domain: {operand.domain_text}.{default}"

    @property
    def common_texts(self) -> Mapping[str, str]:
        return _COMMON_TEXTS

    @property
    def result_text(self) -> str:
        if self.mean_of_rows:
            divisors = (
                "With reduction 'none' the mean over the last dimension, one value per row; 'sum' adds these, 'mean' "
                "averages them. 'weighted_mean' divides the sum of all elements by the sum of their weights, "
                "'batchmean' divides the sum of the rows by the size of the first dimension. With `dim`, elements are "
                "reduced, not rows."
            )
        else:
            divisors = (
                "With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with "
                "`dim` of the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask "
                "keeps, 'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension."
            )
        if self.mean_of_weights:
            divisors += " As in torch, and unlike in other losses, 'mean' with a weight is 'weighted_mean'."
        return (
            f"{divisors} A mean of nothing is NaN, with gradients of 0. The result belongs to the library and the "
            "device of the first operand, and has the promoted dtype of all operands unless `out_dtype` is given."
        )

    @property
    def errors(self) -> Mapping[str, str]:
        errors = dict(super().errors)
        errors["ValueError"] = (
            "Shapes do not broadcast, operands are on different devices, or an option is out of range."
        )
        return errors


#: Descriptions of the arguments that all element-wise losses share.
_COMMON_TEXTS = COMMON_TEXTS | {
    "weight": "Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An "
    "element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN. "
    "Default None, no weights.",
    "mask": "Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing "
    "to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.",
    "dim": "Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or "
    "'weighted_mean'; the others are kept. Default None, all dimensions.",
}


def define(**fields: Any) -> Loss:
    """Makes a :class:`Loss` and enters it in the registry, from which the public functions are built."""
    return enter(Loss(**fields))


# ----------------------------------------------------------------------------------------------------------------------
# Modified losses


@dataclass(frozen=True, eq=False)
class ModifiedLoss(Loss):
    """A loss with ``numbers`` instead of some operands, an optional weight (array or number) and an optional mask.

    An element that is masked out or has weight 0 is 0 whatever its operands hold, and so are its gradients: the element
    is replaced, not multiplied. The derivative with respect to a weight of 0 is still the element, where that is
    finite. It depends on the operands as the element does, where the element's derivatives are finite.
    """

    base: Loss | None = None
    numbers: frozenset[str] = frozenset()
    weight: str | None = None
    mask: bool = False

    def __post_init__(self) -> None:
        """Skips the validation: the loss and its modifications were validated before."""

    @cached_property
    def key(self) -> str:
        """Key of the base loss, followed by its modifications."""
        base = self.base or self
        numbers = ",".join(sorted(self.numbers))
        return f"{base.key}~{numbers}~{self.weight or ''}~{'mask' * self.mask}~"

    @property
    def suffix(self) -> str:
        """Suffix of kernel names that distinguishes this loss from other modifications of its base."""
        parts = [f"{x.name}-number" for x in (self.base or self).operands if x.name in self.numbers]
        return "_".join([*parts, *([f"weight-{self.weight}"] if self.weight else []), *(["mask"] if self.mask else [])])


@cache
def modified(loss: Loss, numbers: frozenset[str] = frozenset(), weight: str | None = None, mask: bool = False) -> Loss:
    """Returns a loss with these modifications, cached; the loss itself if there are none.

    ``weight`` is ``"array"``, ``"number"`` or None. Numbers become parameters after those of the loss, in the order of
    the operands, the weight last. A weight array and a mask become the last operands.
    """
    if not numbers and weight is None and not mask:
        return loss
    added = [WEIGHT] if weight == "array" else []
    operands = (*(x for x in loss.operands if x.name not in numbers), *added, *([MASK] if mask else []))
    constants = [*(x for x in loss.operands if x.name in numbers), *([WEIGHT] if weight == "number" else [])]
    parameters = (*loss.parameters, *(Parameter(x.name, _typical(x, loss.values()), x.doc) for x in constants))
    attributes = {x.name: getattr(loss, x.name) for x in fields(Loss)}
    attributes |= {"operands": operands, "parameters": parameters, "kinks": Loss.kinks, "cases": ({},)}
    attributes["reference"] = loss.reference and _reference(loss, [x.name for x in operands], weight, mask)
    return ModifiedLoss(**attributes, base=loss, numbers=numbers, weight=weight, mask=mask)


def all_modified(loss: Loss) -> dict[tuple[tuple[str, ...], str | None, bool], Loss]:
    """Returns every modified loss, by names of numbers in the order of the operands, weight, and mask.

    All are made in advance, because torch.compile can trace a lookup in a constant dictionary but no construction.
    """
    able = [x.name for x in loss.operands if x.number or x.default is not None]
    subsets = [tuple(compress(able, x)) for x in product((False, True), repeat=len(able))]
    return {
        (numbers, weight, mask): modified(loss, frozenset(numbers), weight, mask)
        for numbers, weight, mask in product(subsets, (None, "array", "number"), (False, True))
    }


def _typical(operand: Operand, values: Mapping[str, Any]) -> float:
    """Returns a number at which every loss is smooth in this operand, under these flags."""
    if operand.default is not None:
        return operand.default
    # One half is a probability, a real and a positive number, but neither a sign nor a logarithm of a probability.
    return {"log_probability": -0.75, "sign": 1.0}.get(operand.domain_for(values), 0.5)


def _reference(loss: Loss, names: list[str], weighted: str | None, masked: bool) -> Callable[..., Any]:
    """Returns the reference formula of a modified loss, from that of its base."""
    formula = loss.reference
    assert formula is not None

    def reference(xp: Any, /, *arrays: Any, **values: Any) -> Any:
        named = dict(zip(names, arrays, strict=True))
        # Zeros of the full shape, outside of the autograd graph: in it, the infinite derivative of a number would reach
        # every operand.
        zero = sum(xp.zeros_like(x) for x in named.values())
        for constant in [x.name for x in loss.operands if x.name not in named] + ["weight"] * (weighted == "number"):
            named[constant] = zero + values.pop(constant)
        operands = {x.name: named[x.name] for x in loss.operands}

        unused = zero != 0
        if weighted:
            unused = unused | (named["weight"] == 0)
        if masked:
            unused = unused | (named["mask"] == 0)
        # Operands are replaced before the formula reads them: later, their NaN would already be in the gradient.
        safe = [xp.where(unused, zero + _typical(x, values), operands[x.name]) for x in loss.operands]
        elements = formula(xp, *safe, **values)
        if weighted:
            # At weight 0 the tangent plane replaces the element: its product with the weight has the same derivatives
            # up to the second, and none of them is 0 * inf.
            full = [zero + x for x in operands.values()]
            plane = tangent_plane(
                xp, lambda *x: formula(xp, *x, **values), full, moves=weighted == "array" and follows(*arrays)
            )
            elements = named["weight"] * xp.where(named["weight"] == 0, plane, elements) + zero  # no -0
        return xp.where(named["mask"] != 0, elements, zero) if masked else elements

    return reference


def _counting(weighted: bool, masked: bool) -> Loss:
    operands = (*([WEIGHT] if weighted else []), *([MASK] if masked else []))
    name = "_".join(["count", *(x.name for x in operands)])
    value = "where(mask != 0, weight, 0)" if weighted and masked else operands[0].name

    def reference(xp: Any, *arrays: Any) -> Any:
        return xp.where(arrays[1] != 0, arrays[0], xp.zeros_like(arrays[0])) if len(arrays) == 2 else arrays[0]

    summary = "Divisor of a mean."
    loss = Loss(name=name, summary=summary, formula=value, operands=operands, value=value, reference=reference)
    remember(loss)
    return loss


_COUNTING = {(w, m): _counting(w, m) for w, m in ((True, False), (False, True), (True, True))}


def counting(weighted: bool, masked: bool) -> Loss:
    """Returns the loss whose sum is the divisor of a mean.

    An element is its weight, or 1 without weights, if the mask keeps it.
    """
    return _COUNTING[weighted, masked]
