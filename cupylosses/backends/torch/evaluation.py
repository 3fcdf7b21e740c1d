"""Dispatch of calls on torch tensors: to kernels with eager autograd, to transforms, or to reference formulas.

Imported at the first torch tensor. CPU tensors and tensor subclasses go through the reference formula, which torch
differentiates itself; wrapped and traced tensors go through :mod:`.transforms`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from cupylosses import checks, interop
from cupylosses.backends.torch import autograd, formulas, launches, ops, transforms
from cupylosses.backends.torch.device import PLAIN, laid_out
from cupylosses.backends.torch.ops import Spec
from cupylosses.backends.torch.plans import locate, with_copies
from cupylosses.call import Call, Parts
from cupylosses.engines import execute
from cupylosses.engines.strides import dense_strides
from cupylosses.torch_compat import (
    assume_constant_result,
    current_device,
    dispatch_mode_count,
    is_compiling,
    is_scripted,
    transforms_active,
)

__all__ = ["PLAIN", "evaluate", "evaluate_with_gradients"]

# Dynamo cannot trace a walk up the stack frames. It calls this function while tracing, so a compiled call warns once.
assume_constant_result(checks.warn)


def _is_tracing() -> bool:
    """True while torch.compile or torch.jit.trace records a call.

    Both compare one recording with the next, so nothing cached by an earlier call may be used.
    """
    return is_compiling() or is_scripted()


interop.tracers.append(_is_tracing)


def _is_transformed() -> bool:
    """True if a compiler, a transform or a dispatch mode (such as make_fx's) must see operators.

    A kernel that is launched without its knowledge is missing from the graph, which then returns uninitialised memory.
    """
    return (
        is_compiling()
        or transforms_active()
        or forward_ad._current_level >= 0
        or dispatch_mode_count() > 0
        or is_scripted()
    )


def evaluate(call: Parts, warn: bool = True) -> Any:
    """Evaluates a loss on torch tensors. ``warn`` lets the losses that warn about broadcast operands do so."""
    if _is_transformed():
        return _transformed(Call(*call), warn)
    loss, arrays, static, scalars, normalizer = call
    located = locate(loss, arrays, static)
    if located is None:
        return _without_kernels(Call(*call), warn)
    plan, device, pointers, wanted = located
    if plan is None:
        return evaluate(_of_copies(Call(*call), pointers), warn)
    if plan.composite:
        pointers = arrays
    if plan.warning and warn:
        checks.warn(plan.warning)
    if device.is_one_of_several and current_device() != device.index:
        with torch.cuda.device(device.index):
            return evaluate(call, False)
    divisor, of_call = plan.constant, scalars
    if plan.takes_status:
        if plan.reports and device.report.value:
            loss.engine.raise_reported(device)
        scalars = (*scalars, device.status() if plan.reports else 0)
    if plan.tallies and normalizer is None and (tallied := execute.tallied(plan, device, True in wanted)):
        divisor = tallied
    elif normalizer is not None or plan.weighted or plan.counted:
        on_device = plan.counted
        if normalizer is not None:
            normalizer = launches.normalizer_of(Call(*call), device)
            on_device = type(normalizer) is not float
        if on_device and (not plan.scalar or (plan.divides_by and any([wanted[i] for i in plan.divides_by]))):
            return _apart(Call(*call), plan, wanted)
        if plan.counted and plan.scalar and True in wanted:
            execute.begin(plan, device, wanted)
        divisor = execute.denominator(plan, device, pointers, of_call, normalizer)
    stored: Any = ()
    auxiliary: Any = ()
    if plan.asks:
        stored, auxiliary = launches.auxiliary(plan, device)
    if True in wanted:
        launch = plan, device, pointers, scalars, divisor, wanted, auxiliary, of_call, normalizer
        value = (autograd.apply_reduced if plan.scalar else autograd.apply_unreduced)(launch, *arrays)
    elif plan.scalar:
        value = execute.value(plan, device, pointers, scalars, divisor, auxiliary)
    else:
        value = execute.unreduced(plan, device, pointers, scalars, divisor, auxiliary)
    if plan.reports and (plan.waits or not device.is_gpu):
        launches.report(plan, device)
    if plan.asks:
        return loss.engine.result(Call(*call), launches.outputs(Call(*call), plan, value, stored))
    return value


def _transformed(call: Call, warn: bool) -> Any:
    if is_compiling() or not is_scripted():
        return transforms.evaluate(call, warn)
    array = call.normalizer
    if array is not None and type(array) is not float:
        call = call._replace(normalizer=launches.double(array, call.arrays[0].device))
    outputs = ops.loss(call.arrays, *Spec.of(call))
    return call.loss.engine.result(call, outputs)


def _without_kernels(call: Call, warn: bool) -> Any:
    """Evaluates a loss on tensors that no kernel reads: without memory, of another type, on another device, empty."""
    return (transforms.evaluate if formulas.is_fake(call) else formulas.evaluate)(call, warn)


def _of_copies(call: Call, copies: dict[int, tuple[int, ...]]) -> Call:
    """Returns the call with copies of some arrays; autograd passes their gradients on to the originals."""
    if not torch.is_grad_enabled():
        return with_copies(call, copies, laid_out)
    overwrites = call.loss.engine.overwrites(call)

    def copy(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        if not x.requires_grad:
            return laid_out(x, strides)
        over = overwrites and x is call.arrays[0] and dense_strides(x.shape, x.stride()) == x.stride()
        return autograd.Relaid.apply(x, strides, over)

    return with_copies(call, copies, copy)


def _apart(call: Call, plan: Any, wanted: tuple[bool, ...]) -> Any:
    """Evaluates a mean whose divisor has dimensions, or requires a gradient, as the quotient of two sums.

    Each sum is a loss of its own.
    """
    if call.normalizer is not None and type(call.normalizer) is not float:
        call = call._replace(normalizer=launches.double(call.normalizer, call.arrays[0].device))
    apart = call.loss.engine.apart(call, plan.promoted, wanted, False)
    values = [evaluate(x, warn=False) for x in apart.calls]
    total = values[0] if values[0].shape == plan.shape else values[0].sum()
    below = apart.below(values)
    quotient = autograd.Quotient.apply(total, below if below.shape == plan.shape else below.expand(plan.shape))
    return quotient.to(getattr(torch, plan.result))


def evaluate_with_gradients(call: Call, wanted: tuple[bool, ...]) -> tuple[Any, list[Any]]:
    """Evaluates a loss and the wanted gradients of its sum."""
    leaves = tuple([x.detach().requires_grad_(w) for x, w in zip(call.arrays, wanted, strict=True)])
    with torch.enable_grad():
        result = evaluate(call._replace(arrays=leaves))
    inputs = [x for x, w in zip(leaves, wanted, strict=True) if w]
    value = formulas.value_of(result)
    if not inputs:
        return result, [None] * len(wanted)
    grad_output = torch.ones((), dtype=value.dtype, device=value.device).expand(value.shape)
    gradients = iter(torch.autograd.grad(value, inputs, grad_output))
    plain: Any = type(result)(value.detach(), *result[1:]) if isinstance(result, tuple) else value.detach()
    return plain, [next(gradients) if w else None for w in wanted]


def _loss(*arguments: Any) -> list[torch.Tensor]:
    arrays, *fields = arguments
    result = evaluate(Spec(*fields).call(arrays))
    return [x for x in result if x is not None] if isinstance(result, tuple) else [result]


ops.library.impl("loss", _loss, "CompositeImplicitAutograd")
