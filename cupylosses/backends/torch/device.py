"""One CUDA device, accessed through torch, and the names of torch's dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from math import prod
from threading import Thread
from typing import Any

import torch

from cupylosses import interop
from cupylosses.engines import relayout
from cupylosses.engines.device import Device
from cupylosses.jit import gpu
from cupylosses.torch_compat import (
    below_autograd,
    current_device,
    current_stream,
    empty_strided,
    is_autocast_cpu_enabled,
    is_capturing,
)

DTYPE_NAMES = {
    torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64",
    torch.bool: "bool", torch.int8: "int8", torch.uint8: "uint8", torch.int16: "int16", torch.int32: "int32",
    torch.int64: "int64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

#: Tensor types that kernels read. Other subclasses have semantics of their own.
PLAIN = (torch.Tensor, torch.nn.Parameter)


class TorchDevice(Device):
    """One CUDA device, accessed through torch: its allocator and its current stream."""

    #: True if another device may be the current one.
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
            return float(normalizer)  # a copy would wait for the GPU
        return double(normalizer, self.device)

    def empty(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, misalignment: int = 0
    ) -> torch.Tensor:
        if misalignment:
            offset = misalignment // interop.ITEMSIZE[dtype]
            memory = empty_strided((prod(shape) + offset,), (1,), DTYPES[dtype])
            # Not a view, which would keep a tensor as its base.
            return memory.set_(memory.untyped_storage(), offset, shape, strides)
        return empty_strided(shape, strides, DTYPES[dtype])

    def zeros(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> torch.Tensor:
        return self.empty(shape, strides, dtype).zero_()

    def full(self, count: int, value: float) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.float64, device=self.device)

    def kept(self, count: int, value: float) -> torch.Tensor:
        # Allocated by another thread on its default stream. An allocation of this thread may go to the pool of a CUDA
        # graph, which torch.compile's reduce-overhead mode would then find occupied.
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
        return copied(array, strides)

    def counted(self, target: torch.Tensor, ignored: int | None, mask: torch.Tensor | None) -> torch.Tensor:
        used = target.reshape(-1) != ignored if ignored is not None else None
        if mask is not None:
            used = mask.reshape(-1) if used is None else used & mask.reshape(-1)
        assert used is not None
        return used.nonzero().reshape(-1)

    def taken(self, array: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return array.detach().index_select(0, index)

    def spread(self, array: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
        rows = array.new_zeros((count, *array.shape[1:]))
        return rows.index_copy_(0, index, array)

    def detached(self, array: torch.Tensor) -> torch.Tensor:
        return array.detach()

    def parts(self, matrix: torch.Tensor, rows: int, count: int) -> Sequence[torch.Tensor]:
        # Half the time of `split`, or of a slice for each part. The parts do not share the version counter of the
        # matrix, on which nothing relies: no graph has saved a detached matrix.
        return matrix.unsafe_split(count) if count < rows else (matrix,)

    def viewed(self, matrix: torch.Tensor, dtype: str) -> torch.Tensor:
        return matrix.view(DTYPES[dtype])

    def converted(self, array: torch.Tensor, dtype: str) -> torch.Tensor:
        return array.detach().to(DTYPES[dtype])

    def padded(self, matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        height, width = matrix.shape
        padded = matrix.new_empty((rows, columns))
        padded[:height, :width].copy_(matrix.detach())
        if rows > height:
            padded[height:].zero_()
        if columns > width:
            padded[:height, width:].zero_()
        return padded

    def clear_columns(self, matrix: torch.Tensor, first: int) -> None:
        matrix[:, first:].zero_()

    def assign(self, to: torch.Tensor, array: torch.Tensor) -> None:
        to.copy_(array)

    def matmul(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None = None) -> None:
        if out.dtype == a.dtype:
            if add is None:
                torch.mm(a, b, out=out)
            else:
                torch.addmm(add, a, b, out=out)
        elif self.is_gpu and has_wide_products():
            if add is None:
                torch.mm(a, b, out_dtype=out.dtype, out=out)
            else:
                wide = add if add is out else add.expand(out.shape)
                torch.addmm(wide, a, b, out_dtype=out.dtype, out=out)
        else:
            # CPUs, and torch before 2.8.
            a, b = a.to(out.dtype), b.to(out.dtype)
            self.matmul(a, b, out, add)

    def visible(self, words: int) -> tuple[torch.Tensor, int]:
        array = torch.zeros(words, dtype=torch.int64, pin_memory=self.is_gpu)
        return array, array.data_ptr()

    address = staticmethod(torch.Tensor.data_ptr)
    untracked = below_autograd
    strides = staticmethod(torch.Tensor.stride)
    capturing = staticmethod(is_capturing)


@cache
def has_wide_products() -> bool:
    """True if products of 16-bit matrices can have float32 results: torch 2.8 or newer."""
    return hasattr(torch.ops.aten.addmm, "dtype_out")


devices: dict[int, TorchDevice] = {}

#: Device that runs the kernels of CPU tensors. It is None, which selects the reference formulas, except under
#: `cupylosses.testing.host`.
host: TorchDevice | None = None

_CPU = -1  # Tensor.get_device() of a CPU tensor


def set_host(device: TorchDevice | None) -> TorchDevice | None:
    """Sets the device that runs the kernels of CPU tensors, None for no device; returns the previous one."""
    global host
    before, host = host, device
    devices.pop(_CPU, None)
    if device is not None:
        devices[_CPU] = device
    return before


def device_of(x: torch.Tensor) -> TorchDevice:
    """Returns the device that a tensor is on."""
    index = x.get_device()
    device = devices.get(index)
    if device is None:
        device = devices[index] = TorchDevice(index)
    return device


def has_kernels(x: torch.Tensor) -> bool:
    """True if kernels can read the device memory and the dtype of this tensor."""
    return (x.is_cuda or (host is not None and x.is_cpu)) and x.dtype in DTYPE_NAMES


def has_autocast(x: torch.Tensor) -> bool:
    """True if autocast is on for the tensor's device."""
    if x.is_cuda:
        return torch.is_autocast_enabled()
    return x.device.type == "cpu" and is_autocast_cpu_enabled()


def double(normalizer: Any, device: torch.device) -> torch.Tensor:
    """Returns a normalizer of any library as a double on a device: always a copy, since backward needs it too."""
    x = normalizer if isinstance(normalizer, torch.Tensor) else interop.adopt(normalizer, "torch")
    return x.detach().to(device=device, dtype=torch.float64, copy=True).reshape(())


def laid_out(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Returns the tensor with these strides, copied if necessary."""
    x = x.resolve_neg()
    return x if x.stride() == tuple(strides) else copied(x, strides)


def copied(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Returns a copy with these strides."""
    copy = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    if has_kernels(x) and type(x) in PLAIN and not x.is_neg():
        device, size = device_of(x), x.element_size()
        source, target = (x.data_ptr(), x.stride()), (copy.data_ptr(), strides)
        # Kernels are launched on the current device.
        here = not device.is_one_of_several or current_device() == device.index
        if here and relayout.copy(device, x.shape, source, target, size):
            return copy
    return copy.copy_(x.detach())
