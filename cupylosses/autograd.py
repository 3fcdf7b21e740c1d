"""PyTorch: thin autograd Functions around the engine, and what torch's tensors need before it.

Imported with the first torch tensor that arrives. CPU tensors, tensor subclasses and tensors under a transform of
``torch.func`` or ``torch.compile`` go through the reference formula, which torch differentiates itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import Function

from cupylosses import checks, engine, interop, options, reference
from cupylosses.definition import Loss

_NAMES = {
    torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64",
    torch.bool: "bool", torch.int8: "int8", torch.uint8: "uint8", torch.int16: "int16", torch.int32: "int32",
    torch.int64: "int64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MAX_PLANS = 4096

_to_dlpack = torch._C._to_dlpack
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


class TorchDevice(engine.Device):
    """One CUDA device through torch: its allocator, its current stream."""

    def __init__(self, index: int) -> None:
        interop.cupy()
        super().__init__(index, torch.cuda.get_device_properties(index).multi_processor_count)
        self.device = torch.device("cuda", index)

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=_DTYPES[dtype], device=self.device)

    def full(self, count: int, value: float) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.float64, device=self.device)

    def pointer(self, array: torch.Tensor) -> int:
        capsule = _to_dlpack(array)
        return interop.capsule_pointer(capsule)

    def stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.index)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def guard(self) -> Any:
        """Makes this device current while kernels are launched; free when it already is."""
        if torch._C._cuda_getDevice() == self.index:
            return _NO_GUARD
        return torch.cuda.device(self.index)


_NO_GUARD = nullcontext()
_devices: dict[int, TorchDevice] = {}
_plans: dict[Any, engine.Plan] = {}


def evaluate(
    loss: Loss, operands: tuple[torch.Tensor, ...], reduction: str, parameters: tuple[float, ...], flags: tuple[bool, ...]
) -> torch.Tensor:
    """The loss of torch tensors."""
    index = operands[0].get_device()
    plain = operands[0].is_cuda and not _transforms_active() and not _is_compiling()
    for x in operands:
        if x.get_device() != index:
            checks.devices(loss, [x.device for x in operands])
        if type(x) not in _PLAIN or x.layout is not torch.strided or x.is_neg():
            plain = False
    if not plain:
        return _evaluate_reference(loss, operands, reduction, parameters, flags)

    device = _devices.get(index)
    if device is None:
        device = _devices[index] = TorchDevice(index)
    pointers = [device.pointer(x) for x in operands]
    autocast = torch.is_autocast_enabled()
    key = (loss, reduction, flags, index, autocast) + tuple(
        (x.dtype, x.shape, x.stride(), p & 15) for x, p in zip(operands, pointers)
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(key, loss, flags, reduction, operands, pointers, autocast, device)
    if plan.warning:
        warnings.warn(plan.warning, UserWarning, stacklevel=4)
    if plan.elements == 0:
        return _evaluate_reference(loss, operands, reduction, parameters, flags)
    with device.guard():
        if torch.is_grad_enabled() and any([x.requires_grad for x in operands]):
            function = _Elements if reduction == "none" else _Reduced
            return function.apply(plan, device, parameters, pointers, *operands)
        run = engine.elements if reduction == "none" else engine.reduce
        return run(plan, device, pointers, parameters)


def _make_plan(
    key: Any,
    loss: Loss,
    flags: tuple[bool, ...],
    reduction: str,
    operands: Sequence[torch.Tensor],
    pointers: Sequence[int],
    autocast: bool,
    device: TorchDevice,
) -> engine.Plan:
    names, result = _result(loss, operands, autocast)
    tensors = tuple(
        engine.Tensor(name, tuple(x.shape), x.stride(), p % 16)
        for name, x, p in zip(names, operands, pointers, strict=True)
    )
    plan = engine.Plan(loss, flags, reduction, tensors, result, device.processors)
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _result(loss: Loss, operands: Sequence[torch.Tensor], autocast: bool) -> tuple[list[str], str]:
    """The dtype of each operand and of the result: torch's promotion, and float32 for halves under autocast."""
    names = [_NAMES.get(x.dtype, str(x.dtype).removeprefix("torch.")) for x in operands]
    checks.dtypes(loss, names)
    result = checks.promote(names, [x.dim() for x in operands])
    # Autocast's list of float32 losses: operands are read in their own dtype, which is the cast without its copy.
    return names, "float32" if autocast and result != "float64" else result


