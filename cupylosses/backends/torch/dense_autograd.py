"""PyTorch and the row engine, for a target per class: the autograd Functions."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from cupylosses import options, torch_compat
from cupylosses.backends.torch import autograd, softmax_transforms
from cupylosses.backends.torch import softmax as torch_softmax
from cupylosses.engines.device import Divisor
from cupylosses.engines.softmax import arguments as softmax_arguments
from cupylosses.engines.softmax import dense_plan, planning
from cupylosses.engines.softmax.call import RowCall, RowResult
from cupylosses.engines.softmax.dense_plan import TermArguments, TermPlan

#: A call about to be computed: plan, device, arguments, divisor, where lse is stored (0 for nowhere), and the call.
_Launch = tuple[TermPlan, autograd.TorchDevice, TermArguments, Divisor, int, RowCall]


def evaluate(call: RowCall, plan: TermPlan, device: autograd.TorchDevice) -> Any:
    """The loss of torch tensors that kernels can read, on the current device."""
    lse = softmax_arguments.new_lse(plan, device) if call.lse else None
    given = softmax_arguments.term_arguments(call, device)
    divisor = softmax_arguments.divisor_of(call, device) or dense_plan.count(plan, device, given)
    launched = plan, device, given, divisor, lse.data_ptr() if lse is not None else 0, call
    differentiable = torch.is_grad_enabled() and any([x.requires_grad for x in call.operands])
    if differentiable:
        value = (_apply_values if call.reduction == "none" else _apply_reduced)(launched, *call.operands)
    elif call.reduction == "none":
        value = dense_plan.values(plan, device, given, launched[4])
    else:
        value = dense_plan.reduce(*launched[:5])
    return RowResult(value, lse) if call.lse else value


def gradients(
    call: RowCall,
    plan: TermPlan,
    device: autograd.TorchDevice,
    grad_output: torch.Tensor,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of the operands that are wanted."""
    given = softmax_arguments.term_arguments(call, device)
    if call.reduction == "none":
        upstream = torch_softmax.laid_out(grad_output, plan.shape, plan.result_strides)
        return dense_plan.gradients(plan, device, given, wanted, upstream.data_ptr())
    divisor = softmax_arguments.divisor_of(call, device) or dense_plan.count(plan, device, given)
    upstream = grad_output.resolve_neg().contiguous()
    return dense_plan.verified_gradients(plan, device, given, divisor, wanted, upstream.data_ptr(), None)


def second(
    call: RowCall,
    plan: TermPlan,
    device: autograd.TorchDevice,
    grad_output: torch.Tensor,
    directions: tuple[torch.Tensor | None, torch.Tensor | None],
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """The derivatives along directions of a value per row, and of the gradients that are wanted for a grad_output per
    row.
    """
    placed = [
        x if x is None else torch_softmax.laid_out(x, x.shape, strides)
        for x, strides in zip(directions, plan.gradient_strides, strict=True)
    ]
    first, other = (0 if x is None else x.data_ptr() for x in placed)
    given = softmax_arguments.term_arguments(call, device)
    return dense_plan.second(plan, device, given, wanted, (first, other), grad_output.data_ptr())


# ----------------------------------------------------------------------------------------------------------------------
# The Functions


def _save(ctx: Any, launched: _Launch, operands: tuple[torch.Tensor, ...]) -> None:
    plan, device, _, divisor, _, call = launched
    ctx.launch = plan, device, divisor, torch_softmax.save(ctx, call, operands)


def _again(ctx: Any) -> tuple[TermPlan, RowCall, TermArguments]:
    """Plan, call and arguments of the saved tensors: a hook that offloads them may bring them back elsewhere."""
    plan, device, _, call = ctx.launch
    call, same = torch_softmax.restored(ctx, call)
    if not same:
        if planning.copies(call, device):
            call = planning.with_classes_together(call, device)
        plan = planning.term_plan(call, device, plan.promoted, plan.result)
    return plan, call, softmax_arguments.term_arguments(call, device)


class _Reduced(Function):
    """A loss reduced to one number: value and gradients in one pass."""

    @staticmethod
    def forward(ctx: Any, launched: _Launch, *operands: torch.Tensor) -> torch.Tensor:
        _save(ctx, launched, operands)
        plan, device, given, divisor, lse, call = launched
        if call.inplace or not options.one_pass_enabled():
            return dense_plan.reduce(plan, device, given, divisor, lse)
        wanted = ctx.needs_input_grad[1:]
        value, ctx.promise = dense_plan.reduce_with_gradients(plan, device, given, divisor, wanted, lse)
        return value

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        device, divisor = ctx.launch[1:3]
        plan, call, given = _again(ctx)
        wanted = ctx.needs_input_grad[1:]
        if not torch_softmax.has_memory(grad_output):
            return None, *torch_softmax.by_formula(call, grad_output, wanted)
        if torch.is_grad_enabled():  # create_graph=True
            return None, *softmax_transforms.gradients(call, grad_output, wanted)
        if device.is_one_of_several and torch_compat.current_device() != device.index:
            with torch.cuda.device(device.index):
                return _Reduced.backward(ctx, grad_output)
        promise = ctx.__dict__.pop("promise", None) if plan is ctx.launch[0] else None
        upstream = grad_output.resolve_neg().contiguous()
        return None, *dense_plan.verified_gradients(plan, device, given, divisor, wanted, upstream.data_ptr(), promise)


class _Values(Function):
    """A loss per row."""

    @staticmethod
    def forward(ctx: Any, launched: _Launch, *operands: torch.Tensor) -> torch.Tensor:
        _save(ctx, launched, operands)
        plan, device, given, _, lse, _ = launched
        return dense_plan.values(plan, device, given, lse)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        device = ctx.launch[1]
        plan, call, given = _again(ctx)
        wanted = ctx.needs_input_grad[1:]
        if not torch_softmax.has_memory(grad_output):
            return None, *torch_softmax.by_formula(call, grad_output, wanted)
        if torch.is_grad_enabled():  # create_graph=True
            return None, *softmax_transforms.gradients(call, grad_output, wanted)
        if device.is_one_of_several and torch_compat.current_device() != device.index:
            with torch.cuda.device(device.index):
                return _Values.backward(ctx, grad_output)
        upstream = torch_softmax.laid_out(grad_output, plan.shape, plan.result_strides)
        return None, *dense_plan.gradients(plan, device, given, wanted, upstream.data_ptr())


_apply_reduced, _apply_values = autograd.apply_of(_Reduced), autograd.apply_of(_Values)
