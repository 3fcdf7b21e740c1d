"""The losses as operators of torch's dispatcher, ``torch.ops.cupylosses``: what ``torch.compile`` and ``torch.export``
put into their graphs. Imported with the first torch tensor; a process that only loads an exported program imports it
itself.

Two operators serve every loss: the value, and the gradients of operands that are wanted. Neither has a gradient of its
own for autograd (:mod:`.transforms` has); a third one, ``loss``, has, for the graphs of ``torch.jit.trace``. They are
told by a string which loss it is, since a graph holds no objects, and outlives the process that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from cupylosses.backends.torch import autograd
from cupylosses.backends.torch.operators import EXACT, laid_out, library
from cupylosses.definition.base import named
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise.call import Call
from cupylosses.engines.pointwise.definition import Form, Loss, form
from cupylosses.engines.pointwise.jvp import Directional, directional
from cupylosses.engines.pointwise.reduction import Reduction, resolve
from cupylosses.engines.strides import dense_strides, result_strides


def encode(loss: Loss, reduction: Reduction, flags: Sequence[int]) -> str:
    """A form of a loss, a reduction and choices of flags as text."""
    numbers = weight = mask = along = ""
    if isinstance(loss, Directional):
        along = "".join([str(int(x)) for x in loss.along])
        loss = loss.base or loss
    if isinstance(loss, Form):
        numbers = ",".join(sorted(loss.numbers))
        weight = loss.weight or ""
        mask = "mask" if loss.mask else ""
        loss = loss.base or loss
    dim = "all" if reduction.dim is None else ",".join([str(d) for d in reduction.dim])
    normalized = "normalized" if reduction.normalized else ""
    choices = ",".join([str(int(x)) for x in flags])
    what = [loss.key, numbers, weight, mask, along]
    return "|".join([*what, reduction.kind, dim, reduction.out_dtype or "", normalized, choices])


@cache
def decode(text: str) -> tuple[Loss, Reduction, tuple[int, ...]]:
    """What `encode` was given."""
    key, numbers, weight, mask, along, kind, dim, out_dtype, normalized, choices = text.split("|")
    loss = form(named(key), frozenset(filter(None, numbers.split(","))), weight or None, bool(mask))
    if along:
        loss = directional(loss, tuple([x == "1" for x in along]))
    dims = None if dim == "all" else tuple([int(d) for d in dim.split(",") if d])
    reduction = Reduction(kind, dims, out_dtype or None, bool(normalized))
    return loss, reduction, tuple([int(x) for x in choices.split(",") if x])


_ARGUMENTS = "Tensor[] operands, str loss, float[] parameters, Tensor? normalizer, float? divisor"
library.define(f"value({_ARGUMENTS}) -> Tensor", tags=EXACT)
library.define(f"gradients(Tensor grad_output, bool[] wanted, {_ARGUMENTS}) -> Tensor[]", tags=EXACT)
# Composite, with autograd inside: TorchScript graphs are run like a program, and hold no autograd Functions.
library.define(f"loss({_ARGUMENTS}) -> Tensor")

value = torch.ops.cupylosses.value.default
loss = torch.ops.cupylosses.loss.default
gradients = torch.ops.cupylosses.gradients.default


def _call(
    operands: Sequence[torch.Tensor],
    loss: str,
    parameters: Sequence[float],
    normalizer: torch.Tensor | None,
    divisor: float | None,
) -> Call:
    """The call that the operators' common arguments stand for."""
    found, reduction, flags = decode(loss)
    below = divisor if normalizer is None else normalizer
    return Call(found, tuple(operands), reduction, tuple(parameters), flags, below)


def _value(*arguments: Any) -> torch.Tensor:
    call = _call(*arguments)
    with torch.no_grad():
        found = autograd.evaluate(call, warn=False, plain=True)
        return laid_out(found, _result_layout(call)[1], _tensors(call))


def _loss(*arguments: Any) -> torch.Tensor:
    return autograd.evaluate(_call(*arguments))


def _gradients(grad_output: torch.Tensor, wanted: Sequence[bool], *arguments: Any) -> list[torch.Tensor]:
    call = _call(*arguments)
    with torch.no_grad():
        found = autograd.gradients(call, grad_output, tuple(wanted))
        return [
            laid_out(g, dense_strides(x.shape, x.stride()), _tensors(call, grad_output))
            for x, g in zip(call.operands, found, strict=True)
            if g is not None
        ]


def _tensors(call: Call, *others: torch.Tensor) -> list[torch.Tensor | None]:
    normalizer = call.normalizer if isinstance(call.normalizer, torch.Tensor) else None
    return [*call.operands, normalizer, *others]


def _result_layout(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the value."""
    shape = pointwise_checks.broadcast(call.loss, [tuple(x.shape) for x in call.operands])
    resolved = resolve(call.loss, call.reduction, shape)
    if resolved.dims == ():
        return shape, result_strides(shape, [(tuple(x.shape), x.stride()) for x in call.operands])
    return resolved.shape, dense_strides(resolved.shape, (0,) * len(resolved.shape))


library.impl("value", _value, "CompositeExplicitAutograd")
library.impl("loss", _loss, "CompositeImplicitAutograd")
library.impl("gradients", _gradients, "CompositeExplicitAutograd")


# ----------------------------------------------------------------------------------------------------------------------
# Without memory: shapes, strides and dtypes of what they return


@torch.library.register_fake(value, lib=library)
def _fake_value(*arguments: Any) -> torch.Tensor:
    call = _call(*arguments)
    shape, strides = _result_layout(call)
    return torch.empty_strided(shape, strides, dtype=autograd.result_dtype(call), device=call.operands[0].device)


@torch.library.register_fake(gradients, lib=library)
def _fake_gradients(grad_output: torch.Tensor, wanted: Sequence[bool], *arguments: Any) -> list[torch.Tensor]:
    return [
        torch.empty_strided(x.shape, dense_strides(x.shape, x.stride()), dtype=x.dtype, device=x.device)
        for x, w in zip(_call(*arguments).operands, wanted, strict=True)
        if w
    ]
