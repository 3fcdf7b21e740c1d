"""PyTorch: thin autograd Functions around the engine, and what torch's tensors need before it.

Imported with the first torch tensor that arrives. CPU tensors and tensor subclasses go through the reference formula,
which torch differentiates itself; what torch has wrapped or traces goes through :mod:`.transforms`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from cupylosses import checks, interop, options
from cupylosses.engines import device as engine_device
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise import plan as pointwise_plan
from cupylosses.engines.pointwise import reference as pointwise_reference
from cupylosses.engines.pointwise.call import Call, Parts, split
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.pointwise.reduction import Reduction, Resolved
from cupylosses.engines.softmax import arguments as softmax_arguments
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax import reference as softmax_reference
from cupylosses.engines.softmax.call import RowCall
from cupylosses.engines.strides import result_strides
from cupylosses.jit import gpu
from cupylosses.reference_math import divide
from cupylosses.torch_compat import (
    current_device,
    current_stream,
    differentiating,
    dispatch_mode_count,
    empty_strided,
    is_autocast_cpu_enabled,
    is_capturing,
    is_compiling,
    is_scripted,
    tensor_guard,
    transforms_active,
)

DTYPE_NAMES = {
    torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64",
    torch.bool: "bool", torch.int8: "int8", torch.uint8: "uint8", torch.int16: "int16", torch.int32: "int32",
    torch.int64: "int64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_MAX_PLANS, _MAX_RECENT = 4096, 4
_CPU = -1  # Tensor.get_device() of a CPU tensor

_is_grad_enabled, _is_autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled
_address, _strides = torch.Tensor.data_ptr, torch.Tensor.stride

if hasattr(getattr(torch, "compiler", None), "assume_constant_result"):  # 2.1
    # Dynamo cannot trace a walk up the frames: it calls this while it traces, so that a compiled call warns once.
    torch.compiler.assume_constant_result(checks.warn)


class TorchDevice(engine_device.Device):
    """One CUDA device through torch: its allocator, its current stream."""

    #: Whether another device may be the current one.
    is_one_of_several = False

    def __init__(self, index: int) -> None:
        super().__init__(index, *gpu.gpu(index))
        self.device = torch.device("cuda", index)
        self.is_one_of_several = torch.cuda.device_count() > 1
        self.stream = partial(current_stream, index)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.index).synchronize()

    def double(self, normalizer: Any) -> Any:
        if self.is_gpu and isinstance(normalizer, torch.Tensor) and normalizer.is_cpu:
            return float(normalizer)  # to copy it would wait for the GPU
        return _double(normalizer, self.device)

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> torch.Tensor:
        return empty_strided(shape, strides, DTYPES[dtype])

    def full(self, count: int, value: float) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.float64, device=self.device)

    def kept(self, count: int, value: float) -> torch.Tensor:
        # In another thread, on its default stream: what this one allocates may go to the pool of a CUDA graph, which
        # torch.compile's reduce-overhead mode then finds occupied.
        made: list[Any] = []

        def make() -> None:
            with torch.cuda.device(self.index):
                made.append(self.full(count, value))
                made.append(torch.cuda.current_stream().record_event())

        thread = Thread(target=make)
        thread.start()
        thread.join()
        array, event = made
        torch.cuda.current_stream(self.index).wait_event(event)
        return array

    def copy(self, array: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        return torch.empty_strided(array.shape, strides, dtype=array.dtype, device=array.device).copy_(array)

    def visible(self, words: int) -> tuple[torch.Tensor, int]:
        array = torch.zeros(words, dtype=torch.int64, pin_memory=self.is_gpu)
        return array, array.data_ptr()

    address = staticmethod(torch.Tensor.data_ptr)
    strides = staticmethod(torch.Tensor.stride)
    capturing = staticmethod(is_capturing)


#: A loss about to be computed, as the engine takes it: plan, device, addresses of the operands, parameters, divisor,
#: and which operands require grad.
_Launch = tuple[pointwise_plan.Plan, TorchDevice, list[int], tuple[float, ...], engine_device.Divisor, tuple[bool, ...]]

devices: dict[int, TorchDevice] = {}

#: What a plan is for beside the operands.
_How = tuple[Loss, Reduction, tuple[int, ...]]
#: Plans, their devices, and, by which operands are differentiated and the like, what tells operands of this plan.
plans: dict[Any, tuple[pointwise_plan.Plan, TorchDevice, dict[Any, Callable[..., bool] | None]]] = {}
#: Those of the last calls whose operands have aligned addresses.
_recent: dict[
    _How, tuple[tuple[bool, Callable[..., bool], pointwise_plan.Plan, TorchDevice, tuple[bool, ...]], ...]
] = {}

#: What runs the kernels of CPU tensors; None, for the reference formulas, but under `cupylosses.testing.host`.
host: TorchDevice | None = None


def use_host(device: TorchDevice | None) -> TorchDevice | None:
    """Runs CPU tensors through the engine on ``device``, with no plans yet, or by the formulas again; what it was."""
    global host
    before, host = host, device
    plans.clear()
    _recent.clear()
    softmax_arguments.plans.clear()
    devices.pop(_CPU, None)
    if device is not None:
        devices[_CPU] = device
    return before


def is_tracing() -> bool:
    """True while torch.compile or torch.jit.trace records a call. Both compare one recording with the next, so nothing
    that was kept from an earlier call may be used.
    """
    return is_compiling() or is_scripted()


def _is_transformed() -> bool:
    """True where a compiler, a transform or a dispatch mode (make_fx has one) must see operators. A kernel launched
    behind its back is missing from the graph, which then returns uninitialised memory.
    """
    return (
        is_compiling()
        or transforms_active()
        or forward_ad._current_level >= 0
        or dispatch_mode_count() > 0
        or is_scripted()
    )


def evaluate(call: Parts, warn: bool = True, plain: bool = False) -> torch.Tensor:
    """The loss of torch tensors, which no transform has wrapped if they are ``plain``; ``warn`` of operands that are
    broadcast, where the loss has it so.
    """
    if not plain and _is_transformed():
        return transforms.evaluate(Call(*call), warn)
    loss, operands, reduction, parameters, flags, normalizer = call
    found = _locate(loss, operands, reduction, flags)
    if found is None:
        return _evaluate_apart(Call(*call), warn)
    plan, device, pointers, wanted = found
    if plan.warning and warn:
        checks.warn(plan.warning)
    if device.is_one_of_several and current_device() != device.index:
        with torch.cuda.device(device.index):
            return evaluate(call, False, plain)
    differentiable = True in wanted
    divisor = plan.divisor
    if normalizer is not None or plan.found:
        call = Call(*call)
        normalizer = _placed(call, device)
        on_device = plan.resolved.counted if normalizer is None else type(normalizer) is not float
        differentiated = differentiable and plan.resolved.weights and call.wants_weight(wanted)
        if on_device and (differentiated or not plan.scalar):
            return divided(call, plan.resolved, plan.shape, plan.result)
        divisor = _divisor(call, plan, device, pointers, normalizer)
    if differentiable:
        launch = plan, device, pointers, parameters, divisor, wanted
        return (_apply_reduced if plan.scalar else _apply_elements)(launch, *operands)
    return (pointwise_plan.reduce if plan.scalar else pointwise_plan.elements)(
        plan, device, pointers, parameters, divisor
    )


def gradients(call: Call, grad_output: torch.Tensor, wanted: tuple[bool, ...]) -> list[torch.Tensor | None]:
    """The gradients of the operands that are wanted, None for the others. A weight that is wanted is no divisor."""
    found = _locate(call.loss, call.operands, call.reduction, call.flags)
    if found is None:
        return _reference_gradients(call, grad_output, wanted)
    plan, device, pointers, _ = found
    if device.is_one_of_several and current_device() != device.index:
        with torch.cuda.device(device.index):
            return gradients(call, grad_output, wanted)
    divisor = plan.divisor
    if call.normalizer is not None or plan.found:
        normalizer = _placed(call, device)
        if not plan.scalar and (plan.resolved.counted if normalizer is None else type(normalizer) is not float):
            return _divided_gradients(call, plan, grad_output, wanted)
        divisor = _divisor(call, plan, device, pointers, normalizer)
    grad_output = grad_output.resolve_neg()
    strides = None if plan.scalar else grad_output.stride()
    address = grad_output.data_ptr()
    return pointwise_plan.gradients(plan, device, pointers, call.parameters, divisor, wanted, address, strides)


def _locate(
    loss: Loss, operands: tuple[torch.Tensor, ...], reduction: Reduction, flags: tuple[int, ...]
) -> tuple[pointwise_plan.Plan, TorchDevice, list[int], tuple[bool, ...]] | None:
    """Plan, device and addresses of the operands, and which are differentiated; None for what no kernel can read, and
    where there is nothing to read.
    """
    how = loss, reduction, flags
    # The guard compares requires_grad of the tensors, but not the grad mode: without it a call under no_grad would leave
    # a plan without gradients to the calls after it.
    now = _is_grad_enabled()
    for grad, are_alike, plan, device, wanted in _recent.get(how, ()):
        if grad is now and are_alike(*operands):
            pointers, bits = [], 0
            for x in operands:
                address = x.data_ptr()
                pointers.append(address)
                bits |= address
            if bits & 15 == 0:
                return plan, device, pointers, wanted
    return _find(how, operands)


def _find(
    how: _How, operands: tuple[torch.Tensor, ...]
) -> tuple[pointwise_plan.Plan, TorchDevice, list[int], tuple[bool, ...]] | None:
    """The same of operands that are unlike those of the last calls."""
    if host is None and not operands[0].is_cuda:
        return None
    pointers: list[int] = []
    key: list[Any] = [*how, _is_autocast_enabled(), host and is_autocast_cpu_enabled()]
    for x in operands:
        if type(x) not in PLAIN or x.layout is not _STRIDED or x.is_neg():
            return None
        # Asked for, as the tensor is on the launch device: through a DLPack capsule it takes ten times as long.
        address = x.data_ptr()
        pointers.append(address)
        key += (x.dtype, x.shape, x.stride(), x.device, address & 15)
    found = plans.get(tuple(key))
    if found is None:
        if not all([_has_kernels(x) for x in operands]):
            return None
        found = _make_plan(tuple(key), how, operands, pointers)
    plan, device, known = found
    if not plan.elements:
        return None
    grad = _is_grad_enabled()
    wanted = tuple([grad and x.requires_grad for x in operands])
    kind = grad, wanted, torch.is_inference_mode_enabled(), *[(type(x), x.is_inference()) for x in operands]
    if kind not in known:
        known[kind] = tensor_guard(operands)
    are_alike, recent = known[kind], _recent.get(how, ())
    if are_alike and not any([p & 15 for p in pointers]) and all([x[1] is not are_alike for x in recent]):
        _recent[how] = ((grad, are_alike, plan, device, wanted), *recent[: _MAX_RECENT - 1])
    return plan, device, pointers, wanted


def _has_kernels(x: torch.Tensor) -> bool:
    """Whether kernels read memory of this device and dtype."""
    return (x.is_cuda or (host is not None and x.is_cpu)) and x.dtype in DTYPE_NAMES


def _evaluate_apart(call: Call, warn: bool) -> torch.Tensor:
    """The loss of tensors that no kernel can read: without memory, of another type, on another device, empty."""
    return (transforms.evaluate if transforms.is_fake(call) else evaluate_reference)(call, warn)


def _placed(call: Call, device: TorchDevice) -> Any:
    """The normalizer: a float where it is a number, or lies on the CPU: to copy that would wait for the GPU."""
    normalizer = call.normalizer
    if device.is_gpu and isinstance(normalizer, torch.Tensor) and normalizer.is_cpu:
        return float(normalizer)
    return normalizer


def _divisor(
    call: Call, plan: pointwise_plan.Plan, device: TorchDevice, pointers: Sequence[int], normalizer: Any
) -> engine_device.Divisor:
    """What the sum is divided by, where that is more than the shapes say."""
    if normalizer is not None and type(normalizer) is not float:
        array = on_device(call, normalizer)
        normalizer = array, array.data_ptr()
    return pointwise_plan.count(plan, device, pointers, call.parameters, normalizer)


def wanted(operands: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    return tuple([x.requires_grad for x in operands])


def on_device(call: Call | RowCall, normalizer: Any) -> torch.Tensor:
    """A normalizer of any library as a double on the device of the operands."""
    return _double(normalizer, call.operands[0].device)


def _double(normalizer: Any, device: torch.device) -> torch.Tensor:
    """The same on a device; a copy, since backward needs it too."""
    x = normalizer if isinstance(normalizer, torch.Tensor) else interop.adopt(normalizer, "torch")
    return x.detach().to(device=device, dtype=torch.float64, copy=True).reshape(())


def divided(call: Call, resolved: Resolved, shape: tuple[int, ...], result: str) -> torch.Tensor:
    """A mean whose divisor has dimensions, or a gradient: two sums, which torch divides and differentiates."""
    total, divisor, factor = split(call, resolved, shape)
    below = on_device(call, call.normalizer) if divisor is None else evaluate(divisor)
    return divide(torch, evaluate(total, warn=False), (below * factor).expand(resolved.shape)).to(DTYPES[result])


def _divided_gradients(
    call: Call, plan: pointwise_plan.Plan, grad_output: torch.Tensor, wanted: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """The gradients of such a mean, of which the divisor has none."""
    total, divisor, factor = split(call, plan.resolved, plan.shape)
    below = (on_device(call, call.normalizer) if divisor is None else evaluate(divisor)) * factor
    # An index over which there is nothing to sum has no gradient.
    scaled = torch.where(below == 0, 0.0, grad_output.double() / below).expand(plan.resolved.shape)
    return gradients(total, scaled, wanted)


def _make_plan(
    key: Any, how: _How, operands: tuple[torch.Tensor, ...], pointers: Sequence[int]
) -> tuple[pointwise_plan.Plan, TorchDevice, dict[Any, Callable[..., bool] | None]]:
    loss, reduction, flags = how
    names, compute = dtypes(loss, operands)
    index = common_device(loss, operands)
    device = devices.get(index)
    if device is None:
        device = devices[index] = TorchDevice(index)
    tensors = tuple(
        engine_device.Tensor(name, tuple(x.shape), x.stride(), p % 16)
        for name, x, p in zip(names, operands, pointers, strict=True)
    )
    plan = pointwise_plan.Plan(loss, flags, reduction, tensors, compute, device.processors, device.launcher)
    if len(plans) >= _MAX_PLANS:
        plans.clear()
        _recent.clear()
    plans[key] = plan, device, {}
    return plans[key]


def common_device(loss: Loss, operands: Sequence[torch.Tensor]) -> int:
    if len({x.device for x in operands}) > 1:
        checks.devices(loss, [x.device for x in operands])
    return operands[0].get_device()


def dtypes(loss: Loss, operands: Sequence[torch.Tensor]) -> tuple[list[str], str]:
    """The dtype of each operand and of the result: torch's promotion, and float32 for halves under autocast."""
    names = [DTYPE_NAMES.get(x.dtype, str(x.dtype).removeprefix("torch.")) for x in operands]
    pointwise_checks.dtypes(loss, names)
    result = checks.promote(names, [x.dim() for x in operands])
    # Autocast runs these losses in float32: operands are read in their own dtype, which is its cast without the copy.
    return names, "float32" if has_autocast(operands[0]) and result != "float64" else result


