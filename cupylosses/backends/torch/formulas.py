"""Reference formulas on torch tensors: CPU tensors, subclasses, tracing, and derivatives that no kernel computes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from cupylosses import checks
from cupylosses.backends.torch.device import double, has_autocast
from cupylosses.backends.torch.plans import common_device, promoted
from cupylosses.call import Call
from cupylosses.engines.base import Wanted
from cupylosses.torch_compat import differentiating


def is_fake(call: Call) -> bool:
    """True if an array is a fake tensor: one without memory that stands for a real tensor."""
    return any([type(x).__name__ == "FakeTensor" for x in call.arrays])


def check(call: Call, warn: bool) -> str:
    """Checks a call that has no plan; returns the dtype that its operands promote to."""
    engine = call.loss.engine
    for name, x in zip(engine.names(call), call.arrays, strict=True):
        if x.layout is not torch.strided:
            raise checks.not_dense(call.loss, name, x.layout)
    common_device(call)
    engine.check(call)
    warning = engine.warning(call)
    if warning and warn:
        checks.warn(warning)
    return promoted(call)


def evaluate(call: Call, warn: bool = False, readable: bool = True) -> Any:
    """Evaluates a loss by its formula, which torch differentiates.

    Checks that need values on the host run only if these are ``readable`` and reading them adds no wait: the arrays are
    on the CPU, or the call waits for the GPU anyway.
    """
    dtype, engine = check(call, warn), call.loss.engine
    if call.normalizer is not None and type(call.normalizer) is not float:
        call = call._replace(normalizer=double(call.normalizer, call.arrays[0].device))
    first = call.arrays[0]
    near = first.is_cpu or (first.is_cuda and engine.waits(call))
    # Autocast has already decided the dtypes. Inside a formula it would round matrix products.
    autocast = torch.autocast(first.device.type, enabled=False) if has_autocast(first) else nullcontext()
    with autocast:
        result = engine.reference(call, dtype, readable and near and not is_fake(call))
    return _as_stored_by_kernels(call, result) if type(result) is torch.Tensor else result


def _as_stored_by_kernels(call: Call, result: torch.Tensor) -> torch.Tensor:
    """Returns a result in the memory order that kernels and torch would give it.

    The result of a formula follows whichever operand comes first.
    """
    if result.dim() < 2:
        return result
    strides = call.loss.engine.outputs(call, [x.stride() for x in call.arrays], "float32")[0].strides
    if result.stride() == strides:
        return result
    order = sorted(range(result.dim()), key=lambda d: -strides[d])
    return result.permute(order).contiguous().permute([order.index(d) for d in range(result.dim())])


def value_of(result: Any) -> torch.Tensor:
    """Returns the loss from a result that may hold more."""
    return result[0] if isinstance(result, tuple) else result


def gradients(call: Call, grad_output: torch.Tensor, wanted: Wanted) -> list[torch.Tensor | None]:
    """Returns the wanted gradients of the arrays; None for the others."""
    with differentiating():
        arrays = [x.detach().requires_grad_(w) for x, w in zip(call.arrays, wanted, strict=True)]
        value = value_of(evaluate(call._replace(arrays=tuple(arrays)), readable=False))
        inputs = [x for x, w in zip(arrays, wanted, strict=True) if w]
        grads = iter(torch.autograd.grad(value, inputs, grad_output.to(value.dtype), materialize_grads=True))
    return [next(grads) if w else None for w in wanted]


def hvp(call: Call, grad_output: torch.Tensor, wanted: Wanted) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Returns the value of a derivative along tangents, and its wanted gradients of the arrays."""
    base, moving, tangents = call.loss.engine.primal(call)
    with differentiating():
        upstream = grad_output.detach().requires_grad_()
        arrays = [x.detach().requires_grad_(m or w) for x, m, w in zip(base.arrays, moving, wanted, strict=False)]
        value = value_of(evaluate(base._replace(arrays=tuple(arrays)), readable=False))
        inputs = [x for x, m in zip(arrays, moving, strict=True) if m]
        slopes = torch.autograd.grad(value, inputs, upstream.to(value.dtype), create_graph=True, materialize_grads=True)
        vectors = [v.expand(x.shape).to(x.dtype) for v, x in zip(tangents, inputs, strict=True)]
        followed = [(g, v) for g, v in zip(slopes, vectors, strict=True) if g.requires_grad]
        wanted_arrays = [upstream, *[x for x, w in zip(arrays, wanted, strict=False) if w]]
        if followed:
            outputs, cotangents = zip(*followed, strict=True)
            along, *changed = torch.autograd.grad(outputs, wanted_arrays, cotangents, materialize_grads=True)
        else:
            along, *changed = [torch.zeros_like(x) for x in wanted_arrays]
    products = iter(changed)
    return along.to(value.dtype), [next(products) if w else None for w in wanted]
