"""CuPy backend: evaluates losses, and losses with gradients. Imported at the first CuPy array."""

from __future__ import annotations

from typing import Any

from cupylosses import checks, interop
from cupylosses.backends.cupy_device import CupyDevice, cupy, current_device
from cupylosses.call import Call
from cupylosses.engines import execute
from cupylosses.engines.base import Machine, Plan, TensorSpec, Wanted
from cupylosses.engines.cache import plans
from cupylosses.engines.device import Divisor
from cupylosses.engines.strides import dense_strides


def evaluate(call: Call) -> Any:
    """Evaluates a loss on CuPy arrays."""
    return evaluate_with_gradients(call, None)[0]


def evaluate_with_gradients(call: Call, wanted: Wanted | None, warn: bool = True) -> tuple[Any, list[Any]]:
    """Evaluates a loss on CuPy arrays and, in the same pass, the wanted gradients of its sum."""
    engine = call.loss.engine
    with current_device(call.loss, engine.names(call), call.arrays) as device:
        plan = _plan(call, device, sum(wanted or ()))
        if isinstance(plan, dict):
            return _of_copies(call, plan, wanted, device, warn)
        if plan.warning and warn:
            checks.warn(plan.warning)
        if call.normalizer is not None and type(call.normalizer) is not float:
            call = call._replace(normalizer=device.double(call.normalizer))
        if plan.empty:
            return _of_nothing(call, plan, wanted)
        if plan.reports:
            engine.raise_reported(device)
        pointers = call.arrays if plan.composite else [x.data.ptr for x in call.arrays]
        scalars = call.scalars
        if plan.takes_status:
            scalars = (*scalars, device.status() if plan.reports else 0)
        on_device = plan.counted if call.normalizer is None else type(call.normalizer) is not float
        differentiated = wanted is not None and any([wanted[i] for i in plan.divides_by])
        if on_device and (not plan.scalar or differentiated):
            return _apart(call, plan, device, wanted)
        divisor = None
        if call.normalizer is None and not (wanted is not None and True in wanted):
            # Without gradients only: those that assume a divisor would have to be verified.
            divisor = execute.tallied(plan, device, False)
        if divisor is None:
            divisor = execute.denominator(plan, device, pointers, call.scalars, call.normalizer)
        launch: execute.Bound = plan, device, pointers, scalars, divisor
        gradients: list[Any]
        stored = [
            device.empty(x.shape, x.strides, x.dtype) if x and x is not plan.residual else None for x in plan.auxiliary
        ]
        auxiliary = [0 if x is None else device.address(x) for x in stored]
        if wanted is None:
            value, gradients = execute.reduced_or_not(*launch, auxiliary), []
        else:
            value, gradients = _value_and_gradients(call, device, launch, wanted, auxiliary)
        if engine.waits(call):
            device.synchronize()
            engine.raise_reported(device)
        more = engine.auxiliary_results(
            interop.namespace(call.arrays[0]), call, stored[:-1] if plan.residual is not None else stored
        )
        return engine.result(call, [value, *more]), gradients


def _value_and_gradients(
    call: Call, device: CupyDevice, launch: execute.Bound, wanted: Wanted, auxiliary: list[int]
) -> tuple[Any, list[Any]]:
    plan = launch[0]
    keeps = plan.single_use or plan.keeps_residual or not (plan.scalar or plan.recomputes)
    if plan.residual is not None and True in wanted and keeps:
        residual = execute.residual(plan, device)
        left = execute.residual_argument(plan, device, residual)
        value = execute.reduced_or_not(*launch, [*auxiliary[:-1], left])
        one = device.one(plan.result)
        over = call.arrays[0] if plan.overwrites else None
        return value, execute.from_residual(*launch, wanted, left, one.data.ptr, False, over)
    speculation, strides = None, None
    if not plan.scalar:
        value = execute.unreduced(*launch, auxiliary)
        strides = (0,) * len(plan.shape)
        if plan.composite:
            strides = None
        elif plan.upstream_strides() is not None:
            # One number for all rows: without records, the check kernel reads a single grad_output.
            one = device.one(plan.result)
            written = plan.writable(wanted)
            if True not in written:
                return value, [None] * len(wanted)
            return value, execute.verified_gradients(*launch, written, one.data.ptr)
    else:
        value, speculation = execute.value_and_gradients(*launch, wanted, auxiliary)
        if speculation is not None and speculation[0].complete and speculation[0].written:
            check, gradients = speculation  # written for a grad_output of 1, the true one
            check.release()
            return value, gradients
    if True not in wanted:
        return value, [None] * len(wanted)
    one = device.one(plan.result)
    return value, execute.gradients(*launch, wanted, one.data.ptr, strides, speculation)


