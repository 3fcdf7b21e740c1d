"""Derivative of a loss along tangents: a loss of its own, from which second derivatives follow.

For a loss L of operands x_i, some of which have a tangent v_i, it is the sum over i of v_i dL/dx_i, per element. Its
reduced value is what forward mode needs, and its gradients are what backward through a gradient needs. The engine
handles it like any other loss and has no special case for second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

from cupylosses import interop
from cupylosses.definition.base import Operand
from cupylosses.engines.pointwise.definition import Loss, ModifiedLoss
from cupylosses.engines.pointwise.reference import elements as formula_elements


@dataclass(frozen=True, eq=False)
class TangentLoss(ModifiedLoss):
    """Derivative of ``base``, a loss or a modified one, along a tangent of each operand with ``has_tangent``.

    The tangents are operands after those of ``base``, in their order. An element that a mask or a weight of 0 leaves
    out is 0 whatever its tangents hold, except for the derivative with respect to the weight.
    """

    has_tangent: tuple[bool, ...] = ()

    @cached_property
    def key(self) -> str:
        """Key of the base loss, followed by its modifications and tangents."""
        base = self.base or self
        modified = base.key if "~" in base.key else f"{base.key}~~~~"
        return modified + "".join([str(int(x)) for x in self.has_tangent])

    @property
    def suffix(self) -> str:
        """Suffix of kernel names that distinguishes this loss from other modifications of its base."""
        form = [self.base.suffix] if isinstance(self.base, ModifiedLoss) else []
        return "_".join([*form, f"tangent{''.join(str(int(x)) for x in self.has_tangent)}"])


def tangent_name(operand: Operand) -> str:
    """Returns the name of an operand's tangent: operands of users cannot have two underscores in a row."""
    return f"{operand.name}__direction"


@cache
def along_tangents(loss: Loss, has_tangent: tuple[bool, ...]) -> TangentLoss:
    """Returns the derivative of a loss, or of a modified one, along tangents; the same object for the same arguments.

    ``has_tangent`` has one entry per operand. Precondition: operands with a tangent are floating.

    Raises:
        TypeError: ``loss`` is such a derivative itself. Third derivatives are those of the reference formula.
        ValueError: ``has_tangent`` has a wrong number of entries, or none that is True.
    """
    if isinstance(loss, TangentLoss):
        raise TypeError(
            f"{loss.name}: it is the derivative along a direction already; differentiate its reference formula"
        )
    if len(has_tangent) != len(loss.operands) or not any(has_tangent):
        raise ValueError(
            f"{loss.name}: `has_tangent` must say for each of {len(loss.operands)} operands whether it moves"
        )
    moving = [x for x, moves in zip(loss.operands, has_tangent, strict=True) if moves]
    directions = tuple(Operand(tangent_name(x), f"The direction of `{x.name}`.") for x in moving)
    attributes = {x.name: getattr(loss, x.name) for x in fields(Loss)}
    attributes |= {
        "operands": (*loss.operands, *directions),
        "kinks": Loss.kinks,
        "cases": ({},),
        "warn_broadcast": False,
    }
    # A vector takes at least twice the registers that it takes in the loss.
    attributes |= {"heavy": loss.heavy + 1, "reference": loss.reference and _reference(loss, has_tangent)}
    form = (
        loss
        if isinstance(loss, ModifiedLoss)
        else ModifiedLoss(**{x.name: getattr(loss, x.name) for x in fields(Loss)})
    )
    return TangentLoss(
        **attributes,
        base=loss,
        numbers=form.numbers,
        weight=form.weight,
        mask=form.mask,
        has_tangent=tuple(has_tangent),
    )


def _reference(loss: Loss, has_tangent: tuple[bool, ...]) -> Callable[..., Any]:
    """Returns the formula of the derivative from that of the loss, by torch: NumPy has no derivatives."""
    count = len(loss.operands)

    def reference(xp: Any, /, *arrays: Any, **values: Any) -> Any:
        if interop.kind(arrays[0]) != "torch":
            raise TypeError(f"{loss.name}: derivatives along a direction are taken of torch tensors")
        import torch

        followed = torch.is_grad_enabled() and any(x.requires_grad for x in arrays)
        with torch.enable_grad():
            # Operands have the full shape: the derivative with respect to a broadcast one would be a sum over elements
            # here.
            full = torch.broadcast_tensors(*arrays)
            tracked = [x if x.requires_grad else x.detach().requires_grad_(x.is_floating_point()) for x in full]
            elements = formula_elements(loss, tracked[:count], values)
            moving = [x for x, moves in zip(tracked[:count], has_tangent, strict=True) if moves]
            slopes = torch.autograd.grad(elements.sum(), moving, create_graph=True, allow_unused=True)
            named = dict(zip((x.name for x in loss.operands), full, strict=False))
            weight = named.get("weight", values.get("weight")) if isinstance(loss, ModifiedLoss) and loss.weight else 1
            counts = (torch.ones_like(elements) * weight).detach() != 0
            if isinstance(loss, ModifiedLoss) and loss.mask:
                counts &= named["mask"] != 0
            total = torch.zeros_like(elements)
            for slope, direction in zip(slopes, full[count:], strict=True):
                if slope is not None:
                    used = counts | (slope.detach() != 0) | direction.isfinite()
                    total = total + slope * torch.where(used, direction, 0.0)
        return total if followed else total.detach()

    return reference
