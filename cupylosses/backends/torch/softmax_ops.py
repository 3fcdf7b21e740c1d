"""The losses of rows as operators of torch's dispatcher, as ``ops.py`` has the others.

Two operators serve every loss. Of class indices the first can leave what a row's gradient needs of it, its slopes, so
that the second reads each logit once more and knows all else:

    row_values     the value, and, so far as they are asked for, the slopes (4 numbers per row), lse per row, accuracy
    row_gradients  the gradients of the operands that are wanted
    row_second     how a value per row, and the gradients that are wanted, move along directions of the operands
    row_loss       value, lse and accuracy as autograd differentiates them, for torch.jit.trace
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from cupylosses import torch_compat
from cupylosses.backends.torch import autograd, softmax_autograd
from cupylosses.backends.torch import softmax as torch_softmax
from cupylosses.backends.torch.operators import EXACT, laid_out, library
from cupylosses.definition.base import named
from cupylosses.engines.softmax.call import RowCall, RowResult
from cupylosses.engines.strides import dense_strides


def encode(call: RowCall, out_dtype: str, slopes: bool = False) -> str:
    """What of a call is no array and no number, and whether slopes are wanted, as text."""
    asked = [name for name, x in (("slopes", slopes), ("lse", call.lse), ("accuracy", call.accuracy)) if x]
    flags = ",".join([str(int(x)) for x in call.flags])
    what = [call.loss.key, call.kind, call.reduction, out_dtype, call.check, flags, ",".join(asked)]
    return "|".join([*what, str(call.class_dim), str(call.ignore_index)])


@cache
def decode(text: str) -> tuple[RowCall, bool]:
    """A call without arrays and numbers, and whether slopes are wanted."""
    key, kind, reduction, out_dtype, check, flags, asked, class_dim, ignored = text.split("|")
    wanted = asked.split(",")
    call = RowCall(
        loss=named(key), kind=kind, operands=(None, None), weight=None, mask=None, class_dim=int(class_dim),
        ignore_index=int(ignored), reduction=reduction, normalizer=None, out_dtype=out_dtype or None, parameters=(),
        flags=tuple([int(x) for x in flags.split(",") if x]), scale=1.0, softcap=0.0, lse="lse" in wanted,
        accuracy="accuracy" in wanted, inplace=False, check=check,
    )  # fmt: skip
    return call, "slopes" in wanted


def numbers(call: RowCall) -> tuple[float, ...]:
    """The numbers of a call as the operators take them."""
    return (*call.parameters, call.scale, call.softcap)


_ARGUMENTS = (
    "str loss, float[] numbers, Tensor? normalizer, float? divisor, Tensor? weight, Tensor? mask, Tensor first, "
    "Tensor second"
)
library.define(f"row_values({_ARGUMENTS}) -> Tensor[]", tags=EXACT)
library.define(
    f"row_gradients(Tensor grad_output, Tensor? slopes, bool[] wanted, {_ARGUMENTS}) -> Tensor[]", tags=EXACT
)
library.define(
    f"row_second(Tensor grad_output, Tensor? of_first, Tensor? of_second, bool[] wanted, {_ARGUMENTS}) -> Tensor[]",
    tags=EXACT,
)
# Composite, with autograd inside: TorchScript graphs are run like a program, and hold no autograd Functions.
library.define(f"row_loss({_ARGUMENTS}) -> Tensor[]")

values = torch.ops.cupylosses.row_values.default
loss = torch.ops.cupylosses.row_loss.default
second = torch.ops.cupylosses.row_second.default
gradients = torch.ops.cupylosses.row_gradients.default


def call_of(
    loss: str,
    numbers: Sequence[float],
    normalizer: torch.Tensor | None,
    divisor: float | None,
    weight: torch.Tensor | None,
    mask: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
) -> RowCall:
    """The call that the operators' common arguments stand for."""
    *parameters, scale, softcap = numbers
    return decode(loss)[0]._replace(
        operands=(first, second), weight=weight, mask=mask, parameters=tuple(parameters), scale=scale,
        softcap=softcap, normalizer=divisor if normalizer is None else normalizer,
    )  # fmt: skip


def _values(loss: str, *arguments: Any) -> list[torch.Tensor]:
    call = call_of(loss, *arguments)
    slopes = None
    if decode(loss)[1]:
        slopes = torch.empty(slopes_shape(call), dtype=compute_dtype(call), device=call.operands[0].device)
    with torch.no_grad():
        if torch_softmax.find(call):
            found = softmax_autograd.evaluate(_uncaptured(call), 0 if slopes is None else slopes.data_ptr())
        else:
            found = autograd.evaluate_rows_by_formula(call)
            slopes = slopes if slopes is None else slopes.zero_()
    value, lse, accuracy = found if isinstance(found, RowResult) else (found, None, None)
    per_row = call.row_shape if call.reduction == "none" else ()
    given = _tensors(call)
    several = (value, per_row), (lse, call.row_shape), (accuracy, ())
    value, lse, accuracy = (x if x is None else laid_out(x, _dense(shape), given) for x, shape in several)
    return [x for x in (value, slopes, lse, accuracy) if x is not None]


def _loss(*arguments: Any) -> list[torch.Tensor]:
    found = autograd.evaluate_rows(call_of(*arguments))
    return [x for x in found if x is not None] if isinstance(found, RowResult) else [found]


