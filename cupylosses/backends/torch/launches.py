"""Kernel launches on plain tensors, without autograd: values, gradients and second derivatives for the operators.

`values`, `gradients` and `hvp` return None if no kernel can read the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cupylosses import interop
from cupylosses.backends.torch.device import TorchDevice, double, laid_out
from cupylosses.backends.torch.plans import find, with_copies
from cupylosses.call import Call
from cupylosses.engines import execute
from cupylosses.engines.base import Plan, Wanted
from cupylosses.engines.device import Divisor
from cupylosses.torch_compat import current_device


def scalars_of(call: Call, plan: Plan, device: TorchDevice) -> tuple[float, ...]:
    """Returns the scalar arguments of the kernels: those of the call, and the address for reports of bad data."""
    if plan.takes_status:
        return (*call.scalars, device.status() if plan.reports else 0)
    return call.scalars


def normalizer_of(call: Call, device: TorchDevice) -> Any:
    """Returns the normalizer as a float, or as a double on the device.

    A CPU tensor is read on the host: copying it to the GPU would wait.
    """
    normalizer = call.normalizer
    if normalizer is None or type(normalizer) is float:
        return normalizer
    if device.is_gpu and isinstance(normalizer, torch.Tensor) and normalizer.is_cpu:
        return float(normalizer)
    return double(normalizer, device.device)


def auxiliary(plan: Plan, device: TorchDevice, residual: bool = False) -> tuple[list[Any], list[Any]]:
    """Allocates the auxiliary outputs; returns the arrays and their addresses.

    Outputs that are not asked for are None, with address 0. In plans that have a residual it is the last output, which
    ``residual`` asks for.
    """
    arrays: list[Any] = []
    for spec in plan.auxiliary:
        asked = spec is not None and (residual or spec is not plan.residual)
        arrays.append(device.empty(spec.shape, spec.strides, spec.dtype) if spec and asked else None)
    addresses: list[Any] = [0 if x is None else x.data_ptr() for x in arrays]
    if residual and plan.residual is not None:
        addresses[-1] = execute.residual_argument(plan, device, arrays[-1])
    return arrays, addresses


def outputs(call: Call, plan: Plan, value: torch.Tensor, arrays: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the value and the further results that the call asks for, taken from the auxiliary outputs."""
    stored = arrays[:-1] if plan.residual is not None else arrays
    return [value, *plan.engine.auxiliary_results(interop.namespace(value), call, stored)]


def report(plan: Plan, device: TorchDevice) -> None:
    """Raises the errors in the data that kernels have reported, after waiting for the kernels if the plan does."""
    if plan.waits:
        device.synchronize()
    plan.engine.raise_reported(device)


def _divisor(call: Call, plan: Plan, device: TorchDevice, pointers: Sequence[int]) -> Divisor:
    return execute.denominator(plan, device, pointers, call.scalars, normalizer_of(call, device))


def _is_apart(call: Call, plan: Plan) -> bool:
    """True if a value with dimensions is divided by an array, which no kernel does."""
    on_device = plan.counted if call.normalizer is None else type(call.normalizer) is not float
    return on_device and not plan.scalar


def _parts(call: Call, plan: Plan) -> tuple[Any, list[torch.Tensor]]:
    """Takes a call apart for which `_is_apart` holds; returns its parts and their values."""
    apart = plan.engine.apart(call, plan.promoted, plan.nothing, False)
    assert apart is not None
    part_values = []
    for part in apart.calls:
        values_of_part = values(part, False)
        assert values_of_part is not None  # kernels can read the arrays of the whole call
        part_values.append(values_of_part[0])
    return apart, part_values


def values(call: Call, residual: bool) -> list[torch.Tensor] | None:
    """Returns the value, the residual if it is asked for, and the further results that the call asks for."""
    located = find(call.loss, call.arrays, call.static, (False,) * len(call.arrays))
    if located is None:
        return None
    plan, device, pointers, _ = located
    if plan is None:
        return values(with_copies(call, pointers, laid_out), residual)
    if device.is_one_of_several and current_device() != device.index:
        with torch.cuda.device(device.index):
            return values(call, residual)
    if plan.composite:
        pointers = call.arrays
    if plan.reports:
        plan.engine.raise_reported(device)
    if _is_apart(call, plan):
        apart, parts = _parts(call, plan)
        return [apart.finish(interop.namespace(call.arrays[0]), parts)]
    scalars = scalars_of(call, plan, device)
    divisor = _divisor(call, plan, device, pointers)
    arrays, addresses = auxiliary(plan, device, residual)
    value = execute.reduced_or_not(plan, device, pointers, scalars, divisor, addresses)
    waits = plan.waits and not (device.is_gpu and torch.cuda.is_current_stream_capturing())
    if plan.reports and (waits or not device.is_gpu):
        report(plan, device)
    value, *more = outputs(call, plan, value, arrays)
    return [value, arrays[-1], *more] if residual else [value, *more]


