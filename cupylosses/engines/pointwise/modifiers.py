"""What a call adds to a loss: a weight, a mask, numbers in place of operands. The result is a loss of its own.

So the engine knows neither weights nor masks: they are operands like the others, broadcast like them, and read in the
same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from itertools import compress, product
from typing import Any

from cupylosses.definition.base import MASK, WEIGHT, Operand, Parameter, remember
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.reference_math import follows, tangent_plane


@dataclass(frozen=True, eq=False)
class Form(Loss):
    """A loss with some of its operands given as ``numbers``, and perhaps a weight (an array or a number) and a mask.

    An element without weight, or masked, is 0 whatever it holds, and so are its gradients: it is replaced, not
    multiplied. The derivative with respect to a weight of 0 still is the element, where that is finite, and moves with
    the operands as the element does, where the element's derivatives are finite.
    """

    base: Loss | None = None
    numbers: frozenset[str] = frozenset()
    weight: str | None = None
    mask: bool = False

    def __post_init__(self) -> None:
        """Nothing: what is put together here was validated."""

    @property
    def suffix(self) -> str:
        """What distinguishes the form from others of its loss, for the names of kernels."""
        parts = [f"{x.name}-number" for x in (self.base or self).operands if x.name in self.numbers]
        return "_".join([*parts, *([f"weight-{self.weight}"] if self.weight else []), *(["mask"] if self.mask else [])])


@cache
def form(loss: Loss, numbers: frozenset[str] = frozenset(), weight: str | None = None, mask: bool = False) -> Loss:
    """The form of a loss, always the same object for the same arguments; the loss itself if nothing is added.

    ``weight`` is ``"array"``, ``"number"`` or None. Numbers become parameters behind those of the loss, in the order of
    the operands, the weight last; the arrays of weight and mask become the last operands.
    """
    if not numbers and weight is None and not mask:
        return loss
    added = [WEIGHT] if weight == "array" else []
    operands = (*(x for x in loss.operands if x.name not in numbers), *added, *([MASK] if mask else []))
    constants = [*(x for x in loss.operands if x.name in numbers), *([WEIGHT] if weight == "number" else [])]
    parameters = (*loss.parameters, *(Parameter(x.name, _typical(x, loss.values()), x.doc) for x in constants))
    own = {x.name: getattr(loss, x.name) for x in fields(Loss)}
    own |= {"operands": operands, "parameters": parameters, "kinks": Loss.kinks, "cases": ({},)}
    own["reference"] = loss.reference and _reference(loss, [x.name for x in operands], weight, mask)
    return Form(**own, base=loss, numbers=numbers, weight=weight, mask=mask)


def all_forms(loss: Loss) -> dict[tuple[tuple[str, ...], str | None, bool], Loss]:
    """Every form of a loss by what it adds: the names of numbers in the order of the operands, weight and mask.

    All of them at once: torch.compile can follow a look into a dictionary that stays as it is, and no construction.
    """
    able = [x.name for x in loss.operands if x.number or x.default is not None]
    chosen = [tuple(compress(able, x)) for x in product((False, True), repeat=len(able))]
    return {
        (numbers, weight, mask): form(loss, frozenset(numbers), weight, mask)
        for numbers, weight, mask in product(chosen, (None, "array", "number"), (False, True))
    }


def _typical(operand: Operand, values: Mapping[str, Any]) -> float:
    """A number at which every loss is smooth in this operand, with these flags."""
    if operand.default is not None:
        return operand.default
    # A half is a probability, a real and a positive number, but no label and no logarithm.
    return {"log_probability": -0.75, "sign": 1.0}.get(operand.domain_for(values), 0.5)


def _reference(loss: Loss, names: list[str], weighted: str | None, masked: bool) -> Callable[..., Any]:
    """The formula of a form from that of its loss."""
    formula = loss.reference
    assert formula is not None

    def reference(xp: Any, /, *arrays: Any, **values: Any) -> Any:
        given = dict(zip(names, arrays, strict=True))
        # Of the full shape, and no part of the graph: an infinite derivative of a number would reach every operand.
        zero = sum(xp.zeros_like(x) for x in given.values())
        for constant in [x.name for x in loss.operands if x.name not in given] + ["weight"] * (weighted == "number"):
            given[constant] = zero + values.pop(constant)
        own = {x.name: given[x.name] for x in loss.operands}

        unused = zero != 0
        if weighted:
            unused = unused | (given["weight"] == 0)
        if masked:
            unused = unused | (given["mask"] == 0)
        # Replaced before the formula sees them: afterwards their NaN would be in the gradient already.
        safe = [xp.where(unused, zero + _typical(x, values), own[x.name]) for x in loss.operands]
        elements = formula(xp, *safe, **values)
        if weighted:
            # Of weight 0 the plane will do: there the weight's product with it has the derivatives of that with the
            # element, up to the second, and none that is 0 * inf.
            full = [zero + x for x in own.values()]
            plane = tangent_plane(
                xp, lambda *x: formula(xp, *x, **values), full, moves=weighted == "array" and follows(*arrays)
            )
            elements = given["weight"] * xp.where(given["weight"] == 0, plane, elements) + zero  # no -0
        return xp.where(given["mask"] != 0, elements, zero) if masked else elements

    return reference


def _counting(weighted: bool, masked: bool) -> Loss:
    operands = (*([WEIGHT] if weighted else []), *([MASK] if masked else []))
    name = "_".join(["count", *(x.name for x in operands)])
    value = "where(mask != 0, weight, 0)" if weighted and masked else operands[0].name

    def reference(xp: Any, *arrays: Any) -> Any:
        return xp.where(arrays[1] != 0, arrays[0], xp.zeros_like(arrays[0])) if len(arrays) == 2 else arrays[0]

    summary = "What a mean is divided by."
    loss = Loss(name=name, summary=summary, formula=value, operands=operands, value=value, reference=reference)
    remember(loss)
    return loss


_COUNTING = {(w, m): _counting(w, m) for w, m in ((True, False), (False, True), (True, True))}


def counting(weighted: bool, masked: bool) -> Loss:
    """The loss whose sum is the divisor of a mean: of the weights, or of 1, over what the mask leaves."""
    return _COUNTING[weighted, masked]