def _gradients(
    grad_output: torch.Tensor, slopes: torch.Tensor | None, wanted: Sequence[bool], *arguments: Any
) -> list[torch.Tensor]:
    call = call_of(*arguments)
    with torch.no_grad():
        found = None
        if call.operands[0].numel():
            found = softmax_autograd.gradients(call, grad_output, slopes, (wanted[0], wanted[1]))
        if found is None:
            found = _gradients_of_formula(call, grad_output, wanted)
    return [
        laid_out(g, dense_strides(x.shape, x.stride()), [*_tensors(call), grad_output])
        for x, g in zip(call.operands, found, strict=True)
        if g is not None
    ]


def _gradients_of_formula(
    call: RowCall, grad_output: torch.Tensor, wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    with torch_compat.differentiating():
        first, second = (x.detach().requires_grad_(w) for x, w in zip(call.operands, wanted, strict=True))
        return torch_softmax.by_formula(
            call._replace(operands=(first, second)), grad_output, wanted, create_graph=False
        )


def _second(
    grad_output: torch.Tensor,
    of_first: torch.Tensor | None,
    of_second: torch.Tensor | None,
    wanted: Sequence[bool],
    *arguments: Any,
) -> list[torch.Tensor]:
    call = call_of(*arguments)
    given = grad_output, (of_first, of_second), (wanted[0], wanted[1])
    with torch.no_grad():
        found = softmax_autograd.second(call, *given) if call.operands[0].numel() else None
        if found is None:
            found = _second_of_formula(call, *given)
    along, changed = found
    tensors = [*_tensors(call), grad_output, of_first, of_second]
    of_operands = [
        laid_out(g, dense_strides(x.shape, x.stride()), tensors)
        for x, g in zip(call.operands, changed, strict=True)
        if g is not None
    ]
    return [laid_out(along, _dense(call.row_shape), tensors), *of_operands]


def _second_of_formula(
    call: RowCall,
    grad_output: torch.Tensor,
    directions: tuple[torch.Tensor | None, torch.Tensor | None],
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor, tuple[Any, Any]]:
    moving = [v is not None for v in directions]
    with torch_compat.differentiating():
        upstream = grad_output.detach().requires_grad_()
        first, second = (
            x.detach().requires_grad_(m or w) for x, m, w in zip(call.operands, moving, wanted, strict=True)
        )
        gradients = torch_softmax.by_formula(call._replace(operands=(first, second)), upstream, moving)
        outputs = [g for g in gradients if g is not None]
        inputs = [upstream, *[x for x, w in zip((first, second), wanted, strict=True) if w]]
        given = [v for v in directions if v is not None]
        along, *changed = torch.autograd.grad(outputs, inputs, given, materialize_grads=True)
    rest = iter(changed)
    of_first, of_second = (next(rest) if w else None for w in wanted)
    return along.to(autograd.DTYPES[str(call.out_dtype)]), (of_first, of_second)


def _uncaptured(call: RowCall) -> RowCall:
    """The call without a check of labels that waits, where a CUDA graph is captured, which cannot wait."""
    captured = call.check == "sync" and call.operands[0].is_cuda and torch.cuda.is_current_stream_capturing()
    return call._replace(check="lazy") if captured else call


def _tensors(call: RowCall) -> list[torch.Tensor | None]:
    normalizer = call.normalizer if isinstance(call.normalizer, torch.Tensor) else None
    return [*call.operands, call.weight, call.mask, normalizer]


def slopes_shape(call: RowCall) -> tuple[int, ...]:
    """The shape of the slopes: four numbers per row."""
    return (*call.row_shape, 4)


def compute_dtype(call: RowCall) -> torch.dtype:
    """The type of the arithmetic."""
    return torch.float64 if any(x.dtype == torch.float64 for x in call.operands) else torch.float32


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return dense_strides(shape, (0,) * len(shape))


library.impl("row_values", _values, "CompositeExplicitAutograd")
library.impl("row_loss", _loss, "CompositeImplicitAutograd")
library.impl("row_gradients", _gradients, "CompositeExplicitAutograd")
library.impl("row_second", _second, "CompositeExplicitAutograd")


# ----------------------------------------------------------------------------------------------------------------------
# Without memory: shapes, strides and dtypes of what they return


@torch.library.register_fake(values, lib=library)
def _fake_values(loss: str, *arguments: Any) -> list[torch.Tensor]:
    call = call_of(loss, *arguments)
    rows, compute = call.row_shape, compute_dtype(call)
    results = [(rows if call.reduction == "none" else (), autograd.DTYPES[str(call.out_dtype)])]
    results += [(slopes_shape(call), compute)] if decode(loss)[1] else []
    results += [(rows, compute)] if call.lse else []
    results += [((), torch.float32)] if call.accuracy else []
    return [call.operands[0].new_empty(shape, dtype=dtype) for shape, dtype in results]


@torch.library.register_fake(gradients, lib=library)
def _fake_gradients(
    grad_output: torch.Tensor, slopes: torch.Tensor | None, wanted: Sequence[bool], *arguments: Any
) -> list[torch.Tensor]:
    return [
        torch.empty_strided(x.shape, dense_strides(x.shape, x.stride()), dtype=x.dtype, device=x.device)
        for x, w in zip(call_of(*arguments).operands, wanted, strict=True)
        if w
    ]


@torch.library.register_fake(second, lib=library)
def _fake_second(
    grad_output: torch.Tensor,
    of_first: torch.Tensor | None,
    of_second: torch.Tensor | None,
    wanted: Sequence[bool],
    *arguments: Any,
) -> list[torch.Tensor]:
    call = call_of(*arguments)
    along = call.operands[0].new_empty(call.row_shape, dtype=autograd.DTYPES[str(call.out_dtype)])
    return [along, *_fake_gradients(grad_output, None, wanted, *arguments)]
