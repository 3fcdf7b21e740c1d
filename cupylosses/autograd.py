"""PyTorch: thin autograd Functions around the engine, and what torch's tensors need before it.

Imported with the first torch tensor that arrives. CPU tensors, tensor subclasses and tensors under ``torch.compile``, a
transform of ``torch.func`` or forward-mode differentiation go through the reference formula, which torch differentiates
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from cupylosses import checks, engine, interop, options, reference
from cupylosses.call import Call, split
from cupylosses.definition import Loss

_NAMES = {
    torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64",
    torch.bool: "bool", torch.int8: "int8", torch.uint8: "uint8", torch.int16: "int16", torch.int32: "int32",
    torch.int64: "int64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_MAX_PLANS = 4096
_CPU = -1  # Tensor.get_device() of a CPU tensor

_to_dlpack = torch._C._to_dlpack
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


if hasattr(torch.amp, "is_autocast_available"):  # 2.4, where the argument came and the older function was deprecated

    def _is_autocast_cpu_enabled() -> bool:
        return torch.is_autocast_enabled("cpu")
else:
    _is_autocast_cpu_enabled = torch.is_autocast_cpu_enabled


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

    def address(self, array: torch.Tensor) -> int:
        return array.data_ptr()

    def stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.index)

    def capturing(self) -> bool:
        return _is_capturing()


#: A loss about to be computed, as the engine takes it: plan, device, addresses of the operands, parameters, divisor.
_Launch = tuple[engine.Plan, TorchDevice, list[int], tuple[float, ...], engine.Divisor]

_devices: dict[int, TorchDevice] = {}
_plans: dict[Any, tuple[engine.Plan, TorchDevice]] = {}

#: What runs the kernels of CPU tensors; None, for the reference formulas, but under `cupylosses.testing.host`.
_host: TorchDevice | None = None


def use_host(device: TorchDevice | None) -> TorchDevice | None:
    """Runs CPU tensors through the engine on ``device``, with no plans yet, or by the formulas again; what it was."""
    global _host
    before, _host = _host, device
    _plans.clear()
    _devices.pop(_CPU, None)
    if device is not None:
        _devices[_CPU] = device
    return before


def pointer(x: torch.Tensor) -> int:
    """The device address of a user's tensor, through DLPack."""
    capsule = _to_dlpack(x)
    return interop.capsule_pointer(capsule)


def evaluate(call: Call, warn: bool = True) -> torch.Tensor:
    """The loss of torch tensors; ``warn`` of operands that are broadcast, where the loss has it so."""
    if _is_compiling() or _transforms_active() or forward_ad._current_level >= 0:
        return _evaluate_reference(call, warn)
    loss, operands, reduction, parameters, flags, normalizer = call
    pointers: list[int] = []
    key: tuple[Any, ...] = (loss, reduction, flags, torch.is_autocast_enabled())
    differentiable = False
    for x in operands:
        if not x.is_cuda:
            if _host is None or not x.is_cpu:
                return _evaluate_reference(call, warn)
            key += (_is_autocast_cpu_enabled(),)
        if type(x) not in _PLAIN or x.dtype not in _NAMES or x.layout is not _STRIDED or x.is_neg():
            return _evaluate_reference(call, warn)
        if x.requires_grad:
            differentiable = True
        address = pointer(x)
        pointers.append(address)
        key += (x.dtype, x.shape, x.stride(), x.get_device(), address & 15)
    found = _plans.get(key)
    if found is None:
        found = _make_plan(key, call, pointers)
    plan, device = found
    if plan.warning and warn:
        checks.warn(plan.warning)
    if plan.elements == 0:
        return _evaluate_reference(call, warn=False)
    if device.is_gpu and _current_device() != device.index:
        with torch.cuda.device(device.index):
            return evaluate(call, warn=False)
    differentiable = differentiable and torch.is_grad_enabled()
    divisor = plan.divisor
    if normalizer is not None or plan.resolved.found:
        if device.is_gpu and isinstance(normalizer, torch.Tensor) and normalizer.is_cpu:
            normalizer = float(normalizer)  # to copy it to the GPU would wait for the GPU
        on_device = plan.resolved.counted if normalizer is None else type(normalizer) is not float
        differentiated = differentiable and plan.resolved.weights and call.wants_weight(_wanted(operands))
        if on_device and (differentiated or not plan.scalar):
            return _divided(call, plan)
        if on_device and normalizer is not None:
            array = _on_device(call, normalizer)
            normalizer = array, array.data_ptr()
        divisor = engine.count(plan, device, pointers, parameters, normalizer)
    if differentiable:
        launch = plan, device, pointers, parameters, divisor
        return (_apply_reduced if plan.scalar else _apply_elements)(launch, *operands)
    return (engine.reduce if plan.scalar else engine.elements)(plan, device, pointers, parameters, divisor)


