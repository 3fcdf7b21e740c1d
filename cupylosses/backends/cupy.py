"""CuPy arrays through the engine: values, and values with gradients. Imported with the first CuPy array."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from cupylosses import checks, interop
from cupylosses.definition.base import WEIGHT, Definition
from cupylosses.engines import device as engine_device
from cupylosses.engines.pointwise import plan as pointwise_plan
from cupylosses.engines.pointwise import reference as pointwise_reference
from cupylosses.engines.pointwise.call import Call, split
from cupylosses.engines.softmax.call import RowCall
from cupylosses.engines.softmax.dense_plan import Pair
from cupylosses.jit import gpu

cupy = interop.cupy()

_MAX_PLANS = 4096


class CupyDevice(engine_device.Device):
    """One CUDA device through CuPy: its memory pool, its current stream."""

    def __init__(self, index: int) -> None:
        super().__init__(index, *gpu.gpu(index))
        self._captured: list[Any] = []

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
        kind = dtype_of(dtype)
        size = interop.ITEMSIZE[dtype]
        memory = cupy.empty(max(1, _extent(shape, strides)), dtype=kind)
        return cupy.ndarray(tuple(shape), kind, memory.data, tuple(s * size for s in strides))

    def full(self, count: int, value: float) -> Any:
        return cupy.full(count, value, dtype=cupy.float64)

    def one(self, dtype: str) -> Any:
        """A grad_output of 1."""
        return cupy.ones((), dtype=dtype_of(dtype))

    def double(self, normalizer: Any) -> Any:
        x = normalizer if isinstance(normalizer, cupy.ndarray) else cupy.asarray(normalizer)
        return x.astype(cupy.float64).reshape(())

    def copy(self, array: Any, strides: tuple[int, ...]) -> Any:
        found = self.empty(array.shape, strides, array.dtype.name)
        bits = f"uint{8 * array.itemsize}"  # one kernel of CuPy's for all dtypes of this size, bfloat16 included
        found.view(bits)[...] = array.view(bits)
        return found

    def visible(self, words: int) -> tuple[Any, int]:
        memory = cupy.cuda.alloc_pinned_memory(8 * words)
        ctypes.memset(memory.ptr, 0, 8 * words)
        return memory, memory.ptr

    def address(self, array: Any) -> int:
        return array.data.ptr

    def strides(self, array: Any) -> tuple[int, ...]:
        return tuple([s // array.itemsize for s in array.strides])

    def stream(self) -> int:
        return cupy.cuda.get_current_stream().ptr

    def capturing(self) -> bool:
        return cupy.cuda.get_current_stream().is_capturing()

    def synchronize(self) -> None:
        cupy.cuda.get_current_stream().synchronize()

    def expectation(self, slot: int) -> int:
        """None: grad_output is always 1 here, and a promise that is not verified must not read what others write."""
        return 0

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Within it, memory is taken for good: CuPy's pool would hand out again what a graph that is being captured
        goes on writing to, what CuPy's own functions need for a moment included. (torch's graphs own what is allocated
        during their capture.)
        """
        allocate = cupy.cuda.get_allocator()

        def kept(size: int) -> Any:
            memory = allocate(size)
            self._captured.append(memory)
            return memory

        with cupy.cuda.using_allocator(kept):
            yield


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def dtype_of(name: str) -> Any:
    """CuPy's dtype of a name."""
    if name == "bfloat16":
        import ml_dtypes

        return cupy.dtype(ml_dtypes.bfloat16)
    return cupy.dtype(name)


_devices: dict[int, CupyDevice] = {}
_plans: dict[Any, pointwise_plan.Plan] = {}


@contextmanager
def _current(loss: Definition, arrays: Mapping[str, Any]) -> Iterator[CupyDevice]:
    """The device of all these arrays, made current."""
    first, *others = [x.device.id for x in arrays.values()]
    if any([x != first for x in others]):
        checks.devices(loss, [f"cuda:{x}" for x in (first, *others)], list(arrays))
    with cupy.cuda.Device(first):
        device = _devices.get(first)
        if device is None:
            device = _devices[first] = CupyDevice(first)
        with device.keeping() if device.capturing() else nullcontext():
            yield device


def evaluate(call: Call) -> Any:
    """The loss of CuPy arrays."""
    return value_and_gradients(call, None)[0]


def value_and_gradients(call: Call, wanted: tuple[bool, ...] | None, warn: bool = True) -> tuple[Any, list[Any]]:
    """The loss of CuPy arrays and, in the same pass, the gradients that are wanted (of its sum, if not one number)."""
    loss, operands = call.loss, call.operands
    with _current(loss, dict(zip([x.name for x in loss.operands], operands, strict=True))) as device:
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
    value = pointwise_reference.divide(cupy, total, divisor).astype(dtype_of(plan.result))
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
        checks.dtypes(loss, names)
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
    with _current(call.loss, call.arrays) as device:
        return cupy_softmax.value_and_gradients(call, wanted, device)


from cupylosses.backends import cupy_softmax  # noqa: E402  (which needs what is above)
