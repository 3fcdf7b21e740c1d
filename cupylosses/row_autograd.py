"""PyTorch and the row engine: which losses of rows kernels compute, and the autograd Functions of class indices.

What no kernel takes goes by the formulas (``autograd.evaluate_rows_by_formula``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from cupylosses import autograd, options, row_checks, row_engine, row_term_autograd, row_torch
from cupylosses.engine import Divisor
from cupylosses.row_call import RowCall, RowResult
from cupylosses.row_engine import Arguments, Outputs, RowPlan, Status

plans: dict[Any, tuple[RowPlan, autograd.TorchDevice]] = {}

#: A call about to be computed: plan, device, arguments, divisor, and the call itself.
_Launch = tuple[RowPlan, autograd.TorchDevice, Arguments, Divisor, RowCall]


def evaluate(call: RowCall) -> Any:
    """The loss of torch tensors on a device with kernels."""
    weight = call.weight
    weighed = weight is not None and weight.requires_grad and torch.is_grad_enabled()
    if weighed or not row_torch.readable(call):
        return autograd.evaluate_rows_by_formula(call)
    if weight is not None and not weight.is_contiguous():
        call = call._replace(weight=weight.contiguous())
    return (evaluate_indices if call.kind == "indices" else row_term_autograd.evaluate)(call)


def evaluate_indices(call: RowCall) -> Any:
    """The loss of class indices."""
    plan, device = _find_plan(call)
    if plan.rows == 0 or plan.classes == 0:
        return autograd.evaluate_rows_by_formula(call)
    if device.is_gpu and autograd._current_device() != device.index:
        with torch.cuda.device(device.index):
            return evaluate_indices(call)
    check_labels(device)
    given = _arguments(call)
    divisor = row_torch.divisor_of(call, device) or row_engine.count(plan, device, given)
    launched = plan, device, given, divisor, call
    outputs, more = _more(call, plan, device)
    differentiable = torch.is_grad_enabled() and call.operands[0].requires_grad
    if differentiable:
        value = (_apply_values if call.reduction == "none" else _apply_reduced)(launched, outputs, *call.operands)
    elif call.reduction == "none":
        value = row_engine.values(plan, device, given, outputs)
    else:
        value = row_engine.reduce(plan, device, given, divisor, outputs)
    if call.check == "sync" and device.is_gpu:
        torch.cuda.current_stream(device.index).synchronize()
    if call.check == "sync" or (call.check == "lazy" and not device.is_gpu):
        check_labels(device)
    if not (call.lse or call.accuracy):
        return value
    return RowResult(value, more.get("lse"), _accuracy(call, more.get("correct")))


def forget_plans() -> None:
    """For another way to run kernels."""
    plans.clear()
    row_term_autograd.plans.clear()


def check_labels(device: autograd.TorchDevice) -> None:
    """Raises if a kernel has met a label out of range since the last time."""
    if not device.has_status:
        return
    status = Status.from_address(device.status())
    if status.code != 2:
        return
    site, row, label, classes = status.site, status.row, status.label, status.classes
    status.code = 0
    loss, shape = RowPlan.sites[site]
    position = []
    for n in reversed(shape):
        row, at = divmod(row, n)
        position.append(at)
    raise row_checks.bad_label(loss, position[::-1], label, classes, False)


def _find_plan(call: RowCall) -> tuple[RowPlan, autograd.TorchDevice]:
    key = row_torch.key_of(call, *_flags(call))
    found = plans.get(key)
    if found is None:
        if len(plans) >= autograd._MAX_PLANS:
            plans.clear()
        device = row_torch.device_of(call)
        found = plans[key] = _plan(call, row_torch.promoted(call), call.out_dtype, device), device
    return found


def _flags(call: RowCall) -> tuple[bool, bool]:
    """Whether labels are smoothed, and logits capped: kernels are compiled for it."""
    named = dict(zip((x.name for x in call.loss.parameters), call.parameters, strict=True))
    return named.get("label_smoothing", 0.0) != 0.0, call.softcap != 0.0


def _plan(call: RowCall, promoted: str, out_dtype: str | None, device: autograd.TorchDevice) -> RowPlan:
    return RowPlan(
        call.loss, *row_torch.tensors_of(call), call.class_dim, promoted, out_dtype, *_flags(call), device.processors,
        device.launcher, device.chip,
    )  # fmt: skip


def _arguments(call: RowCall) -> Arguments:
    first, second, weight, mask = row_torch.addresses(call)
    numbers = call.ignore_index, call.scale, call.softcap, call.parameters
    return Arguments(first, second, weight, mask, *numbers, call.check != "off")


def _more(call: RowCall, plan: RowPlan, device: autograd.TorchDevice) -> tuple[Outputs, dict[str, torch.Tensor]]:
    """What is stored per row besides, and where."""
    outputs, arrays = Outputs(), {}
    if call.lse:
        arrays["lse"] = device.empty(plan.shape, plan.result_strides, plan.compute)
        outputs.lse = arrays["lse"].data_ptr()
    if call.accuracy:
        arrays["correct"] = device.empty(plan.shape, plan.result_strides, "uint8")
        outputs.correct = arrays["correct"].data_ptr()
    return outputs, arrays


def _accuracy(call: RowCall, correct: torch.Tensor | None) -> torch.Tensor | None:
    """The share of the rows that count in which no logit is larger than the label's."""
    if correct is None:
        return None
    counts = call.operands[1] != call.ignore_index
    if call.mask is not None:
        counts = counts & (call.mask != 0)
    return correct.sum(dtype=torch.float64).div(counts.sum()).to(torch.float32)


