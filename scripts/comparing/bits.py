"""Checks that two runs agree to the last bit: a repeated run, or a run on arrays of another library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy
import torch

import cupylosses
from comparing.table import Row, row
from cupylosses import functional, interop
from cupylosses.testing import host, memory
from cupylosses.testing.check import Check, Result, run
from cupylosses.testing.tolerance import compare, same_bits

REPEATED = "same bits"


# ----------------------------------------------------------------------------------------------------------------------
# Repeated runs


def repeated(check: Check) -> Row:
    """Repeats value and gradients, then without one-pass kernels, then the value alone: all bits must agree."""
    operands = check.operands()
    upstream = check.upstream(operands)[-1]
    nothing = (False,) * len(operands)

    def once(wanted: Sequence[bool] = check.gradients_of) -> Result:
        return run(check.ours(), operands, wanted, upstream)

    def settled() -> Result:
        if check.rescales:
            once()  # Forward expects this upstream gradient from now on.
        return once()

    first = settled()
    memory.poison(output_bytes(first.value, *first.gradients), check.device)
    with another_moment():
        problems = differences("again", first, settled())
    with cupylosses.set_one_pass(False):
        problems += differences("not in one pass", first, once())
    if not same_bits(first.value, once(nothing).value):
        problems.append("value: other bits without gradients")
    return row(REPEATED, check, problems=tuple(problems))


def another_moment() -> AbstractContextManager[object]:
    """Changes the grid and the order of threads on the host. A GPU schedules threads anew in each launch anyway."""
    return host.execution(processors=7, seed=1) if host.active() else nullcontext()


def output_bytes(*results: torch.Tensor | None) -> list[int]:
    """Sizes of the results in bytes."""
    return [x.numel() * x.element_size() for x in results if x is not None]


def differences(when: str, first: Result, second: Result) -> list[str]:
    """Describes each result whose bits differ."""
    found = [] if same_bits(first.value, second.value) else [f"value: other bits {when}"]
    for i, (a, b) in enumerate(zip(first.gradients, second.gradients, strict=True)):
        if a is not None and b is not None and not same_bits(a, b):
            found.append(f"gradient {i}: other bits {when}")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Other array libraries


@dataclass(frozen=True)
class Library:
    """Zero-copy conversion of tensors to an array library and back.

    ``pointer`` returns the address of an array. ``exact`` is True if the library's results must equal torch's to the
    last bit.
    """

    name: str
    array: type
    to: Callable[[torch.Tensor], Any]
    back: Callable[[Any], torch.Tensor]
    pointer: Callable[[Any], int]
    exact: bool


def library(device: str) -> Library:
    """CuPy on a GPU, NumPy on the CPU. NumPy adds in an order of its own, so it is not exact."""
    if device == "cpu":
        back = lambda x: torch.from_numpy(numpy.asarray(x))  # noqa: E731
        return Library("numpy", numpy.ndarray, lambda x: x.numpy(), back, lambda x: x.ctypes.data, exact=False)
    import cupy

    return Library("cupy", cupy.ndarray, cupy.from_dlpack, torch.from_dlpack, lambda x: x.data.ptr, exact=True)


def section(device: str) -> str:
    """The title of the section that compares with the array library."""
    return f"{library(device).name} arrays"


def crosses(check: Check) -> bool:
    """True if the array library supports the dtypes and matrix products of a check.

    NumPy has no bfloat16, CuPy 13 does not import bfloat16, and torch brings no cuBLAS for a CuPy of another CUDA
    version.
    """
    try:
        for name in check.dtypes:
            library(check.device).to(torch.zeros(1, dtype=getattr(torch, name), device=check.device))
    except (TypeError, ValueError, RuntimeError, BufferError, ImportError):
        return False
    return not (check.multiplies and without_products(check.device))


@cache
def without_products(device: str) -> str:
    """The reason why the array library cannot multiply matrices; empty if it can."""
    if device != "cpu":
        try:
            interop.cublas()
        except ImportError as error:
            return str(error)
    return ""


def arrays(check: Check) -> Row:
    """Compares a loss of arrays with the loss of tensors in the same memory; checks that nothing was copied."""
    other = library(check.device)
    tensors = check.operands()
    crossed = [other.to(x) for x in tensors]
    problems = []
    for name, x, y in zip(check.names, tensors, crossed, strict=True):
        if not x.data_ptr() == other.pointer(y) == other.back(y).data_ptr():
            problems.append(f"{name}: copied between torch and {other.name}")

    positions = [i for i, w in enumerate(check.gradients_of) if w]
    function = getattr(functional, check.loss.name)
    differentiate = partial(cupylosses.value_and_grad, function, argnums=positions, **check.options)
    if check.rescales:
        # Forward expects the upstream gradient 1 from now on, in both libraries.
        differentiate(*tensors), differentiate(*crossed)
    expected, expected_gradients = differentiate(*tensors)
    memory.poison(output_bytes(expected, *expected_gradients), check.device, other.name)
    value, gradients = differentiate(*crossed)
    call = check.ours()
    alone = call(*crossed)
    for what, ours, theirs in (
        ("value", value, expected),
        *zip((f"gradient {i}" for i in positions), gradients, expected_gradients, strict=True),
    ):
        if not isinstance(ours, (other.array, numpy.generic)):
            problems.append(f"{what}: a {type(ours).__name__} from {other.name} arrays")
        elif not same_bits(other.back(ours), theirs):
            problems.append(f"{what}: other bits than from torch tensors")
    error = None
    if other.exact:
        if not same_bits(other.back(alone), expected):
            problems.append("value without gradients: other bits than from torch tensors")
        mixed = call(tensors[0], *crossed[1:])
        if not (isinstance(mixed, torch.Tensor) and same_bits(mixed, expected)):
            problems.append(f"value: torch and {other.name} operands together give something else")
    else:
        result = compare(other.back(alone), check.truth(tensors, check.upstream(tensors)[0], "cpu").value)
        error = result.ulps
        if not result.ok:
            problems.append(f"value: {result}")
    return row(section(check.device), check, value_ulp=error, problems=tuple(problems))
