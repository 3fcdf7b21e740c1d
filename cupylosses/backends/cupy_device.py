"""One CUDA device, accessed through CuPy: its memory pool and its current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from cupylosses import checks, interop
from cupylosses.backends import cublas
from cupylosses.definition.base import Definition
from cupylosses.engines import device as engine_device
from cupylosses.engines import relayout
from cupylosses.jit import gpu

cupy = interop.cupy()


class CupyDevice(engine_device.Device):
    """One CUDA device, accessed through CuPy: its memory pool and its current stream."""

    def __init__(self, index: int) -> None:
        super().__init__(index, *gpu.gpu(index))
        self._captured: list[Any] = []

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, misalignment: int = 0) -> Any:
        kind = dtype_of(dtype)
        size = interop.ITEMSIZE[dtype]
        memory = cupy.empty(max(1, _extent(shape, strides)) + misalignment // size, dtype=kind)
        if misalignment:
            memory = memory[misalignment // size :]
        return cupy.ndarray(tuple(shape), kind, memory.data, tuple(s * size for s in strides))

    def zeros(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
        array = self.empty(shape, strides, dtype)
        array.fill(0)
        return array

    def full(self, count: int, value: float) -> Any:
        return cupy.full(count, value, dtype=cupy.float64)

    def one(self, dtype: str) -> Any:
        """Returns a ``grad_output`` of 1."""
        return cupy.ones((), dtype=dtype_of(dtype))

    def double(self, normalizer: Any) -> Any:
        x = normalizer if isinstance(normalizer, cupy.ndarray) else cupy.asarray(normalizer)
        return x.astype(cupy.float64).reshape(())

    def copy(self, array: Any, strides: tuple[int, ...]) -> Any:
        copy = self.empty(array.shape, strides, array.dtype.name)
        source = array.data.ptr, self.strides(array)
        if relayout.copy(self, array.shape, source, (copy.data.ptr, strides), array.itemsize):
            return copy
        self.assign(copy, array)
        return copy

    def counted(self, target: Any, ignored: int | None, mask: Any) -> Any:
        used = target.reshape(-1) != ignored if ignored is not None else None
        if mask is not None:
            used = mask.reshape(-1) if used is None else used & mask.reshape(-1)
        return cupy.flatnonzero(used)

    def taken(self, array: Any, index: Any) -> Any:
        return array[index]

    def spread(self, array: Any, index: Any, count: int) -> Any:
        rows = cupy.zeros((count, *array.shape[1:]), array.dtype)
        rows[index] = array
        return rows

    def viewed(self, matrix: Any, dtype: str) -> Any:
        return matrix.view(dtype_of(dtype))

    def converted(self, array: Any, dtype: str) -> Any:
        return array.astype(dtype_of(dtype))

    def padded(self, matrix: Any, rows: int, columns: int) -> Any:
        height, width = matrix.shape
        padded = self.empty((rows, columns), (columns, 1), matrix.dtype.name)
        self.assign(padded[:height, :width], matrix)
        if rows > height:
            self.clear_columns(padded[height:], 0)
        if columns > width:
            self.clear_columns(padded[:height], width)
        return padded

    def clear_columns(self, matrix: Any, first: int) -> None:
        matrix.view(_bits(matrix))[:, first:] = 0

    def assign(self, to: Any, array: Any) -> None:
        to.view(_bits(to))[...] = array.view(_bits(array))

    def matmul(self, a: Any, b: Any, out: Any, add: Any = None) -> None:
        if add is not None and add is not out:
            out[...] = add
        cublas.gemm(a, b, out, accumulate=add is not None)

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
        """Returns 0, for no slot of the table of expected grad_outputs.

        ``grad_output`` is always 1 here, and a speculative gradient that is never verified must not be scaled with a
        value that other calls write.
        """
        return 0

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Within this context, no allocation is ever freed.

        CuPy's pool would reuse memory that the graph under capture keeps writing to, including temporaries of CuPy's
        own functions. (torch's graphs own what is allocated during their capture.)
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


def _bits(array: Any) -> str:
    """Unsigned integer dtype as wide as the elements: CuPy then has one kernel for all dtypes of a width.

    This includes bfloat16.
    """
    return f"uint{8 * array.itemsize}"


def dtype_of(name: str) -> Any:
    """Returns the CuPy dtype of a name."""
    if name == "bfloat16":
        import ml_dtypes

        return cupy.dtype(ml_dtypes.bfloat16)
    return cupy.dtype(name)


devices: dict[int, CupyDevice] = {}


@contextmanager
def current_device(loss: Definition, names: Sequence[str], arrays: Sequence[Any]) -> Iterator[CupyDevice]:
    """Makes the device that all arrays are on the current one, and yields it; raises if they are on several."""
    first, *others = [x.device.id for x in arrays]
    if any([x != first for x in others]):
        checks.devices(loss, [f"cuda:{x}" for x in (first, *others)], names)
    with cupy.cuda.Device(first):
        device = devices.get(first)
        if device is None:
            device = devices[first] = CupyDevice(first)
        with device.keeping() if device.capturing() else nullcontext():
            yield device
