"""CuPy and the row engine: values of losses of rows, and values with gradients."""

from __future__ import annotations

from math import nan
from typing import Any

from cupylosses.backends.cupy_device import CupyDevice, cupy, dtype_of
from cupylosses.engines.device import Divisor
from cupylosses.engines.softmax import arguments as softmax_arguments
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax import dense_plan, planning
from cupylosses.engines.softmax import plan as softmax_plan
from cupylosses.engines.softmax.call import RowCall, RowResult
from cupylosses.engines.softmax.dense_plan import Pair, TermPlan
from cupylosses.engines.softmax.plan import RowPlan
from cupylosses.engines.strides import dense_strides


def value_and_gradients(call: RowCall, wanted: tuple[bool, bool], device: CupyDevice) -> tuple[Any, Pair]:
    """The loss of arrays on a device that is current, and the gradients that are wanted."""
    if call.weight is not None and not call.weight.flags.c_contiguous:
        call = call._replace(weight=cupy.ascontiguousarray(call.weight))
    plan = _plan(call, device, wanted[0])
    if plan is None:
        return _of_copies(call, wanted, device)
    if plan.rows == 0:
        return _of_nothing(call, plan, wanted, device)
    return (_of_indices if call.kind == "indices" else _of_terms)(call, plan, wanted, device)


def _plan(call: RowCall, device: CupyDevice, writes: bool) -> Any:
    """As `row_torch.find`."""
    writes = writes or call.loss.softmax
    key: list[Any] = [*softmax_arguments.own_key(call), "cupy", device.index, writes]
    for name, x in call.arrays.items():
        key += (name, x.dtype.name, x.shape, x.strides, x.data.ptr & 15)
    found = softmax_arguments.plans.get(tuple(key))
    if found is None:
        softmax_checks.arrays(call)
        make: Any = planning.index_plan if call.kind == "indices" else planning.term_plan
        copied = writes and planning.copies(call, device)
        plan = None if copied else make(call, device, softmax_checks.promoted(call), call.out_dtype)
        found = softmax_arguments.remember(tuple(key), plan, device)
    return found[0]


def _of_copies(call: RowCall, wanted: tuple[bool, bool], device: CupyDevice) -> tuple[Any, Pair]:
    """From copies of operands whose classes lie apart; the gradients lie as the copies do."""
    value, (first, second) = value_and_gradients(planning.with_classes_together(call, device), wanted, device)
    logits = call.operands[0]
    strides = device.strides(logits)
    if (
        first is not None
        and call.inplace
        and call.kind == "indices"
        and strides == dense_strides(logits.shape, strides)
    ):
        logits[...] = first
        first = logits
    return value, (first, second)


def _of_nothing(
    call: RowCall, plan: RowPlan | TermPlan, wanted: tuple[bool, bool], device: CupyDevice
) -> tuple[Any, Pair]:
    """Without rows: a sum of 0, of which a mean is NaN."""
    if call.reduction == "none":
        value = device.empty(plan.shape, plan.result_strides, plan.result)
    else:
        divisor = softmax_arguments.divisor_of(call, device) or Divisor(0.0)
        below = divisor.array if divisor.counted else cupy.full((), divisor.arguments[0])
        value = (cupy.zeros(()) / below).astype(dtype_of(plan.result))
    if call.lse or call.accuracy:
        lse = softmax_arguments.new_lse(plan, device) if call.lse else None
        value = RowResult(value, lse, cupy.full((), nan, cupy.float32) if call.accuracy else None)
    first, second = (cupy.zeros(x.shape, x.dtype) if w else None for x, w in zip(call.operands, wanted, strict=True))
    return value, (first, second)


def _of_indices(call: RowCall, plan: RowPlan, wanted: tuple[bool, bool], device: CupyDevice) -> tuple[Any, Pair]:
    softmax_arguments.check_labels(device)
    given = softmax_arguments.index_arguments(call, device)
    divisor = softmax_arguments.divisor_of(call, device) or softmax_plan.count(plan, device, given)
    outputs, lse, correct = softmax_arguments.outputs_of(call, plan, device)
    gradient = None
    if wanted[0] and call.reduction != "none" and not call.inplace:
        # Without a table of expectations it is written for a grad_output of 1, which is what it is.
        value, promise = softmax_plan.reduce_with_gradient(plan, device, given, divisor, outputs)
        gradient = promise.gradient
    else:
        slopes = softmax_plan.new_slopes(plan, device) if wanted[0] else None
        if slopes is not None:
            outputs.slopes = device.address(slopes)
        if call.reduction == "none":
            value = softmax_plan.values(plan, device, given, outputs)
        else:
            value = softmax_plan.reduce(plan, device, given, divisor, outputs)
        if slopes is not None:
            one = device.one(plan.result)
            over = call.inplace and plan.without_gaps
            gradient = call.operands[0] if over else softmax_plan.new_gradient(plan, device)
            addresses = outputs.slopes, device.address(one), False, device.address(gradient)
            softmax_plan.apply(plan, device, given, divisor, *addresses)
    if call.check == "sync":
        device.synchronize()
        softmax_arguments.check_labels(device)
    if call.lse or call.accuracy:
        value = RowResult(value, lse, softmax_arguments.accuracy_of(call, correct))
    return value, (gradient, None)


def _of_terms(call: RowCall, plan: TermPlan, wanted: tuple[bool, bool], device: CupyDevice) -> tuple[Any, Pair]:
    lse = softmax_arguments.new_lse(plan, device) if call.lse else None
    stored = 0 if lse is None else device.address(lse)
    given = softmax_arguments.term_arguments(call, device)
    divisor = softmax_arguments.divisor_of(call, device) or dense_plan.count(plan, device, given)
    gradients: Pair = (None, None)
    if True in wanted and call.reduction != "none":
        value, promise = dense_plan.reduce_with_gradients(plan, device, given, divisor, wanted, stored)
        gradients = promise.gradients
    elif call.reduction == "none":
        value = dense_plan.values(plan, device, given, stored)
        if True in wanted:
            one = device.one(plan.result)
            launched = plan, device, given, Divisor(1.0), wanted, device.address(one)
            gradients = dense_plan.verified_gradients(*launched, None)
    else:
        value = dense_plan.reduce(plan, device, given, divisor, stored)
    return (RowResult(value, lse) if call.lse else value), gradients
