"""What the autograd Functions of losses of rows share: which tensors kernels read, how plans are found, what is saved
for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from cupylosses import torch_compat
from cupylosses.backends.torch import autograd
from cupylosses.backends.torch.autograd import TorchDevice
from cupylosses.engines.softmax import arguments as softmax_arguments
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax import planning
from cupylosses.engines.softmax.call import RowCall
from cupylosses.engines.strides import dense_strides


def find(
    call: RowCall, directions: Sequence[torch.Tensor | None] = (), writes: bool = True
) -> tuple[Any, TorchDevice] | None:
    """The plan for a call, or for its second derivatives along directions of its operands, made where there is none
    yet, and the device of its arrays; None where no kernel can read one of them.

    The plan is None where kernels take the rows from a copy: ask again for `with_classes_together`. Without a softmax
    they do only where they write something of the size of the operands.
    """
    first, second = call.operands
    host = autograd.host
    if host is None and not first.is_cuda:
        return None
    key: list[Any] = [*softmax_arguments.own_key(call), torch.is_autocast_enabled(), writes or call.loss.softmax]
    key.append(host and torch_compat.is_autocast_cpu_enabled())
    plain, strided = autograd.PLAIN, torch.strided
    for x in (first, second, call.weight, call.mask, *directions):
        if x is None:
            key.append(None)
            continue
        if type(x) not in plain or x.layout is not strided or x.is_neg():
            return None
        key += (x.dtype, x.shape, x.stride(), x.device, x.data_ptr() & 15)
    found = softmax_arguments.plans.get(tuple(key))
    if found is None:
        if not all([autograd.runs_kernels(x) for x in call.arrays.values()]):
            return None
        device = _device_of(call)
        plan: Any
        if (writes or call.loss.softmax) and planning.copies(call, device):
            plan = None
        elif call.kind == "indices":
            along = directions[0] if directions else None
            plan = planning.index_plan(call, device, _promoted(call), call.out_dtype, along)
        else:
            plan = planning.term_plan(call, device, _promoted(call), call.out_dtype, bool(directions))
        found = softmax_arguments.remember(tuple(key), plan, device)
    return found


def _device_of(call: RowCall) -> TorchDevice:
    """Checks the arrays of a new kind of call; the device that they are on."""
    softmax_checks.arrays(call)
    autograd.common_row_device(call)
    index = call.operands[0].get_device()
    found = autograd.devices.get(index)
    if found is None:
        found = autograd.devices[index] = TorchDevice(index)
    return found


def _promoted(call: RowCall) -> str:
    """The dtype that the operands promote to, or that autocast has."""
    found = softmax_checks.promoted(call)
    return "float32" if autograd.has_autocast(call.operands[0]) and found != "float64" else found


def laid_out(x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A grad_output per row with the strides of the values that were returned: of what arrives, any are possible."""
    x = x.resolve_neg()
    if x.stride() == tuple(strides):
        return x
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).copy_(x)


class _Relaid(Function):
    """A copy with other strides. Its gradient is passed on as it lies, as that of `contiguous()` is: to copy it back
    would take as long as the loss; with ``over`` it is written over the original if that has no gaps.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strides: tuple[int, ...], over: bool) -> torch.Tensor:
        over = over and dense_strides(x.shape, x.stride()) == x.stride()
        ctx.save_for_backward(*[x] * over)
        return laid_out(x, x.shape, strides)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.saved_tensors and has_memory(gradient) and not torch.is_grad_enabled():
            gradient = ctx.saved_tensors[0].detach().copy_(gradient)
        return gradient, None, None


def with_classes_together(call: RowCall, device: TorchDevice) -> RowCall:
    """The call with copies of operands whose classes lie apart, through which autograd comes back to the originals."""
    if not torch.is_grad_enabled():
        return planning.with_classes_together(call, device)
    over = call.inplace and call.kind == "indices"
    return planning.with_classes_together(call, device, lambda x, strides: _Relaid.apply(x, strides, over))


def directions_like(
    call: RowCall, directions: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Directions of operands as kernels read them well: the classes next to each other where those of the operand are,
    or one for all of them; otherwise as the operand lies.
    """
    first, second = (
        v if v is None else _direction_like(x, v.resolve_neg(), call.class_dim)
        for x, v in zip(call.operands, directions, strict=True)
    )
    return first, second


def _direction_like(x: torch.Tensor, v: torch.Tensor, dim: int) -> torch.Tensor:
    own = dense_strides(x.shape, x.stride())
    near = v.stride(dim) in (0, 1) if x.stride(dim) == 1 else 0 in v.stride() or v.stride() == x.stride()
    return v if near else laid_out(v, x.shape, own)


def save(ctx: Any, call: RowCall, operands: Sequence[torch.Tensor]) -> RowCall:
    """Saves the arrays for backward: torch then reports those that were edited in place, and hooks that offload see
    them. The call without them, for `restored`.
    """
    saved = [*operands, *[x for x in (call.weight, call.mask) if x is not None]]
    ctx.save_for_backward(*saved)
    ctx.layouts = _layouts(saved)
    weight, mask = (None if x is None else True for x in (call.weight, call.mask))
    return call._replace(operands=(None, None), weight=weight, mask=mask)


def restored(ctx: Any, call: RowCall) -> tuple[RowCall, bool]:
    """The call with what was saved, and whether all of it lies as it did: a hook may bring it back otherwise."""
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes them for it
    first, second, *others = saved
    rest = iter(others)
    weight = None if call.weight is None else next(rest).contiguous()
    mask = None if call.mask is None else next(rest)
    same = _layouts(saved) == ctx.layouts
    return call._replace(operands=(first, second), weight=weight, mask=mask), same


def _layouts(arrays: Sequence[torch.Tensor]) -> list[Any]:
    return [(x.stride(), x.data_ptr() & 15) for x in arrays]


def has_memory(x: torch.Tensor) -> bool:
    """Whether kernels can read it: a batch of several grad_outputs (is_grads_batched) has no memory of its own."""
    try:
        x.data_ptr()
    except RuntimeError:
        return False
    return True


def by_formula(
    call: RowCall, grad_output: torch.Tensor, wanted: Sequence[bool], create_graph: bool = True
) -> list[torch.Tensor | None]:
    """The gradients of the operands that are wanted, as functions that autograd can differentiate again."""
    with torch.enable_grad():
        value = autograd.evaluate_rows_by_formula(call._replace(check="off", lse=False, accuracy=False))
        inputs = [x for x, w in zip(call.operands, wanted, strict=True) if w]
        found = iter(torch.autograd.grad(value, inputs, grad_output, create_graph=create_graph))
    return [next(found) if w else None for w in wanted]
