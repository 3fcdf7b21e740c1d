"""CuPy arrays through the engine: values, and values with gradients. Imported with the first CuPy array."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from cupylosses import checks, engine, interop
from cupylosses.definition import Loss
from cupylosses.reference import evaluate as evaluate_reference

cupy = interop.cupy()

_MAX_PLANS = 4096


class CupyDevice(engine.Device):
    """One CUDA device through CuPy: its memory pool, its current stream."""

    def __init__(self, index: int) -> None:
        super().__init__(index, cupy.cuda.Device(index).attributes["MultiProcessorCount"])
        self._captured: list[Any] = []

    def keep(self, array: Any) -> Any:
        """The same array, kept for good if a graph is being captured: CuPy's pool would hand its memory to others while
        the graph still writes there. (torch's graphs own what is allocated during their capture.)
        """
        if self.capturing():
            self._captured.append(array)
        return array

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: str) -> Any:
        kind = _dtype(dtype)
        size = interop.ITEMSIZE[dtype]
        memory = self.keep(cupy.empty(max(1, _extent(shape, strides)), dtype=kind))
        return cupy.ndarray(tuple(shape), kind, memory.data, tuple(s * size for s in strides))

    def full(self, count: int, value: float) -> Any:
        return self.keep(cupy.full(count, value, dtype=cupy.float64))

    def address(self, array: Any) -> int:
        return array.data.ptr

    def stream(self) -> int:
        return cupy.cuda.get_current_stream().ptr

    def capturing(self) -> bool:
        return cupy.cuda.get_current_stream().is_capturing()

    def expectation(self, slot: int) -> int:
        """None: grad_output is always 1 here, and a promise that is not verified must not read what others write."""
        return 0


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return cupy.dtype(ml_dtypes.bfloat16)
    return cupy.dtype(name)


_devices: dict[int, CupyDevice] = {}
_plans: dict[Any, engine.Plan] = {}


def evaluate(
    loss: Loss, operands: tuple[Any, ...], reduction: str, parameters: tuple[float, ...], flags: tuple[bool, ...]
) -> Any:
    """The loss of CuPy arrays."""
    return value_and_gradients(loss, operands, reduction, parameters, flags, None)[0]


def value_and_gradients(
    loss: Loss,
    operands: tuple[Any, ...],
    reduction: str,
    parameters: tuple[float, ...],
    flags: tuple[bool, ...],
    wanted: tuple[bool, ...] | None,
) -> tuple[Any, list[Any]]:
    """The loss of CuPy arrays and, in the same pass, the gradients that are wanted (of its sum, if not reduced)."""
    index = operands[0].device.id
    if any(x.device.id != index for x in operands):
        checks.devices(loss, [f"cuda:{x.device.id}" for x in operands])
    with cupy.cuda.Device(index):
        device = _devices.get(index)
        if device is None:
            device = _devices[index] = CupyDevice(index)
        plan = _plan(loss, operands, reduction, flags, device)
        if plan.warning:
            warnings.warn(plan.warning, UserWarning, stacklevel=5)
        if plan.elements == 0:
            value = evaluate_reference(loss, operands, reduction, loss.bind(parameters, flags), plan.result, plan.batch)
            gradients = [
                cupy.zeros(x.shape, x.dtype) if w else None for x, w in zip(operands, wanted or (), strict=False)
            ]
            return value, gradients
        pointers = [x.data.ptr for x in operands]
        if wanted is None:
            run = engine.elements if reduction == "none" else engine.reduce
            return run(plan, device, pointers, parameters), []
        promise, strides = None, None
        written = plan.written(wanted)
        if reduction == "none":
            value = engine.elements(plan, device, pointers, parameters)
            strides = (0,) * len(plan.shape)
        elif not any(written):
            value = engine.reduce(plan, device, pointers, parameters)
        else:
            value, promise = engine.reduce_with_gradient(plan, device, pointers, parameters, written)
            if written == wanted:
                return value, promise.gradients  # written for the grad_output that it is
        one = device.keep(cupy.ones((), dtype=_dtype(plan.result)))
        return value, engine.gradients(plan, device, pointers, parameters, wanted, one.data.ptr, strides, promise)


def _plan(
    loss: Loss, operands: Sequence[Any], reduction: str, flags: tuple[bool, ...], device: CupyDevice
) -> engine.Plan:
    key = (loss, reduction, flags, device.index) + tuple(
        (x.dtype.name, x.shape, x.strides, x.data.ptr & 15) for x in operands
    )
    plan = _plans.get(key)
    if plan is None:
        names = [x.dtype.name for x in operands]
        checks.dtypes(loss, names)
        tensors = tuple(
            engine.Tensor(n, x.shape, tuple(s // x.itemsize for s in x.strides), x.data.ptr % 16)
            for n, x in zip(names, operands, strict=True)
        )
        plan = engine.Plan(loss, flags, reduction, tensors, checks.promote(names), device.processors)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan
