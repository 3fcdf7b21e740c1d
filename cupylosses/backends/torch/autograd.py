"""Eager autograd: the Functions of a reduced loss, and of a value with dimensions, for every engine.

They pass by what ``Function.apply`` does first: it looks for transforms of torch.func, which `evaluation` has done. Nor
does torch look for a Function's backward by its class, in a thread in which Python takes several times as long. Both
took 9 µs of 40 in forward and backward of a small loss on an H200.
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

#: A call about to be computed: plan, device, addresses of the arrays (the arrays themselves for a composite plan),
#: scalars of the kernels, divisor, the arrays that require grad, addresses of the auxiliary outputs, and scalars and
#: normalizer of the call.
Launch = tuple[
    Plan, TorchDevice, Sequence[Any], tuple[float, ...], Divisor, Wanted, Sequence[int], tuple[float, ...], Any
]


def _apply_of(function: type[Function]) -> Any:
    """``function.apply`` without what it and its backward do first."""
    function._backward_cls.apply = function.backward
    return super(Function, function).apply


def _speculative(ctx: Any, grad_output: torch.Tensor) -> Any:
    """The gradients that forward wrote, if there are any left, or computed now. This runs in another thread than
    forward, to which every object that it touches has to come: the usual is done here, all else in `_computed`.
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
    """The saved arrays, of which the first will be written over: only in the first backward. Checked before they are
    read, as torch would say that they were modified.
    """
    if "residual" not in ctx.__dict__:
        raise checks.used_up(ctx.launch[0].loss)
    found: tuple[torch.Tensor, ...] = ctx.saved_tensors
    return found


def _address_of(grad_output: torch.Tensor) -> int | None:
    """None of a batch of several (is_grads_batched), which has no memory of its own."""
    try:
        return grad_output.data_ptr()
    except RuntimeError:
        return None


def _updated(
    ctx: Any, saved: tuple[torch.Tensor, ...], grad_output: torch.Tensor, speculation: execute.Speculation | None
) -> Sequence[torch.Tensor | None]:
    """The gradients; tells autograd of the arrays that they were added to."""
    updated = ctx.__dict__.get("updated", ())
    found = _computed(ctx, (*saved, *updated), grad_output, speculation)
    for x in updated:
        increment_version(x)
    return found


def _computed(
    ctx: Any, arrays: tuple[torch.Tensor, ...], grad_output: torch.Tensor, speculation: execute.Speculation | None
) -> Sequence[torch.Tensor | None]:
    """The gradients for arrays that may lie elsewhere than in forward, and any grad_output."""
    plan, device, pointers, scalars, divisor, wanted, _, of_call, normalizer = ctx.launch
    residual = ctx.__dict__.get("residual")
    call = Call(plan.loss, arrays, plan.static, of_call, normalizer)
    upstream = _address_of(grad_output)
    if device.is_one_of_several and current_device() != device.index:
        with torch.cuda.device(device.index):
            return _computed(ctx, arrays, grad_output, speculation)
    if torch.is_grad_enabled():  # create_graph=True
        call = call._replace(static=plan.static._replace(out_dtype=plan.result))
        if not divisor.known:  # kernels find it, formulas do not
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
        # Another thread that goes backward may have been first.
        residual = ctx.__dict__.pop("residual", None)
    if residual is None:
        return execute.gradients(*launch, grad_output.data_ptr(), strides, speculation)
    if plan.single_use:
        del ctx.residual
    over = arrays[0].detach() if plan.overwrites else None
    left = execute.residual_argument(plan, device, residual)
    found = execute.from_residual(*launch, left, grad_output.data_ptr(), strides is not None, over)
    if over is not None:
        # Other nodes of the graph may have saved the array, as tanh saves its result: their backward raises now.
        increment_version(over)
    return found


def _located(
    plan: Plan, call: Call, arrays: tuple[torch.Tensor, ...], pointers: list[int]
) -> tuple[Plan, list[int], tuple[torch.Tensor, ...]]:
    """The plan for saved arrays, their addresses, and the arrays, or copies. All may be others than in forward: a hook
    that offloads saved tensors brings them back elsewhere, or laid out otherwise.
    """
    now = [x.data_ptr() for x in arrays]
    if [x.stride() for x in arrays] == plan.operand_strides and (now == pointers or plan.aligned(now)):
        return plan, now, arrays
    plan, now, found = relocated(plan, call, now, laid_out)
    return plan, now, tuple(found)


def _with_residual(ctx: Any, launch: Launch) -> Sequence[Any]:
    """The auxiliary outputs with the residual, which backward finds in the context."""
    plan, device, auxiliary = launch[0], launch[1], launch[6]
    if plan.residual is None or plan.recomputes:
        return auxiliary
    ctx.residual = execute.residual(plan, device)
    return (*(auxiliary or plan.no_auxiliary)[:-1], execute.residual_argument(plan, device, ctx.residual))


def _of_composite(ctx: Any, launch: Launch) -> Launch:
    """The launch of a composite plan with addresses in place of the arrays, which are kept through autograd alone; but
    those that backward adds to are kept as they are: others may add to them meanwhile, and hooks that offload saved
    tensors would bring back copies.
    """
    plan, device, arrays, *rest = launch
    saved = len(arrays) - plan.updated
    ctx.to_save, ctx.updated = arrays[:saved], arrays[saved:]
    return plan, device, [x.data_ptr() for x in arrays], *rest


class Reduced(Function):
    """A loss reduced to one number: value and gradients in one pass."""

    @staticmethod
    def forward(ctx: Any, launch: Launch, *arrays: torch.Tensor) -> torch.Tensor:
        # Saved, not kept: torch then reports arrays that were edited in place, and offloading hooks see them. This is
        # all that save_for_backward does.
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
    """A value per element, per row, or per index of the dimensions that are kept."""

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
    """``total / below``, where 0 / 0 is NaN and has a gradient of 0, as in `reference_math.divide`. That takes 18
    launches of torch's operations forward and backward, which was a third of a small loss's time; this takes 8.
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
            found = iter(torch.autograd.grad(value, inputs, grad_output, create_graph=True))
            return tuple([next(found) if needed else None for needed in ctx.needs_input_grad])
        empty = below == 0
        of_total = (grad_output / below).masked_fill_(empty, 0.0)
        if not ctx.needs_input_grad[1]:
            return of_total, None
        # As torch has it, to the last bit.
        return of_total, (quotient / below).mul_(grad_output).neg_().masked_fill_(empty, 0.0)


class Relaid(Function):
    """A copy with other strides. Its gradient is passed on as it lies, as that of `contiguous()` is: to copy it back
    would take as long as the loss. Only a leaf's takes the leaf's strides, because autograd would copy it element by
    element. With ``over`` it is written over the original if that has no gaps.
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
