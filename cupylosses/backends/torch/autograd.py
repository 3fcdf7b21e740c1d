"""Eager autograd Functions for every engine: `Reduced` for a scalar loss, `Unreduced` for a value with dimensions.

They skip two steps of torch. ``Function.apply`` first looks for ``torch.func`` transforms, which `evaluation` has done
already. Backward looks a Function's ``backward`` up through its class, in a thread in which Python takes several times
as long. Both together took 9 µs of 40 in forward and backward of a small loss on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.autograd import Function

from cupylosses import checks, interop, options
from cupylosses.backends.torch import formulas, launches, transforms
from cupylosses.backends.torch.device import TorchDevice, laid_out
from cupylosses.backends.torch.plans import relocated
from cupylosses.call import Call
from cupylosses.engines import execute
from cupylosses.engines.base import Plan, Wanted
from cupylosses.engines.device import Divisor
from cupylosses.engines.strides import dense_strides
from cupylosses.reference_math import divide
from cupylosses.torch_compat import current_device, increment_version

_address, _strides = torch.Tensor.data_ptr, torch.Tensor.stride
_is_grad_enabled = torch.is_grad_enabled

#: Inputs of one call's kernels: plan, device, addresses of the arrays (the arrays themselves for a composite plan),
#: scalars of the kernels, divisor, flags of the arrays that require grad, addresses of the auxiliary outputs, and the
#: scalars and the normalizer of the call.
Launch = tuple[
    Plan, TorchDevice, Sequence[Any], tuple[float, ...], Divisor, Wanted, Sequence[int], tuple[float, ...], Any
]


def _apply_of(function: type[Function]) -> Any:
    """Returns ``function.apply`` without its search for transforms, and spares backward the lookup by class."""
    function._backward_cls.apply = function.backward
    return super(Function, function).apply


def _speculative(ctx: Any, grad_output: torch.Tensor) -> Any:
    """Returns the gradients that forward wrote speculatively if they are still there; computes them otherwise.

    Backward runs in another thread than forward, so every object that it touches is fetched from another core's cache.
    The common case is therefore handled here, everything else in `_computed`.
    """
    arrays = ctx.saved_tensors if not ctx.launch[0].single_use else _saved_once(ctx)
    try:
        # Handed out once; a second backward computes into new buffers.
        speculation = ctx.speculations.pop()
    except IndexError:
        speculation = None
    if speculation is not None and not (_is_grad_enabled() or grad_output.is_neg()):
        check, gradients = speculation
        device = check.device
        pointers = [*map(_address, arrays)]
        if (
            check.complete
            and pointers == check.pointers
            and [*map(_strides, arrays)] == check.strides
            and not (device.is_one_of_several and current_device() != device.index)
            and (upstream := _address_of(grad_output)) is not None
            and check.run(upstream, pointers)
        ):
            return None, *gradients
    return None, *_updated(ctx, arrays, grad_output, speculation)


def _saved_once(ctx: Any) -> tuple[torch.Tensor, ...]:
    """Returns the saved arrays of a plan whose backward overwrites the first one; raises in a second backward.

    The check precedes the access to ``saved_tensors``, where torch would report that they were modified.
    """
    if "residual" not in ctx.__dict__:
        raise checks.used_up(ctx.launch[0].loss)
    arrays: tuple[torch.Tensor, ...] = ctx.saved_tensors
    return arrays


def _address_of(grad_output: torch.Tensor) -> int | None:
    """Returns the address; None for a batched tensor (is_grads_batched), which has no memory of its own."""
    try:
        return grad_output.data_ptr()
    except RuntimeError:
        return None


def _updated(
    ctx: Any, saved: tuple[torch.Tensor, ...], grad_output: torch.Tensor, speculation: execute.Speculation | None
) -> Sequence[torch.Tensor | None]:
    """Computes the gradients, and reports the arrays that backward has added to as modified to autograd."""
    updated = ctx.__dict__.get("updated", ())
    gradients = _computed(ctx, (*saved, *updated), grad_output, speculation)
    for x in updated:
        increment_version(x)
    return gradients


def _computed(
    ctx: Any, arrays: tuple[torch.Tensor, ...], grad_output: torch.Tensor, speculation: execute.Speculation | None
) -> Sequence[torch.Tensor | None]:
    """Computes the gradients for any ``grad_output``, and for arrays that may have moved since forward."""
    plan, device, pointers, scalars, divisor, wanted, _, of_call, normalizer = ctx.launch
    residual = ctx.__dict__.get("residual")
    call = Call(plan.loss, arrays, plan.static, of_call, normalizer)
    upstream = _address_of(grad_output)
    if device.is_one_of_several and current_device() != device.index:
        with torch.cuda.device(device.index):
            return _computed(ctx, arrays, grad_output, speculation)
    if torch.is_grad_enabled():  # create_graph=True
        call = call._replace(static=plan.static._replace(out_dtype=plan.result))
        if not divisor.known:  # kernels compute it themselves, formulas do not
            located, now, there = _located(plan, call, arrays, pointers)
            read: Sequence[Any] = there if located.composite else now
            divisor = execute.denominator(located, device, read, of_call, found=True)
        return transforms.gradients(call, divisor.value, grad_output, wanted)
    if upstream is None:
        return formulas.gradients(call, grad_output, wanted)
    located, now, arrays = _located(plan, call, arrays, pointers)
    if located is not plan:
        plan, speculation = located, None
    grad_output, strides = launches.upstream(plan, grad_output, plan.takes_one_upstream)
    launch = plan, device, arrays if plan.composite else now, scalars, divisor, wanted
    if residual is not None and plan.consumes_residual and not device.captures():
        # Another thread that runs backward may have taken it first.
        residual = ctx.__dict__.pop("residual", None)
    if residual is None:
        return execute.gradients(*launch, grad_output.data_ptr(), strides, speculation)
    if plan.single_use:
        del ctx.residual
    over = arrays[0].detach() if plan.overwrites else None
    left = execute.residual_argument(plan, device, residual)
    gradients = execute.from_residual(*launch, left, grad_output.data_ptr(), strides is not None, over)
    if over is not None:
        # Other nodes of the graph may have saved the array, as tanh saves its result. Their backward now raises.
        increment_version(over)
    return gradients


def _located(
    plan: Plan, call: Call, arrays: tuple[torch.Tensor, ...], pointers: list[int]
) -> tuple[Plan, list[int], tuple[torch.Tensor, ...]]:
    """Returns the plan for the saved arrays, their addresses, and the arrays or copies of them.

    All three may differ from forward: a hook that offloads saved tensors may restore them at other addresses or with
    other strides.
    """
    now = [x.data_ptr() for x in arrays]
    if [x.stride() for x in arrays] == plan.operand_strides and (now == pointers or plan.aligned(now)):
        return plan, now, arrays
    plan, now, moved = relocated(plan, call, now, laid_out)
    return plan, now, tuple(moved)


def _with_residual(ctx: Any, launch: Launch) -> Sequence[Any]:
    """Returns the addresses of the auxiliary outputs; leaves the residual, the last one, in ``ctx`` for backward."""
    plan, device, auxiliary = launch[0], launch[1], launch[6]
    if plan.residual is None or plan.recomputes:
        return auxiliary
    ctx.residual = execute.residual(plan, device)
    return (*(auxiliary or plan.no_auxiliary)[:-1], execute.residual_argument(plan, device, ctx.residual))


def _of_composite(ctx: Any, launch: Launch) -> Launch:
    """Returns the launch of a composite plan with addresses instead of arrays; the arrays are saved through autograd.

    The arrays that backward adds to are kept as they are: other code may add to them meanwhile, and hooks that offload
    saved tensors would restore copies.
    """
    plan, device, arrays, *rest = launch
    saved = len(arrays) - plan.updated
    ctx.to_save, ctx.updated = arrays[:saved], arrays[saved:]
    return plan, device, [x.data_ptr() for x in arrays], *rest


class Reduced(Function):
    """Loss reduced to a scalar. Forward computes the value and, in the same pass, speculative gradients."""

    @staticmethod
    def forward(ctx: Any, launch: Launch, *arrays: torch.Tensor) -> torch.Tensor:
        # Saved through autograd, so torch reports arrays that were edited in place and offloading hooks see them.
        # save_for_backward does nothing but set `to_save`.
        ctx.to_save = arrays
        ctx.launch = launch if not launch[0].composite else _of_composite(ctx, launch)
        plan, device, pointers, scalars, divisor, wanted, auxiliary, _, _ = launch
        if not options._one_pass or plan.single_use or plan.keeps_residual:
            ctx.speculations = execute.Pending()
            return execute.value(plan, device, pointers, scalars, divisor, _with_residual(ctx, launch))
        value, speculation = execute.value_and_gradients(plan, device, pointers, scalars, divisor, wanted, auxiliary)
        ctx.speculations = execute.Pending() if speculation is None else execute.Pending((speculation,))
        return value

    backward = staticmethod(_speculative)


class Unreduced(Function):
    """Loss with one value per element, per row, or per index of the kept dimensions."""

    @staticmethod
    def forward(ctx: Any, launch: Launch, *arrays: torch.Tensor) -> torch.Tensor:
        ctx.to_save = arrays
        ctx.launch = launch if not launch[0].composite else _of_composite(ctx, launch)
        if not (launch[0].expects_sum and options._one_pass):
            return execute.unreduced(*launch[:5], _with_residual(ctx, launch))
        value, speculation = execute.value_and_gradients(*launch[:7])
        ctx.speculations = execute.Pending() if speculation is None else execute.Pending((speculation,))
        return value

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        arrays = ctx.saved_tensors if not ctx.launch[0].single_use else _saved_once(ctx)
        speculation = None
        if pending := ctx.__dict__.get("speculations"):
            with suppress(IndexError):
                speculation = pending.pop()
        return None, *_updated(ctx, arrays, grad_output, speculation)


class Quotient(Function):
    """Quotient ``total / below``, where 0 / 0 is NaN with a gradient of 0, as in `reference_math.divide`.

    That function takes 18 launches of torch operations in forward and backward, which was a third of a small loss's
    time. This one takes 8.
    """

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
        quotient = total / below
        ctx.save_for_backward(total, below, quotient.detach())
        return quotient

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        total, below, quotient = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = [x for x, needed in zip((total, below), ctx.needs_input_grad, strict=True) if needed]
            value = divide(interop.namespace(total), total, below)
            gradients = iter(torch.autograd.grad(value, inputs, grad_output, create_graph=True))
            return tuple([next(gradients) if needed else None for needed in ctx.needs_input_grad])
        empty = below == 0
        of_total = (grad_output / below).masked_fill_(empty, 0.0)
        if not ctx.needs_input_grad[1]:
            return of_total, None
        # Bitwise torch's own gradient of a division.
        return of_total, (quotient / below).mul_(grad_output).neg_().masked_fill_(empty, 0.0)


class Relaid(Function):
    """Copy with other strides.

    The gradient is passed on with the strides of the copy, as `contiguous()` does: copying it back would take as long
    as the loss. Only the gradient of a leaf gets the leaf's strides, because autograd would otherwise copy it element
    by element. With ``over``, the gradient is written over the original, which must have no gaps.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strides: tuple[int, ...], over: bool) -> torch.Tensor:
        ctx.save_for_backward(*[x] * over)
        dense = dense_strides(x.shape, x.stride())
        ctx.strides = dense if x.is_leaf and x.stride() == dense else None
        return laid_out(x, strides)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if _address_of(gradient) is None or torch.is_grad_enabled():
            return gradient, None, None
        if ctx.saved_tensors:
            return ctx.saved_tensors[0].detach().copy_(gradient), None, None
        return gradient if ctx.strides is None else laid_out(gradient, ctx.strides), None, None


apply_reduced, apply_unreduced = _apply_of(Reduced), _apply_of(Unreduced)
