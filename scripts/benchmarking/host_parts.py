"""Breakdown of the host time of one of our calls: each part is measured in isolation, the rest by difference.

The parts are those of a real call. A call is recorded (the arrays that it allocates, and the kernels that it launches,
with their arguments), and then each kind of operation is replayed in isolation. A part that cannot be replayed in
isolation is measured as a call that returns after this part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from benchmarking import timing
from benchmarking.timing import Timing
from benchmarking.workloads import step
from cupylosses.backends.torch import device as torch_device
from cupylosses.backends.torch import evaluation
from cupylosses.engines import execute
from cupylosses.jit import compiler
from cupylosses.testing.eager import Call


@dataclass
class Recording:
    """The allocations and launches of one step. ``arrays`` keeps alive the memory that the launches write to."""

    device: Any = None
    allocations: list[tuple[Any, ...]] = field(default_factory=list)
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Records the allocations and launches within the context, which still happen."""
    found = Recording()
    empty, launch = torch_device.TorchDevice.empty, compiler.Launcher.launch

    def record_empty(device: Any, *arguments: Any) -> Any:
        found.device = device
        found.allocations.append(arguments)
        found.arrays.append(empty(device, *arguments))
        return found.arrays[-1]

    def record_launch(launcher: Any, stream: int, table: int) -> None:
        found.launches.append((launcher, stream, *arguments_of(launcher, table)))
        launch(launcher, stream, table)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch_device.TorchDevice, "empty", record_empty))
        stack.enter_context(patch.object(compiler.Launcher, "launch", record_launch))
        yield found


def arguments_of(launcher: compiler.Launcher, table: int) -> list[int | float]:
    """The arguments of a launch, copied out of its table because the table's memory does not stay valid."""
    pointers = (ctypes.c_uint64 * len(launcher.format)).from_address(table)
    kinds = [ctypes.c_double if kind == "d" else ctypes.c_int64 for kind in launcher.format]
    return [kind.from_address(pointer).value for kind, pointer in zip(kinds, pointers, strict=True)]


@contextmanager
def cut(module: ModuleType, name: str, value: torch.Tensor) -> Iterator[None]:
    """Replaces a function by one that immediately returns ``value``.

    Raises:
        RuntimeError: nothing called the function, so nothing was cut off and the timing would mean something else.
    """
    reached = False

    def stand_in(*_: object) -> torch.Tensor:
        nonlocal reached
        reached = True
        return value

    with patch.object(module, name, stand_in):
        yield
    if not reached:
        raise RuntimeError(f"{module.__name__}.{name} is not on the path of a call")


class _Nothing(torch.autograd.Function):
    """An autograd Function that computes nothing, to measure torch's own cost of any Function."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gradient: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*operands)
        ctx.gradient = gradient
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        operands = ctx.saved_tensors
        return None, None, ctx.gradient.detach(), *(None for _ in operands[1:])


def parts(call: Call, operands: Sequence[torch.Tensor], backward: bool) -> dict[str, Timing]:
    """Measures the host microseconds of a whole step, of each part, and of the rest."""
    for i, x in enumerate(operands):
        x.requires_grad_(backward and i == 0)
    step(call, operands)
    with recorded() as found:
        step(call, operands)
    device, gradient = found.device, torch.empty_like(operands[0])
    value = torch.empty((), dtype=operands[0].dtype, device=operands[0].device)

    def allocate() -> None:
        for arguments in found.allocations:
            device.empty(*arguments)

    def launch() -> None:
        for launcher, *arguments in found.launches:
            launcher(*arguments)

    def through_torch(*tensors: torch.Tensor) -> torch.Tensor:
        return _Nothing.apply(value, gradient, *tensors)

    pointers = f"operand addresses ({len(operands)})"
    calls: dict[str, Callable[[], object]] = {
        "whole": lambda: step(call, operands),
        f"kernel launches ({len(found.launches)})": launch,
        f"allocations ({len(found.allocations)})": allocate,
        pointers: lambda: [x.data_ptr() for x in operands],
        "current stream": device.stream,
    }
    if backward:
        calls["torch's autograd around an empty Function"] = lambda: step(through_torch, operands)
    measured = timing.host(calls, torch.cuda.synchronize)
    detached = [x.detach() for x in operands]
    with cut(evaluation, "evaluate", value):
        outer = timing.host({"": lambda: call(*detached)}, torch.cuda.synchronize)[""]
    with cut(execute, "value", value):
        inner = timing.host({"": lambda: call(*detached)}, torch.cuda.synchronize)[""]
    measured["argument checks, choice of library"] = outer
    measured["tensor checks, plan lookup"] = difference(inner, outer, measured[pointers])
    total = measured.pop("whole")
    return {"whole": total, **measured, "rest": difference(total, *measured.values())}


def difference(whole: Timing, *others: Timing) -> Timing:
    """The time that remains of ``whole`` without ``others``, subtracted quantile by quantile."""
    return Timing(
        whole.median - sum(x.median for x in others),
        whole.low - sum(x.low for x in others),
        whole.high - sum(x.high for x in others),
        whole.repetitions,
    )