def has_autocast(x: torch.Tensor) -> bool:
    """Whether autocast is on for the tensor's device."""
    if x.is_cuda:
        return torch.is_autocast_enabled()
    return x.device.type == "cpu" and is_autocast_cpu_enabled()


def check(call: Call, warn: bool) -> str:
    """Checks what no plan was made for; the dtype of the result by name."""
    loss, operands = call.loss, call.operands
    for operand, x in zip(loss.operands, operands, strict=True):
        if x.layout is not _STRIDED:
            raise checks.not_dense(loss, operand.name, x.layout)
    common_device(loss, operands)
    _, promoted = dtypes(loss, operands)
    warning = pointwise_checks.broadcast_warning(loss, [tuple(x.shape) for x in operands])
    if warning and warn:
        checks.warn(warning)
    return call.reduction.out_dtype or promoted


def result_dtype(call: Call) -> torch.dtype:
    """The dtype of the result."""
    return DTYPES[call.reduction.out_dtype or dtypes(call.loss, call.operands)[1]]


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether kernels run for such a tensor, which a transform may have wrapped."""
    return _has_kernels(x) and (type(x) in PLAIN or type(x).__name__ == "FakeTensor")


def evaluate_reference(call: Call, warn: bool) -> torch.Tensor:
    """The loss by its formula, which torch differentiates."""
    check(call, warn)
    normalizer = call.normalizer
    if normalizer is not None and type(normalizer) is not float:
        normalizer = on_device(call, normalizer)
    result = pointwise_reference.evaluate(call._replace(normalizer=normalizer), dtypes(call.loss, call.operands)[1])
    return _as_stored_by_kernels(call, result) if type(result) is torch.Tensor else result


def _as_stored_by_kernels(call: Call, result: torch.Tensor) -> torch.Tensor:
    """A loss per element in the order of memory that kernels and torch give it: that of the first operand with all
    dimensions. Formulas have that of whichever operand comes first.
    """
    shape = tuple(result.shape)
    if call.reduction.kind != "none" or len(shape) < 2:
        return result
    strides = result_strides(shape, [(tuple(x.shape), x.stride()) for x in call.operands])
    if result.stride() == strides:
        return result
    order = sorted(range(len(shape)), key=lambda d: -strides[d])
    return result.permute(order).contiguous().permute([order.index(d) for d in range(len(shape))])


def _reference_gradients(call: Call, grad_output: torch.Tensor, wanted: tuple[bool, ...]) -> list[torch.Tensor | None]:
    """The gradients of the formula."""
    with differentiating():
        operands = [x.detach().requires_grad_(w) for x, w in zip(call.operands, wanted, strict=True)]
        value = evaluate_reference(call._replace(operands=tuple(operands)), warn=False)
        inputs = [x for x, w in zip(operands, wanted, strict=True) if w]
        found = iter(torch.autograd.grad(value, inputs, grad_output.to(value.dtype), materialize_grads=True))
    return [next(found) if w else None for w in wanted]


# ----------------------------------------------------------------------------------------------------------------------
# Losses of rows


def evaluate_rows(call: RowCall) -> Any:
    """A loss of rows of torch tensors."""
    if _is_transformed():
        return softmax_transforms.evaluate(call)
    return softmax_autograd.evaluate(call)


def common_row_device(call: RowCall) -> None:
    """Raises unless all arrays are on one device."""
    arrays = call.arrays
    if len({x.device for x in arrays.values()}) > 1:
        checks.devices(call.loss, [x.device for x in arrays.values()], list(arrays))


def check_rows(call: RowCall) -> str:
    """Checks what no plan was made for; the dtype by name that the operands promote to, or that autocast has."""
    for name, x in call.arrays.items():
        if x.layout is not _STRIDED:
            raise checks.not_dense(call.loss, name, x.layout)
    common_row_device(call)
    softmax_checks.arrays(call)
    promoted = softmax_checks.promoted(call)
    return "float32" if has_autocast(call.operands[0]) and promoted != "float64" else promoted


def evaluate_rows_by_formula(call: RowCall, readable: bool = True) -> Any:
    """The same by the formulas, which torch differentiates; labels are checked where they are ``readable``."""
    promoted = check_rows(call)
    if call.normalizer is not None and type(call.normalizer) is not float:
        call = call._replace(normalizer=on_device(call, call.normalizer))
    # Labels on a GPU are read only if somebody waits for them.
    first = call.operands[0]
    near = first.is_cpu or (first.is_cuda and call.check == "sync")
    return softmax_reference.evaluate(call, promoted, readable and near and not transforms.is_fake(call))


# ----------------------------------------------------------------------------------------------------------------------
# The Functions


def _promised(ctx: Any, grad_output: torch.Tensor) -> Any:
    """The gradients that were promised, if there are any left, or computed now. This runs in another thread than
    forward, to which every object that it touches has to come: what is usual is done here, all else in `_computed`.
    """
    operands = ctx.saved_tensors
    try:
        # Handed out once; a second backward computes into new buffers.
        promise = ctx.promises.pop()
    except IndexError:
        promise = None
    if promise is not None and not (_is_grad_enabled() or grad_output.is_neg()):
        check, gradients = promise
        device = check.device
        pointers = [*map(_address, operands)]
        if (
            check.complete
            and pointers == check.pointers
            and [*map(_strides, operands)] == check.strides
            and not (device.is_one_of_several and current_device() != device.index)
            and (upstream := _address_of(grad_output)) is not None
            and check.run(upstream, pointers)
        ):
            return None, *gradients
    return None, *_computed(ctx, operands, grad_output, promise)


def _address_of(grad_output: torch.Tensor) -> int | None:
    """None of a batch of several (is_grads_batched), which has no memory of its own."""
    try:
        return grad_output.data_ptr()
    except RuntimeError:
        return None


def _computed(
    ctx: Any, operands: tuple[torch.Tensor, ...], grad_output: torch.Tensor, promise: pointwise_plan.Promise | None
) -> Sequence[torch.Tensor | None]:
    """The gradients of operands that may lie elsewhere than in forward, for any grad_output."""
    plan, device, pointers, parameters, divisor, wanted = ctx.launch
    if torch.is_grad_enabled():  # create_graph=True
        return transforms.gradients(_call(plan, parameters, divisor, operands), plan.result, grad_output, wanted)
    if device.is_one_of_several and current_device() != device.index:
        with torch.cuda.device(device.index):
            return _computed(ctx, operands, grad_output, promise)
    grad_output = grad_output.resolve_neg()
    upstream = _address_of(grad_output)
    if upstream is None:
        return _reference_gradients(_call(plan, parameters, divisor, operands), grad_output, wanted)
    # Asked again: a hook that offloads saved tensors brings them back elsewhere, or laid out otherwise.
    now = [x.data_ptr() for x in operands]
    if [x.stride() for x in operands] != plan.strides or (now != pointers and not plan.aligned(now)):
        plan, promise = _plan_like(plan, operands, now), None
    strides = None if plan.scalar else grad_output.stride()
    return pointwise_plan.gradients(plan, device, now, parameters, divisor, wanted, upstream, strides, promise)


def _plan_like(
    plan: pointwise_plan.Plan, operands: Sequence[torch.Tensor], pointers: Sequence[int]
) -> pointwise_plan.Plan:
    """The same plan for operands that lie otherwise."""
    tensors = tuple(
        engine_device.Tensor(tensor.dtype, tensor.shape, x.stride(), address % 16)
        for tensor, x, address in zip(plan.tensors, operands, pointers, strict=True)
    )
    return pointwise_plan.Plan(
        plan.loss, plan.flags, plan.reduction, tensors, plan.promoted, plan.processors, plan.launcher
    )


def _call(
    plan: pointwise_plan.Plan,
    parameters: tuple[float, ...],
    divisor: engine_device.Divisor,
    operands: tuple[torch.Tensor, ...],
) -> Call:
    """The call that a launch came from."""
    # What a normalizer was is in the divisor, which replaces whatever else the sum would be divided by.
    normalizer = None
    if plan.reduction.normalized:
        normalizer = divisor.array if divisor.counted else divisor.arguments[0] / plan.resolved.divisor
    return Call(plan.loss, operands, plan.reduction, parameters, plan.flags, normalizer)


class _Reduced(Function):
    """A loss reduced to one number: value and gradients in one pass."""

    @staticmethod
    def forward(ctx: Any, launch: _Launch, *operands: torch.Tensor) -> torch.Tensor:
        # Saved, not kept: torch then reports operands that were edited in place, and offloading hooks see them. This is
        # all that save_for_backward does.
        ctx.to_save = operands
        ctx.launch = launch
        if not options._one_pass:
            ctx.promises = []
            return pointwise_plan.reduce(*launch[:-1])
        value, promise = pointwise_plan.reduce_with_gradient(*launch)
        ctx.promises = [] if promise is None else [promise]
        return value

    backward = staticmethod(_promised)


class _Elements(Function):
    """A loss per element, or per index of the dimensions that are kept."""

    @staticmethod
    def forward(ctx: Any, launch: _Launch, *operands: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*operands)
        ctx.launch = launch
        return pointwise_plan.elements(*launch[:-1])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        return None, *_computed(ctx, ctx.saved_tensors, grad_output, None)


def apply_of(function: type[Function]) -> Any:
    """``function.apply`` without what it and its backward do first.

    Function.apply looks for transforms of torch.func, which evaluate() has done. What torch calls in backward looks for
    the function there is, in a thread in which Python takes several times as long.
    """
    function._backward_cls.apply = function.backward
    return super(Function, function).apply


_apply_reduced, _apply_elements = apply_of(_Reduced), apply_of(_Elements)

from cupylosses.backends.torch import softmax_autograd, softmax_transforms, transforms  # noqa: E402  (which need what is above)