def _of_copies(
    call: Call, copies: dict[int, tuple[int, ...]], wanted: Wanted | None, device: CupyDevice, warn: bool
) -> tuple[Any, list[Any]]:
    """Evaluates a call on copies of some arrays; ``copies`` has their strides by position.

    Gradients keep the layout of the copies, unless the gradient is written over the original array.
    """
    arrays = [device.copy(x, copies[i]) if i in copies else x for i, x in enumerate(call.arrays)]
    value, gradients = evaluate_with_gradients(call._replace(arrays=tuple(arrays)), wanted, warn)
    first = call.arrays[0]
    strides = device.strides(first)
    overwrites = wanted and wanted[0] and call.loss.engine.overwrites(call)
    if 0 in copies and overwrites and strides == dense_strides(first.shape, strides):
        first[...] = gradients[0]
        gradients[0] = first
    return value, gradients


def _of_nothing(call: Call, plan: Plan, wanted: Wanted | None) -> tuple[Any, list[Any]]:
    """Evaluates a call without elements by the reference formula; its gradients are zeros."""
    gradients = [cupy.zeros(x.shape, x.dtype) if w else None for x, w in zip(call.arrays, wanted or (), strict=False)]
    return plan.engine.reference(call, plan.promoted, False), gradients


def _apart(call: Call, plan: Plan, device: CupyDevice, wanted: Wanted | None) -> tuple[Any, list[Any]]:
    """Evaluates a mean whose divisor has dimensions, or requires a gradient, as the quotient of two sums.

    The gradients follow from the quotient rule.
    """
    apart = plan.engine.apart(call, plan.promoted, wanted or plan.nothing, False)
    assert apart is not None
    values = [evaluate_with_gradients(x, None, warn=False)[0] for x in apart.calls]
    value = cupy.asarray(apart.finish(interop.namespace(call.arrays[0]), values))
    if wanted is None:
        return value, []
    # Quotient rule for value = total / below: d value = d total / below - total / below^2 * d below.
    total, ones = values[0] if values[0].shape == plan.shape else cupy.sum(values[0]), cupy.ones(plan.shape)
    below = cupy.broadcast_to(apart.below(values), plan.shape)
    empty = below == 0
    inverse = cupy.where(empty, 0.0, ones / cupy.where(empty, 1.0, below))
    gradients = _gradients(apart.calls[0], device, wanted, cupy.broadcast_to(inverse, values[0].shape))
    through = [i for i in plan.divides_by if wanted[i]]
    if through and len(apart.calls) > 1:
        upstream = -total * inverse * inverse * apart.factor
        axes = tuple(d for d, n in enumerate(values[1].shape) if n == 1 != upstream.shape[d])
        upstream = cupy.sum(upstream, axis=axes, keepdims=True)
        divisor = apart.calls[1]
        here = tuple([x.name == plan.engine.names(call)[through[0]] for x in divisor.loss.operands])
        more = _gradients(divisor, device, here, upstream)[here.index(True)]
        gradients[through[0]] += more.reshape(gradients[through[0]].shape)
    return value, gradients


def _gradients(call: Call, device: CupyDevice, wanted: Wanted, grad_output: Any) -> list[Any]:
    """Returns the wanted gradients for a float64 ``grad_output`` of the result's shape."""
    plan = _plan(call, device, sum(wanted))
    pointers = call.arrays if plan.composite else [x.data.ptr for x in call.arrays]
    upstream = cupy.ascontiguousarray(grad_output)
    strides = None if plan.scalar else device.strides(upstream)
    launch = plan, device, pointers, call.scalars, Divisor(plan.divisor)
    return execute.gradients(*launch, wanted, upstream.data.ptr, strides)


def _plan(call: Call, device: CupyDevice, writes: int) -> Any:
    """Returns the plan of a call, or a dict of the arrays to copy first: position to strides of the copy."""
    key = (
        "cupy",
        call.loss,
        call.static,
        device.index,
        writes,
        *[(x.dtype.name, x.shape, x.strides, x.data.ptr & 15) for x in call.arrays],
    )
    plan = plans.get(key)
    if plan is None:
        engine = call.loss.engine
        engine.check(call)
        tensors = tuple([TensorSpec(x.dtype.name, x.shape, device.strides(x), x.data.ptr % 16) for x in call.arrays])
        machine = Machine.of(device)
        copies = engine.copies(call, tensors, machine, writes)
        promoted = engine.promoted(call, zero_d_widens=True)
        plan = plans.keep(key, dict(copies) if copies else engine.plan(call, tensors, promoted, machine))
    return plan