def _evaluate_reference(
    loss: Loss,
    operands: Sequence[torch.Tensor],
    reduction: str,
    parameters: Sequence[float],
    flags: Sequence[bool],
    warn: bool = True,
) -> torch.Tensor:
    shapes = [tuple(x.shape) for x in operands]
    shape = checks.broadcast(loss, shapes)
    warning = checks.broadcast_warning(loss, shapes)
    if warning and warn:
        warnings.warn(warning, UserWarning, stacklevel=5)
    autocast = operands[0].is_cuda and torch.is_autocast_enabled()
    _, result = _result(loss, operands, autocast)
    names = [x.name for x in (*loss.parameters, *loss.flags)]
    values = dict(zip(names, (*parameters, *flags), strict=True))
    return reference.evaluate(loss, operands, reduction, values, result, shape[0] if shape else 1)


class _Loss(Function):
    """What both Functions share: saved operands, and a backward that takes the gradients from the engine."""

    @staticmethod
    def remember(ctx: Any, plan: engine.Plan, device: TorchDevice, parameters: Any, operands: Any) -> None:
        ctx.plan, ctx.device, ctx.parameters = plan, device, parameters
        # Saved, not kept: torch then reports operands that were edited in place, and offloading hooks see them.
        ctx.save_for_backward(*operands)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        operands, plan, device = ctx.saved_tensors, ctx.plan, ctx.device
        wanted = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():
            # create_graph=True: kernels are opaque to autograd, so the differentiable route is the formula.
            return None, None, None, None, *_differentiable(plan, ctx.parameters, operands, wanted, grad_output)
        try:
            promise = ctx.promises.pop()  # handed out once; a second backward computes into new buffers
            wanted = ctx.promised
        except IndexError:
            promise = None
        with device.guard():
            pointers = [device.pointer(x) for x in operands]
            strides = grad_output.stride() if plan.reduction == "none" else None
            found = engine.gradients(
                plan, device, pointers, ctx.parameters, wanted, device.pointer(grad_output), strides, promise
            )
        return None, None, None, None, *found


class _Reduced(_Loss):
    """A loss reduced to one number: value and gradients in one pass."""

    @staticmethod
    def forward(ctx: Any, plan: engine.Plan, device: TorchDevice, parameters: Any, pointers: Any, *operands: Any) -> Any:
        _Loss.remember(ctx, plan, device, parameters, operands)
        wanted = ctx.needs_input_grad[4:]
        written = plan.written(wanted)
        if not options.one_pass_enabled() or not any(written):
            ctx.promises = []
            return engine.reduce(plan, device, pointers, parameters)
        value, promise = engine.reduce_with_gradient(plan, device, pointers, parameters, written)
        ctx.promises, ctx.promised = [promise], wanted
        return value


class _Elements(_Loss):
    """A loss per element."""

    @staticmethod
    def forward(ctx: Any, plan: engine.Plan, device: TorchDevice, parameters: Any, pointers: Any, *operands: Any) -> Any:
        _Loss.remember(ctx, plan, device, parameters, operands)
        ctx.promises = []
        return engine.elements(plan, device, pointers, parameters)


def _differentiable(
    plan: engine.Plan, parameters: Any, operands: Sequence[torch.Tensor], wanted: Sequence[bool], grad_output: torch.Tensor
) -> list[torch.Tensor | None]:
    with torch.enable_grad():
        value = _evaluate_reference(plan.loss, operands, plan.reduction, parameters, plan.flags, warn=False)
        inputs = [x for x, w in zip(operands, wanted, strict=True) if w]
        found = iter(torch.autograd.grad(value, inputs, grad_output.to(value.dtype), create_graph=True))
    return [next(found) if w else None for w in wanted]
