"""Switches that make CPU tensors run the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from cupylosses.backends.torch import device as torch_device
from cupylosses.backends.torch.plans import use_host
from cupylosses.engines.device import TICKET, Device
from cupylosses.interop import ITEMSIZE
from cupylosses.jit.gpu import DECLARED_BYTES, Chip
from cupylosses.testing.host import settings
from cupylosses.testing.host.launch import Launcher
from cupylosses.testing.host.settings import Settings
from cupylosses.testing.memory import NAN_BYTE

#: Simulated GPU with little shared memory per block, so that even short rows count as long, and with few threads per
#: block, because threads take turns on the host. A cluster still has more than 32 warps.
SMALL = Chip(DECLARED_BYTES + (8 << 10), clusters=True, threads=512)

#: Number of multiprocessors: few, so that even small losses need several rounds of blocks.
PROCESSORS = 2


class HostDevice(torch_device.TorchDevice):
    """CPU in the role of a GPU with a few multiprocessors: torch's CPU allocator, no streams."""

    is_gpu = False
    launcher = Launcher

    def __init__(self, processors: int) -> None:
        Device.__init__(self, -1, processors, SMALL)
        self.device = torch.device("cpu")

    def empty(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, misalignment: int = 0
    ) -> torch.Tensor:
        """Returns an array filled with NaN, so that elements that no kernel writes are noticed."""
        assert type(shape) is type(strides) is tuple, "what allocates on a GPU takes no other sequences"
        dtype_of, offset = torch_device.DTYPES[dtype], misalignment // ITEMSIZE[dtype]
        if not misalignment:
            array = torch.empty_strided(shape, strides, dtype=dtype_of, device=self.device)
        else:
            memory = torch.empty(prod(shape) + offset, dtype=dtype_of, device=self.device)
            array = memory.set_(memory.untyped_storage(), offset, shape, strides)
        return array.fill_(float("nan") if array.is_floating_point() else NAN_BYTE)

    def matmul(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None = None) -> None:
        # On CPUs with AMX, torch's bfloat16 products read outside the rows of a view, where there is NaN.
        super().matmul(a.contiguous(), b.contiguous(), out, add)

    def workspace(self, stream: int, groups: int, capturing: bool) -> tuple[Any, int]:
        """Returns one workspace per size, so that an access beyond it touches memory that nobody owns."""
        need = TICKET + groups
        if need not in self._workspaces:
            array = self.full(need, 0.0)
            self._workspaces[need] = (array, self.address(array), need)
        return self._workspaces[need][:2]

    def kept(self, count: int, value: float) -> torch.Tensor:
        return self.full(count, value)

    def stream(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def capturing(self) -> bool:
        return False


def active() -> bool:
    """True if CPU tensors currently run the kernels."""
    return torch_device.host is not None


def switch_on() -> None:
    """Makes CPU tensors run the kernels for the rest of the program, as within `execution`."""
    use_host(HostDevice(PROCESSORS))


@contextmanager
def execution(processors: int = PROCESSORS, **fields: Any) -> Iterator[HostDevice]:
    """Within this context, losses of CPU tensors run their kernels on the host instead of the reference formulas.

    Plans, workspaces and expectations are fresh. ``processors`` determines grids, as the number of SMs of a GPU does.
    The other arguments are fields of :class:`~cupylosses.testing.host.settings.Settings`.
    """
    device = HostDevice(processors)
    before, old_settings = use_host(device), settings.use(Settings(**fields))
    try:
        yield device
    finally:
        use_host(before)
        settings.use(old_settings)