# ----------------------------------------------------------------------------------------------------------------------
# The Functions


def _moved(ctx: Any) -> tuple[RowPlan, RowCall, Arguments]:
    """The launch again, of the saved tensors: a hook that offloads them may bring them back elsewhere."""
    plan, device, _, _, call = ctx.launch
    call, same = row_torch.restored(ctx, call)
    if not same:
        plan = _plan(call, plan.promoted, plan.result, device)
    return plan, call, _arguments(call)


def _save(ctx: Any, launched: _Launch, operands: Sequence[torch.Tensor]) -> None:
    ctx.launch = (*launched[:4], row_torch.save(ctx, launched[4], operands))


class _Reduced(Function):
    """A loss reduced to one number: value and gradient in one pass."""

    @staticmethod
    def forward(ctx: Any, launched: _Launch, outputs: Outputs, *operands: torch.Tensor) -> torch.Tensor:
        plan, device, given, divisor, call = launched
        _save(ctx, launched, operands)
        if call.inplace or not options.one_pass_enabled():
            slopes = row_engine.new_slopes(plan, device)
            outputs.slopes = slopes.data_ptr()
            ctx.slopes = slopes
            return row_engine.reduce(plan, device, given, divisor, outputs)
        value, ctx.promise = row_engine.reduce_with_gradient(plan, device, given, divisor, outputs)
        return value

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        _, device, _, divisor, _ = ctx.launch
        plan, call, given = _moved(ctx)
        if torch.is_grad_enabled() or not row_torch.has_memory(grad_output):
            return None, None, *row_torch.by_formula(call, grad_output, (True, False))
        if device.is_gpu and autograd._current_device() != device.index:
            with torch.cuda.device(device.index):
                return _Reduced.backward(ctx, grad_output)
        grad_output = grad_output.resolve_neg()
        promise = ctx.__dict__.pop("promise", None)
        slopes = ctx.__dict__.pop("slopes", None) if call.inplace else ctx.__dict__.get("slopes")
        if slopes is not None:
            return None, None, _applied(plan, device, given, divisor, call, slopes, grad_output, False), None
        if call.inplace:
            raise _used_up(call)
        if plan is not ctx.launch[0]:
            promise = None
        gradient = row_engine.verified_gradient(plan, device, given, divisor, grad_output.data_ptr(), promise)
        return None, None, gradient, None


class _Values(Function):
    """A loss per row."""

    @staticmethod
    def forward(ctx: Any, launched: _Launch, outputs: Outputs, *operands: torch.Tensor) -> torch.Tensor:
        plan, device, given, _, _ = launched
        _save(ctx, launched, operands)
        ctx.slopes = row_engine.new_slopes(plan, device)
        outputs.slopes = ctx.slopes.data_ptr()
        return row_engine.values(plan, device, given, outputs)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        device = ctx.launch[1]
        plan, call, given = _moved(ctx)
        if torch.is_grad_enabled() or not row_torch.has_memory(grad_output):
            return None, None, *row_torch.by_formula(call, grad_output, (True, False))
        if device.is_gpu and autograd._current_device() != device.index:
            with torch.cuda.device(device.index):
                return _Values.backward(ctx, grad_output)
        slopes = ctx.__dict__.pop("slopes", None) if call.inplace else ctx.slopes
        if slopes is None:
            raise _used_up(call)
        upstream = row_torch.laid_out(grad_output, plan.shape, plan.result_strides)
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
    first = call.operands[0]
    over = call.inplace and first.stride() == plan.gradient_strides and first.data_ptr() % 16 == 0
    gradient = first.detach() if over else row_engine.new_gradient(plan, device)
    row_engine.apply(
        plan, device, given, divisor, slopes.data_ptr(), grad_output.data_ptr(), per_row, gradient.data_ptr()
    )
    return gradient


def _used_up(call: RowCall) -> RuntimeError:
    return RuntimeError(
        f"{call.loss.name}: a second backward, but the first one wrote the gradient over "
        f"`{call.loss.operands[0].name}`. "
        "Leave out inplace_backward=True to go backward more than once."
    )


_apply_reduced = super(Function, _Reduced).apply
_apply_values = super(Function, _Values).apply
