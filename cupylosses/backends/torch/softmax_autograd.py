"""PyTorch and the row engine: which losses of rows kernels compute, and the autograd Functions of class indices.

What no kernel takes goes by the formulas (``autograd.evaluate_rows_by_formula``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from cupylosses import options, torch_compat
from cupylosses.backends.torch import autograd, dense_autograd, softmax_transforms, transforms
from cupylosses.backends.torch import softmax as torch_softmax
from cupylosses.engines.device import Divisor
from cupylosses.engines.softmax import arguments as softmax_arguments
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax import plan as softmax_plan
from cupylosses.engines.softmax import planning
from cupylosses.engines.softmax.call import RowCall, RowResult
from cupylosses.engines.softmax.plan import Arguments, Outputs, RowPlan

#: A call about to be computed: plan, device, arguments, divisor, and the call itself.
_Launch = tuple[RowPlan, autograd.TorchDevice, Arguments, Divisor, RowCall]


def evaluate(call: RowCall, slopes: int = 0) -> Any:
    """The loss of torch tensors. Without autograd, the slopes of class indices may be stored too, at an address."""
    weight = call.weight
    weighed = False
    if weight is not None:
        weighed = weight.requires_grad and torch.is_grad_enabled()
        if not weight.is_contiguous():
            call = call._replace(weight=weight.contiguous())
    writes = call.operands[0].requires_grad and torch.is_grad_enabled()
    found = None if weighed else torch_softmax.find(call, writes=writes)
    if found is None:
        return _evaluate_apart(call)
    plan, device = found
    if plan is None:
        return evaluate(torch_softmax.with_classes_together(call, device), slopes)
    if plan.rows == 0 or plan.classes == 0:
        return autograd.evaluate_rows_by_formula(call)
    if device.is_one_of_several and torch_compat.current_device() != device.index:
        with torch.cuda.device(device.index):
            return evaluate(call, slopes)
    if call.kind == "indices":
        return _evaluate_indices(call, plan, device, slopes)
    return dense_autograd.evaluate(call, plan, device)


def _evaluate_apart(call: RowCall) -> Any:
    """The loss of tensors that no kernel can read: without memory, of another type, on another device."""
    return (softmax_transforms.evaluate if transforms.is_fake(call) else autograd.evaluate_rows_by_formula)(call)


def _evaluate_indices(call: RowCall, plan: RowPlan, device: autograd.TorchDevice, slopes: int) -> Any:
    softmax_arguments.check_labels(device)
    given = softmax_arguments.index_arguments(call, device)
    divisor = softmax_arguments.divisor_of(call, device) or softmax_plan.count(plan, device, given)
    launched = plan, device, given, divisor, call
    outputs, lse, correct = softmax_arguments.outputs_of(call, plan, device)
    outputs.slopes = slopes
    differentiable = torch.is_grad_enabled() and call.operands[0].requires_grad
    if differentiable:
        value = (_apply_values if call.reduction == "none" else _apply_reduced)(launched, outputs, *call.operands)
    elif call.reduction == "none":
        value = softmax_plan.values(plan, device, given, outputs)
    else:
        value = softmax_plan.reduce(plan, device, given, divisor, outputs)
    if call.check == "sync":
        device.synchronize()
    if call.check == "sync" or (call.check == "lazy" and not device.is_gpu):
        softmax_arguments.check_labels(device)
    if not (call.lse or call.accuracy):
        return value
    return RowResult(value, lse, softmax_arguments.accuracy_of(call, correct))


def gradients(
    call: RowCall, grad_output: torch.Tensor, slopes: torch.Tensor | None, wanted: tuple[bool, bool]
) -> Sequence[torch.Tensor | None] | None:
    """The gradients of the operands that are wanted, of class indices from the slopes; None where no kernel can read
    the arrays.
    """
    if call.weight is not None and not call.weight.is_contiguous():
        call = call._replace(weight=call.weight.contiguous())
    found = torch_softmax.find(call)
    if found is None:
        return None
    plan, device = found
    if plan is None:
        return gradients(torch_softmax.with_classes_together(call, device), grad_output, slopes, wanted)
    if device.is_one_of_several and torch_compat.current_device() != device.index:
        with torch.cuda.device(device.index):
            return gradients(call, grad_output, slopes, wanted)
    if slopes is None:
        return dense_autograd.gradients(call, plan, device, grad_output, wanted)
    given, per_row = softmax_arguments.index_arguments(call, device), call.reduction == "none"
    divisor = softmax_arguments.divisor_of(call, device) or softmax_plan.count(plan, device, given)
    upstream = grad_output.resolve_neg()
    if per_row:
        upstream = torch_softmax.laid_out(grad_output, plan.shape, plan.result_strides)
    return _applied(plan, device, given, divisor, call, slopes.contiguous(), upstream, per_row), None


def second(
    call: RowCall,
    grad_output: torch.Tensor,
    directions: tuple[torch.Tensor | None, torch.Tensor | None],
    wanted: tuple[bool, bool],
) -> tuple[Any, tuple[Any, Any]] | None:
    """The derivatives along directions of a value per row, and of the gradients of operands that are wanted for a
    grad_output per row; None where no kernel can read the arrays.
    """
    if call.weight is not None and not call.weight.is_contiguous():
        call = call._replace(weight=call.weight.contiguous())
    of_first, of_second = torch_softmax.directions_like(call, directions)
    found = torch_softmax.find(call, (of_first, of_second))
    if found is None:
        return None
    plan, device = found
    if plan is None:
        return second(torch_softmax.with_classes_together(call, device), grad_output, directions, wanted)
    if device.is_one_of_several and torch_compat.current_device() != device.index:
        with torch.cuda.device(device.index):
            return second(call, grad_output, directions, wanted)
    upstream = torch_softmax.laid_out(grad_output, plan.shape, plan.result_strides)
    if call.kind != "indices":
        return dense_autograd.second(call, plan, device, upstream, (of_first, of_second), wanted)
    assert of_first is not None  # labels have no direction
    given = softmax_arguments.index_arguments(call, device)
    along, changed = softmax_plan.second(plan, device, given, of_first.data_ptr(), upstream.data_ptr())
    return along, (changed if wanted[0] else None, None)


# ----------------------------------------------------------------------------------------------------------------------
# The Functions


def _moved(ctx: Any) -> tuple[RowPlan, RowCall, Arguments]:
    """The launch again, of the saved tensors: a hook that offloads them may bring them back elsewhere."""
    plan, device, _, _, call = ctx.launch
    call, same = torch_softmax.restored(ctx, call)
    if not same:
        if planning.copies(call, device):
            call = planning.with_classes_together(call, device)
        plan = planning.index_plan(call, device, plan.promoted, plan.result)
    return plan, call, softmax_arguments.index_arguments(call, device)


def _save(ctx: Any, launched: _Launch, operands: Sequence[torch.Tensor]) -> None:
    ctx.launch = (*launched[:4], torch_softmax.save(ctx, launched[4], operands))


class _Reduced(Function):
    """A loss reduced to one number: value and gradient in one pass."""

    @staticmethod
    def forward(ctx: Any, launched: _Launch, outputs: Outputs, *operands: torch.Tensor) -> torch.Tensor:
        plan, device, given, divisor, call = launched
        _save(ctx, launched, operands)
        if call.inplace or not options.one_pass_enabled():
            slopes = softmax_plan.new_slopes(plan, device)
            outputs.slopes = slopes.data_ptr()
            ctx.slopes = slopes
            return softmax_plan.reduce(plan, device, given, divisor, outputs)
        value, ctx.promise = softmax_plan.reduce_with_gradient(plan, device, given, divisor, outputs)
        return value

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        _check_unused(ctx)
        _, device, _, divisor, _ = ctx.launch
        plan, call, given = _moved(ctx)
        if not torch_softmax.has_memory(grad_output):
            return None, None, *torch_softmax.by_formula(call, grad_output, (True, False))
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, *softmax_transforms.gradients(call, grad_output, (True, False))
        if device.is_one_of_several and torch_compat.current_device() != device.index:
            with torch.cuda.device(device.index):
                return _Reduced.backward(ctx, grad_output)
        grad_output = grad_output.resolve_neg()
        promise = ctx.__dict__.pop("promise", None)
        slopes = ctx.__dict__.pop("slopes", None) if call.inplace else ctx.__dict__.get("slopes")
        if slopes is not None:
            return None, None, _applied(plan, device, given, divisor, call, slopes, grad_output, False), None
        if plan is not ctx.launch[0]:
            promise = None
        gradient = softmax_plan.verified_gradient(plan, device, given, divisor, grad_output.data_ptr(), promise)
        return None, None, gradient, None


class _Values(Function):
    """A loss per row."""

    @staticmethod
    def forward(ctx: Any, launched: _Launch, outputs: Outputs, *operands: torch.Tensor) -> torch.Tensor:
        plan, device, given, _, _ = launched
        _save(ctx, launched, operands)
        ctx.slopes = softmax_plan.new_slopes(plan, device)
        outputs.slopes = ctx.slopes.data_ptr()
        return softmax_plan.values(plan, device, given, outputs)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        _check_unused(ctx)
        device = ctx.launch[1]
        plan, call, given = _moved(ctx)
        if not torch_softmax.has_memory(grad_output):
            return None, None, *torch_softmax.by_formula(call, grad_output, (True, False))
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, *softmax_transforms.gradients(call, grad_output, (True, False))
        if device.is_one_of_several and torch_compat.current_device() != device.index:
            with torch.cuda.device(device.index):
                return _Values.backward(ctx, grad_output)
        slopes = ctx.__dict__.pop("slopes") if call.inplace else ctx.slopes
        upstream = torch_softmax.laid_out(grad_output, plan.shape, plan.result_strides)
        return None, None, _applied(plan, device, given, Divisor(1.0), call, slopes, upstream, True), None


def _applied(
    plan: RowPlan,
    device: autograd.TorchDevice,
    given: Arguments,
    divisor: Divisor,
    call: RowCall,
    slopes: torch.Tensor,
    grad_output: torch.Tensor,
    per_row: bool,
) -> torch.Tensor:
    """The gradient from the slopes; over the logits, if that was asked for and they have no gaps."""
    over = call.inplace and plan.without_gaps
    gradient = call.operands[0].detach() if over else softmax_plan.new_gradient(plan, device)
    softmax_plan.apply(
        plan, device, given, divisor, slopes.data_ptr(), grad_output.data_ptr(), per_row, gradient.data_ptr()
    )
    if over:
        # Other nodes of the graph may have saved the logits, as tanh saves its result: their backward raises now.
        torch_compat.increment_version(gradient)
    return gradient


def _check_unused(ctx: Any) -> None:
    """Raises in a second backward with ``inplace_backward``, before torch says that the logits were modified."""
    call = ctx.launch[-1]
    if call.inplace and "slopes" not in ctx.__dict__:
        raise softmax_checks.used_up(call.loss)


_apply_reduced, _apply_values = autograd.apply_of(_Reduced), autograd.apply_of(_Values)