def gradients(
    call: Call, grad_output: torch.Tensor, residual: torch.Tensor | None, wanted: Wanted
) -> list[torch.Tensor | None] | None:
    """Returns the wanted gradients of the arrays, from the residual of forward if there is one."""
    located = find(call.loss, call.arrays, call.static, wanted)
    if located is None:
        return None
    plan, device, pointers, _ = located
    if plan is None:
        return gradients(with_copies(call, pointers, laid_out), grad_output, residual, wanted)
    # Inductor assumes that the results of operators are aligned.
    plan = plan.with_aligned_gradients
    if device.is_one_of_several and current_device() != device.index:
        with torch.cuda.device(device.index):
            return gradients(call, grad_output, residual, wanted)
    if plan.composite:
        pointers = call.arrays
    if _is_apart(call, plan):
        apart, parts = _parts(call, plan)
        below = apart.below(parts)
        # The gradient is 0 at an index that has nothing to sum over.
        scaled = torch.where(below == 0, 0.0, grad_output.double() / below).expand(plan.shape)
        return gradients(apart.calls[0], scaled, None, wanted)
    scalars = scalars_of(call, plan, device)
    divisor = _divisor(call, plan, device, pointers)
    grad_output, strides = upstream(plan, grad_output, plan.takes_one_upstream)
    launch = plan, device, pointers, scalars, divisor, wanted
    if residual is not None:
        residual = residual.contiguous()
        left = execute.residual_argument(plan, device, residual)
        return execute.from_residual(*launch, left, grad_output.data_ptr(), strides is not None)
    return execute.gradients(*launch, grad_output.data_ptr(), strides)


def upstream(
    plan: Plan, grad_output: torch.Tensor, takes_one: bool = False
) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """Returns ``grad_output`` as the plan's kernels read it, and its strides; None for a single number.

    With ``takes_one``, kernels accept one number for all rows, so the expanded ``grad_output`` of a sum is not
    materialized.
    """
    if plan.scalar:
        return grad_output.resolve_neg(), None
    if takes_one and not (any(grad_output.stride()) or grad_output.is_neg()):
        return grad_output, None
    strides = plan.upstream_strides()
    grad_output = grad_output.resolve_neg() if strides is None else laid_out(grad_output, strides)
    return grad_output, grad_output.stride()


def hvp(
    call: Call, grad_output: torch.Tensor, wanted: Wanted, has_value: bool = True
) -> tuple[torch.Tensor | None, list[Any]] | None:
    """Returns the value of a derivative along tangents, and its wanted gradients: Hessian-vector products.

    ``call`` is the call of the derivative, with the tangents among its arrays. Without ``has_value`` the value may be
    None.
    """
    located = find(call.loss, call.arrays, call.static, (True,) * len(call.arrays))
    if located is None:
        return None
    plan, device, pointers, _ = located
    if plan is None:
        return hvp(with_copies(call, pointers, laid_out), grad_output, wanted, has_value)
    if device.is_one_of_several and current_device() != device.index:
        with torch.cuda.device(device.index):
            return hvp(call, grad_output, wanted, has_value)
    if plan.composite:
        pointers = call.arrays
    if not has_value and not any([w and not v for w, v in zip(wanted, plan.vanishing)]):
        return None, execute.zeros(plan, device, wanted)
    contracted = None
    if has_value and plan.contracts:
        contracted, has_value = _contracted(call), False
        if contracted is None:
            return None
    scalars = scalars_of(call, plan, device)
    divisor = _divisor(call, plan, device, pointers)
    grad_output, strides = upstream(plan, grad_output)
    launch = plan, device, pointers, scalars, divisor, wanted
    along, changed = execute.hvp(*launch, grad_output.data_ptr(), strides, has_value)
    along = along if contracted is None else contracted
    return along, [g if w else None for g, w in zip(changed, wanted, strict=True)]


def _contracted(call: Call) -> torch.Tensor | None:
    """Returns the value of a derivative along tangents, from the gradients of the call that it was derived from."""
    engine = call.loss.engine
    base, moving, tangents = engine.primal(call)
    # In 16 bits, the many small gradients of a row would be lost.
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) if m else x for x, m in zip(base.arrays, moving)]
    base = base._replace(arrays=tuple(wide))
    spec = engine.outputs(base, [x.stride() for x in wide], str(base.static.out_dtype))[0]
    ones = torch.ones(spec.shape, dtype=getattr(torch, spec.dtype), device=wide[0].device)
    base_gradients = gradients(base, ones, None, moving)
    if base_gradients is None:
        return None
    along = engine.contracted(interop.namespace(ones), base, base_gradients, tangents)
    return along.to(ones.dtype)
