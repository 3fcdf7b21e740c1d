"""Stand-in for CuPy on top of NumPy, so that CuPy's path through the kernels runs without a GPU.

It implements exactly the parts of CuPy that cupylosses uses, as CuPy's documentation describes them. Its memory is the
host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import array_api_compat.numpy
import numpy

from cupylosses import dispatch, interop
from cupylosses.engines.cache import plans
from cupylosses.testing.host import settings
from cupylosses.testing.host.execution import PROCESSORS, SMALL
from cupylosses.testing.host.launch import Launcher
from cupylosses.testing.host.settings import Settings
from cupylosses.testing.memory import NAN_BYTE


class Array(numpy.ndarray):
    """``cupy.ndarray``: an array with a memory pointer and a device."""

    def __new__(cls, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None) -> Array:
        if memptr is None:
            dtype = numpy.dtype(dtype)
            memptr = _allocator[-1](dtype.itemsize * int(numpy.prod(shape)))
        return numpy.ndarray.__new__(cls, shape, dtype, memptr.memory, 0, strides)

    @property
    def data(self) -> Any:  # type: ignore[override]
        """Pointer to the first element; that of an array without gaps can be passed to a new array."""
        memory = self.reshape(-1).view(numpy.uint8) if self.flags.c_contiguous else None
        return SimpleNamespace(ptr=self.ctypes.data, memory=memory)

    @property
    def device(self) -> Any:  # type: ignore[override]
        """The only device, unless a test assigns another one to an array."""
        return Device(self.__dict__.get("index", 0))


class Device:
    """``cupy.cuda.Device``: a small GPU."""

    attributes: ClassVar = {"MultiProcessorCount": PROCESSORS, "MaxSharedMemoryPerBlockOptin": SMALL.shared}
    compute_capability = "90"

    def __init__(self, index: int) -> None:
        self.id = index

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Stream:
    """``cupy.cuda.Stream`` with synchronous execution.

    ``capturing`` is True while a graph is being captured, and ``waits`` counts how often the host has waited. This is
    not the default stream, which never captures.
    """

    ptr = 1

    def __init__(self) -> None:
        self.capturing, self.waits = False, 0

    def is_capturing(self) -> bool:
        return self.capturing

    def synchronize(self) -> None:
        self.waits += 1


def _allocate(size: int) -> Any:
    """Allocates memory filled with NaN."""
    return SimpleNamespace(memory=numpy.full(size, NAN_BYTE, numpy.uint8))


_allocator: list[Callable[[int], Any]] = [_allocate]


@contextmanager
def _using_allocator(allocator: Callable[[int], Any]) -> Iterator[None]:
    _allocator.append(allocator)
    try:
        yield
    finally:
        _allocator.pop()


def _pinned(size: int) -> Any:
    memory = numpy.full(size, NAN_BYTE, numpy.uint8)
    return SimpleNamespace(ptr=memory.ctypes.data, memory=memory)


def _filled(value: float) -> Callable[..., Array]:
    def make(shape: Any, dtype: Any = float) -> Array:
        return _full(shape, value, dtype)

    return make


def _full(shape: Any, value: float, dtype: Any = float) -> Array:
    found = Array(shape, dtype)
    found.fill(value)
    return found


def _own(function: Callable[..., Any]) -> Callable[..., Array]:
    """Wraps a function of NumPy so that it returns an :class:`Array`."""
    return lambda *arguments, **named: numpy.asarray(function(*arguments, **named)).view(Array)


def _gemm(a: Any, b: Any, out: Any, accumulate: bool) -> None:
    """``cublas.gemm``, whose arithmetic is at least float32."""
    wide = numpy.float64 if out.dtype == numpy.float64 else numpy.float32
    product = numpy.matmul(numpy.asarray(a, wide), numpy.asarray(b, wide))
    out[...] = product + out if accumulate else product


def _module(stream: Stream) -> Any:
    """Returns the module that replaces ``cupy``."""
    same = ("asarray", "ascontiguousarray", "broadcast_to", "flatnonzero", "from_dlpack", "full_like", "ones_like",
            "sum", "where", "zeros_like")  # fmt: skip
    cuda = SimpleNamespace(
        Device=Device,
        get_current_stream=lambda: stream,
        get_allocator=lambda: _allocator[-1],
        using_allocator=_using_allocator,
        alloc_pinned_memory=_pinned,
    )
    return SimpleNamespace(
        ndarray=Array,
        dtype=numpy.dtype,
        float32=numpy.float32,
        float64=numpy.float64,
        empty=Array,
        full=_full,
        ones=_filled(1.0),
        zeros=_filled(0.0),
        cuda=cuda,
        **{name: _own(getattr(numpy, name)) for name in same},
    )


@contextmanager
def cupy(**chosen: Any) -> Iterator[Any]:
    """Yields a module that is CuPy within this context; its arrays run their kernels on the host.

    ``chosen`` are fields of :class:`~cupylosses.testing.host.settings.Settings`.
    """
    stream = Stream()
    module, namespace = _module(stream), interop.namespace
    try:
        dispatch.backend("cupy")
    except ImportError:
        with mock.patch.object(interop, "cupy", lambda: module):
            dispatch.backend("cupy")
    from cupylosses.backends import cublas, cupy_device
    from cupylosses.backends import cupy as cupy_backend

    def of_numpy(x: Any) -> Any:
        return array_api_compat.numpy if isinstance(x, Array) else namespace(x)

    before = settings.use(Settings(**chosen))
    plans.clear()
    try:
        with (
            mock.patch.object(interop, "cupy", lambda: module),
            mock.patch.object(interop, "namespace", of_numpy),
            mock.patch.dict(interop.known_kinds, {Array: "cupy"}),
            mock.patch.object(cupy_backend, "cupy", module),
            mock.patch.object(cupy_device, "cupy", module),
            mock.patch.object(cupy_device.CupyDevice, "launcher", Launcher),
            mock.patch.object(cublas, "gemm", _gemm),
            mock.patch.dict(cupy_device.devices, clear=True),
            numpy.errstate(divide="ignore", invalid="ignore", over="ignore"),
        ):
            yield module
    finally:
        plans.clear()
        settings.use(before)