def _wanted(operands: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    return tuple([x.requires_grad for x in operands])


def _on_device(call: Call, normalizer: Any) -> torch.Tensor:
    """A normalizer of any library as a double on the device of the operands; a copy, since backward needs it too."""
    x = normalizer if isinstance(normalizer, torch.Tensor) else interop.adopt(normalizer, "torch")
    return x.detach().to(device=call.operands[0].device, dtype=torch.float64, copy=True).reshape(())


def _divided(call: Call, plan: engine.Plan) -> torch.Tensor:
    """A mean whose divisor has dimensions, or a gradient: two sums, which torch divides and differentiates."""
    total, divisor, factor = split(call, plan.resolved, plan.shape)
    below = _on_device(call, call.normalizer) if divisor is None else evaluate(divisor)
    return reference.divide(torch, evaluate(total, warn=False), (below * factor).expand(plan.resolved.shape)).to(
        _DTYPES[plan.result]
    )


def _make_plan(key: Any, call: Call, pointers: Sequence[int]) -> tuple[engine.Plan, TorchDevice]:
    loss, operands = call.loss, call.operands
    names, compute = _dtypes(loss, operands)
    index = _common_device(loss, operands)
    device = _devices.get(index)
    if device is None:
        device = _devices[index] = TorchDevice(index)
    tensors = tuple(
        engine.Tensor(name, tuple(x.shape), x.stride(), p % 16)
        for name, x, p in zip(names, operands, pointers, strict=True)
    )
    plan = engine.Plan(loss, call.flags, call.reduction, tensors, compute, device.processors, device.launcher)
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan, device
    return plan, device


def _common_device(loss: Loss, operands: Sequence[torch.Tensor]) -> int:
    if len({x.device for x in operands}) > 1:
        checks.devices(loss, [x.device for x in operands])
    return operands[0].get_device()


def _dtypes(loss: Loss, operands: Sequence[torch.Tensor]) -> tuple[list[str], str]:
    """The dtype of each operand and of the result: torch's promotion, and float32 for halves under autocast."""
    names = [_NAMES.get(x.dtype, str(x.dtype).removeprefix("torch.")) for x in operands]
    checks.dtypes(loss, names)
    result = checks.promote(names, [x.dim() for x in operands])
    # Autocast runs these losses in float32: operands are read in their own dtype, which is its cast without the copy.
    return names, "float32" if _autocast(operands[0]) and result != "float64" else result


def _autocast(x: torch.Tensor) -> bool:
    """Whether autocast is on for the tensor's device."""
    if x.is_cuda:
        return torch.is_autocast_enabled()
    return x.device.type == "cpu" and _is_autocast_cpu_enabled()


def _evaluate_reference(call: Call, warn: bool) -> torch.Tensor:
    """The loss by its formula, which torch differentiates."""
    loss, operands, normalizer = call.loss, call.operands, call.normalizer
    for operand, x in zip(loss.operands, operands, strict=True):
        if x.layout is not _STRIDED:
            raise checks.not_dense(loss, operand.name, x.layout)
    _common_device(loss, operands)
    _, compute = _dtypes(loss, operands)
    shapes = [tuple(x.shape) for x in operands]
    warning = checks.broadcast_warning(loss, shapes)
    if warning and warn:
        checks.warn(warning)
    if normalizer is not None and type(normalizer) is not float:
        normalizer = _on_device(call, normalizer)
    return reference.evaluate(call._replace(normalizer=normalizer), compute)


# ----------------------------------------------------------------------------------------------------------------------
# The Functions


def _backward(ctx: Any, grad_output: torch.Tensor) -> Any:
    """The gradients from the engine: those that were promised, if there are any left, or computed now."""
    operands = ctx.saved_tensors
    plan, device, _, parameters, divisor = ctx.launch
    wanted = ctx.needs_input_grad[1:]
    if torch.is_grad_enabled():
        # create_graph=True: kernels are opaque to autograd, so the differentiable route is the formula.
        return None, *_differentiable(plan, parameters, divisor, operands, wanted, grad_output)
    if device.is_gpu and _current_device() != device.index:
        with torch.cuda.device(device.index):
            return _backward(ctx, grad_output)
    try:
        promise, wanted = ctx.promises.pop()  # handed out once; a second backward computes into new buffers
    except IndexError:
        promise = None
    # Asked again: a hook that offloads saved tensors brings them back elsewhere, or laid out otherwise.
    pointers = [x.data_ptr() for x in operands]
    for x, tensor, address in zip(operands, plan.tensors, pointers):
        if x.stride() != tensor.strides or address & 15 not in (0, tensor.misalignment):
            plan, promise = _plan_like(plan, operands, pointers), None
            break
    if grad_output.is_neg():
        grad_output = grad_output.resolve_neg()
    strides = None if plan.scalar else grad_output.stride()
    address = grad_output.data_ptr()
    return None, *engine.gradients(plan, device, pointers, parameters, divisor, wanted, address, strides, promise)


def _plan_like(plan: engine.Plan, operands: Sequence[torch.Tensor], pointers: Sequence[int]) -> engine.Plan:
    """The same plan for operands that lie otherwise."""
    tensors = tuple(
        engine.Tensor(tensor.dtype, tensor.shape, x.stride(), address % 16)
        for tensor, x, address in zip(plan.tensors, operands, pointers, strict=True)
    )
    return engine.Plan(plan.loss, plan.flags, plan.reduction, tensors, plan.promoted, plan.processors, plan.launcher)


def _differentiable(
    plan: engine.Plan,
    parameters: tuple[float, ...],
    divisor: engine.Divisor,
    operands: tuple[torch.Tensor, ...],
    wanted: Sequence[bool],
    grad_output: torch.Tensor,
) -> list[torch.Tensor | None]:
    # What a normalizer was is in the divisor, which replaces whatever else the sum would be divided by.
    normalizer = None
    if plan.reduction.normalized:
        normalizer = divisor.array if divisor.counted else divisor.arguments[0] / plan.resolved.divisor
    call = Call(plan.loss, operands, plan.reduction, parameters, plan.flags, normalizer)
    with torch.enable_grad():
        value = _evaluate_reference(call, warn=False)
        inputs = [x for x, w in zip(operands, wanted, strict=True) if w]
        found = iter(torch.autograd.grad(value, inputs, grad_output.to(value.dtype), create_graph=True))
    return [next(found) if w else None for w in wanted]


class _Reduced(Function):
    """A loss reduced to one number: value and gradients in one pass."""

    @staticmethod
    def forward(ctx: Any, launch: _Launch, *operands: torch.Tensor) -> torch.Tensor:
        # Saved, not kept: torch then reports operands that were edited in place, and offloading hooks see them.
        ctx.save_for_backward(*operands)
        ctx.launch = launch
        ctx.promises = []
        wanted = ctx.needs_input_grad[1:]
        written = launch[0].written(wanted)
        if True not in written or not options.one_pass_enabled():
            return engine.reduce(*launch)
        value, promise = engine.reduce_with_gradient(*launch, written)
        ctx.promises.append((promise, wanted))
        return value

    backward = staticmethod(_backward)


class _Elements(Function):
    """A loss per element, or per index of the dimensions that are kept."""

    @staticmethod
    def forward(ctx: Any, launch: _Launch, *operands: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*operands)
        ctx.launch = launch
        ctx.promises = []
        return engine.elements(*launch)

    backward = staticmethod(_backward)


# Function.apply first looks for transforms of torch.func, which evaluate() has done.
_apply_reduced = super(Function, _Reduced).apply
_apply_elements = super(Function, _Elements).apply
