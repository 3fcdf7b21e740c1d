"""CuPy arrays through the engine: values, and values with gradients. Imported with the first CuPy array."""

from __future__ import annotations

from typing import Any

from cupylosses import checks
from cupylosses.backends import cupy_softmax
from cupylosses.backends.cupy_device import CupyDevice, cupy, current_device, dtype_of
from cupylosses.definition.base import WEIGHT
from cupylosses.engines import device as engine_device
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise import plan as pointwise_plan
from cupylosses.engines.pointwise import reference as pointwise_reference
from cupylosses.engines.pointwise.call import Call, split
from cupylosses.engines.softmax.call import RowCall
from cupylosses.engines.softmax.dense_plan import Pair
from cupylosses.reference_math import divide

_MAX_PLANS = 4096

_plans: dict[Any, pointwise_plan.Plan] = {}


def evaluate(call: Call) -> Any:
    """The loss of CuPy arrays."""
    return value_and_gradients(call, None)[0]


def value_and_gradients(call: Call, wanted: tuple[bool, ...] | None, warn: bool = True) -> tuple[Any, list[Any]]:
    """The loss of CuPy arrays and, in the same pass, the gradients that are wanted (of its sum, if not one number)."""
    loss, operands = call.loss, call.operands
    with current_device(loss, dict(zip([x.name for x in loss.operands], operands, strict=True))) as device:
        plan = _plan(call, device)
        if plan.warning and warn:
            checks.warn(plan.warning)
        if call.normalizer is not None and type(call.normalizer) is not float:
            call = call._replace(normalizer=device.double(call.normalizer))
        if plan.elements == 0:
            gradients = [
                cupy.zeros(x.shape, x.dtype) if w else None for x, w in zip(operands, wanted or (), strict=False)
            ]
            return pointwise_reference.evaluate(call, plan.promoted), gradients
        pointers = [x.data.ptr for x in operands]
        normalizer = call.normalizer
        if normalizer is not None or plan.resolved.found:
            on_device = plan.resolved.counted if normalizer is None else type(normalizer) is not float
            weights = wanted is not None and plan.resolved.weights and call.wants_weight(wanted)
            if on_device and (not plan.scalar or weights):
                return _divided(call, plan, device, wanted)
            if on_device and normalizer is not None:
                normalizer = normalizer, normalizer.data.ptr
        divisor = pointwise_plan.count(plan, device, pointers, call.parameters, normalizer)
        launch = plan, device, pointers, call.parameters, divisor
        if wanted is None:
            return (pointwise_plan.reduce if plan.scalar else pointwise_plan.elements)(*launch), []
        promise, strides = None, None
        if not plan.scalar:
            value = pointwise_plan.elements(*launch)
            strides = (0,) * len(plan.resolved.shape)
        else:
            value, promise = pointwise_plan.reduce_with_gradient(*launch, wanted)
            if promise is not None and promise[0].complete:
                check, gradients = promise  # written for the grad_output that it is
                check.release(device.stream())
                return value, gradients
        one = device.one(plan.result)
        return value, pointwise_plan.gradients(*launch, wanted, one.data.ptr, strides, promise)


def _divided(
    call: Call, plan: pointwise_plan.Plan, device: CupyDevice, wanted: tuple[bool, ...] | None
) -> tuple[Any, list[Any]]:
    """A mean whose divisor has dimensions, or a gradient: two sums, and by the quotient rule the gradients."""
    sum_call, divisor_call, factor = split(call, plan.resolved, plan.shape)
    total, _ = value_and_gradients(sum_call, None, warn=False)
    below = call.normalizer if divisor_call is None else value_and_gradients(divisor_call, None)[0]
    divisor = cupy.broadcast_to(below * factor, plan.resolved.shape)
    value = divide(cupy, total, divisor).astype(dtype_of(plan.result))
    if wanted is None:
        return value, []
    empty = divisor == 0
    inverse = cupy.where(empty, 0.0, 1.0 / cupy.where(empty, 1.0, divisor))
    gradients = _gradients(sum_call, device, wanted, inverse)
    if divisor_call is not None and plan.resolved.weights and call.wants_weight(wanted):
        slot = next(i for i, x in enumerate(call.loss.operands) if x is WEIGHT)
        upstream = -total * inverse * inverse * factor
        axes = tuple(d for d, n in enumerate(below.shape) if n == 1 != upstream.shape[d])
        upstream = cupy.sum(upstream, axis=axes, keepdims=True)
        here = tuple(x is WEIGHT for x in divisor_call.loss.operands)
        through = _gradients(divisor_call, device, here, upstream)[here.index(True)]
        gradients[slot] += through.reshape(gradients[slot].shape)
    return value, gradients


def _gradients(call: Call, device: CupyDevice, wanted: tuple[bool, ...], grad_output: Any) -> list[Any]:
    """The gradients for a grad_output of the result's shape, in float64."""
    plan, pointers = _plan(call, device), [x.data.ptr for x in call.operands]
    upstream = cupy.ascontiguousarray(grad_output)
    strides = None if plan.scalar else device.strides(upstream)
    launch = plan, device, pointers, call.parameters, plan.divisor
    return pointwise_plan.gradients(*launch, wanted, upstream.data.ptr, strides)


def _plan(call: Call, device: CupyDevice) -> pointwise_plan.Plan:
    loss, operands = call.loss, call.operands
    key = (loss, call.reduction, call.flags, device.index) + tuple(
        (x.dtype.name, x.shape, x.strides, x.data.ptr & 15) for x in operands
    )
    plan = _plans.get(key)
    if plan is None:
        names = [x.dtype.name for x in operands]
        pointwise_checks.dtypes(loss, names)
        tensors = tuple(
            engine_device.Tensor(n, x.shape, device.strides(x), x.data.ptr % 16)
            for n, x in zip(names, operands, strict=True)
        )
        more = checks.promote(names), device.processors, device.launcher
        plan = pointwise_plan.Plan(loss, call.flags, call.reduction, tensors, *more)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def evaluate_rows(call: RowCall) -> Any:
    """A loss of rows of CuPy arrays."""
    return rows_and_gradients(call, (False, False))[0]


def rows_and_gradients(call: RowCall, wanted: tuple[bool, bool]) -> tuple[Any, Pair]:
    """The same and, in the same pass, the gradients of the operands that are wanted (of its sum, if not one number)."""
    with current_device(call.loss, call.arrays) as device:
        return cupy_softmax.value_and_gradients(call, wanted, device)
