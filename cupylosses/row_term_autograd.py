"""PyTorch and the row engine, for a target per class: the autograd Functions."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from cupylosses import autograd, options, row_arrays, row_plans, row_term_engine, row_torch, row_transforms
from cupylosses.engine import Divisor
from cupylosses.row_call import RowCall, RowResult
from cupylosses.row_term_engine import TermArguments, TermPlan

#: A call about to be computed: plan, device, arguments, divisor, where lse is stored (0 for nowhere), and the call.
_Launch = tuple[TermPlan, autograd.TorchDevice, TermArguments, Divisor, int, RowCall]


def evaluate(call: RowCall, plan: TermPlan, device: autograd.TorchDevice) -> Any:
    """The loss of torch tensors that kernels can read, on the current device."""
    lse = row_arrays.new_lse(plan, device) if call.lse else None
    given = row_arrays.term_arguments(call, device)
    divisor = row_arrays.divisor_of(call, device) or row_term_engine.count(plan, device, given)
    launched = plan, device, given, divisor, lse.data_ptr() if lse is not None else 0, call
    differentiable = torch.is_grad_enabled() and any([x.requires_grad for x in call.operands])
    if differentiable:
        value = (_apply_values if call.reduction == "none" else _apply_reduced)(launched, *call.operands)
    elif call.reduction == "none":
        value = row_term_engine.values(plan, device, given, launched[4])
    else:
        value = row_term_engine.reduce(*launched[:5])
    return RowResult(value, lse) if call.lse else value


def gradients(
    call: RowCall,
    plan: TermPlan,
    device: autograd.TorchDevice,
    grad_output: torch.Tensor,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of the operands that are wanted."""
    given = row_arrays.term_arguments(call, device)
    if call.reduction == "none":
        upstream = row_torch.laid_out(grad_output, plan.shape, plan.result_strides)
        return row_term_engine.gradients(plan, device, given, wanted, upstream.data_ptr())
    divisor = row_arrays.divisor_of(call, device) or row_term_engine.count(plan, device, given)
    upstream = grad_output.resolve_neg().contiguous()
    return row_term_engine.verified_gradients(plan, device, given, divisor, wanted, upstream.data_ptr(), None)


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
        x if x is None else row_torch.laid_out(x, x.shape, strides)
        for x, strides in zip(directions, plan.gradient_strides, strict=True)
    ]
    first, other = (0 if x is None else x.data_ptr() for x in placed)
    given = row_arrays.term_arguments(call, device)
    return row_term_engine.second(plan, device, given, wanted, (first, other), grad_output.data_ptr())


# ----------------------------------------------------------------------------------------------------------------------
# The Functions


def _save(ctx: Any, launched: _Launch, operands: tuple[torch.Tensor, ...]) -> None:
    plan, device, _, divisor, _, call = launched
    ctx.launch = plan, device, divisor, row_torch.save(ctx, call, operands)


def _again(ctx: Any) -> tuple[TermPlan, RowCall, TermArguments]:
    """Plan, call and arguments of the saved tensors: a hook that offloads them may bring them back elsewhere."""
    plan, device, _, call = ctx.launch
    call, same = row_torch.restored(ctx, call)
    if not same:
        if row_plans.copies(call, device):
            call = row_plans.with_classes_together(call, device)
        plan = row_plans.term_plan(call, device, plan.promoted, plan.result)
    return plan, call, row_arrays.term_arguments(call, device)


class _Reduced(Function):
    """A loss reduced to one number: value and gradients in one pass."""

    @staticmethod
    def forward(ctx: Any, launched: _Launch, *operands: torch.Tensor) -> torch.Tensor:
        _save(ctx, launched, operands)
        plan, device, given, divisor, lse, call = launched
        if call.inplace or not options.one_pass_enabled():
            return row_term_engine.reduce(plan, device, given, divisor, lse)
        wanted = ctx.needs_input_grad[1:]
        value, ctx.promise = row_term_engine.reduce_with_gradients(plan, device, given, divisor, wanted, lse)
        return value

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        device, divisor = ctx.launch[1:3]
        plan, call, given = _again(ctx)
        wanted = ctx.needs_input_grad[1:]
        if not row_torch.has_memory(grad_output):
            return None, *row_torch.by_formula(call, grad_output, wanted)
        if torch.is_grad_enabled():  # create_graph=True
            return None, *row_transforms.gradients(call, grad_output, wanted)
        if device.is_one_of_several and autograd._current_device() != device.index:
            with torch.cuda.device(device.index):
                return _Reduced.backward(ctx, grad_output)
        promise = ctx.__dict__.pop("promise", None) if plan is ctx.launch[0] else None
        upstream = grad_output.resolve_neg().contiguous()
        return None, *row_term_engine.verified_gradients(
            plan, device, given, divisor, wanted, upstream.data_ptr(), promise
        )


class _Values(Function):
    """A loss per row."""

    @staticmethod
    def forward(ctx: Any, launched: _Launch, *operands: torch.Tensor) -> torch.Tensor:
        _save(ctx, launched, operands)
        plan, device, given, _, lse, _ = launched
        return row_term_engine.values(plan, device, given, lse)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        device = ctx.launch[1]
        plan, call, given = _again(ctx)
        wanted = ctx.needs_input_grad[1:]
        if not row_torch.has_memory(grad_output):
            return None, *row_torch.by_formula(call, grad_output, wanted)
        if torch.is_grad_enabled():  # create_graph=True
            return None, *row_transforms.gradients(call, grad_output, wanted)
        if device.is_one_of_several and autograd._current_device() != device.index:
            with torch.cuda.device(device.index):
                return _Values.backward(ctx, grad_output)
        upstream = row_torch.laid_out(grad_output, plan.shape, plan.result_strides)
        return None, *row_term_engine.gradients(plan, device, given, wanted, upstream.data_ptr())


_apply_reduced, _apply_values = autograd.apply_of(_Reduced), autograd.apply_of(_Values)
