"""Determinism: the same bits from run to run, with and without gradients, and on any grid, hence on any GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from devices import GPU, KERNELS
from grids import in_turn, short_or_full

import cupylosses.functional as F
from cupylosses.checks import FLOATING
from cupylosses.definition.kernel_sources import kernel_directory
from cupylosses.engines.pointwise import layout as pointwise_layout
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import properties, samples
from cupylosses.testing.check import by_position, run
from cupylosses.testing.layouts import LAYOUTS
from cupylosses.testing.tolerance import same_bits

pytestmark = [pytest.mark.representatives, pytest.mark.in_turn, pytest.mark.filterwarnings("ignore:.*broadcast")]

#: Sizes that no vector width divides, with more than one batch per chunk, which has one partial sum.
LARGE = (1031, 4099)


@pytest.mark.parametrize(
    ("layout", "reduction"),
    in_turn(["contiguous", "sliced", "row", "column", "scalar", "outer"], ["mean", "none"]),
)
def test_repeated_calls_have_the_same_bits(loss: Loss, layout: str, reduction: str, device: str) -> None:
    shape = (515, 1027) if device == "cuda" else (67, 129)
    properties.repeats_bit_by_bit(
        getattr(F, loss.name), loss, reduction=reduction, layout=layout, device=device, shape=shape
    )


@pytest.mark.parametrize("dtype", FLOATING)
def test_repeated_calls_of_every_dtype(loss: Loss, dtype: str, device: str) -> None:
    properties.repeats_bit_by_bit(getattr(F, loss.name), loss, dtype=dtype, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "row"])
def test_many_calls_of_a_large_loss(loss: Loss, layout: str) -> None:
    """Blocks finish in a different order each time; the partial sums are still added in order."""
    properties.repeats_bit_by_bit(getattr(F, loss.name), loss, layout=layout, device=KERNELS, shape=LARGE, times=20)


def results(loss: Loss, operands: list[torch.Tensor], reduction: str) -> list[torch.Tensor]:
    """Value without gradients, then value and gradients for expected and for unexpected upstream gradients."""
    function = by_position(loss)
    found = [function(*operands, reduction=reduction)]
    for grad_output in (1.0, 1.0, -3.0):
        result = run(lambda *x: function(*x, reduction=reduction), operands, (True,) * len(operands), grad_output)
        found += [result.value, *(g for g in result.gradients if g is not None)]
    return found


@pytest.mark.kernels
@pytest.mark.parametrize("layout", ["contiguous", "row", "column", *short_or_full([], ["sliced", "scalar", "outer"])])
def test_grid_does_not_matter(
    loss: Loss, layout: str, monkeypatch: pytest.MonkeyPatch, fresh_plans: Callable[[], None]
) -> None:
    """Grids of one block, few, more than there is work, and the usual number for GPUs of 1, 7 and 1000 processors."""
    grid = pointwise_layout.grid
    shapes = LAYOUTS[layout].shapes_of(loss, (257, 1031) if GPU else (67, 259))
    drawn = samples.operands(loss, loss.values(), ("float32",) * len(shapes), shapes, KERNELS)
    operands = LAYOUTS[layout].place(drawn)
    for reduction in ("none", "mean"):
        fresh_plans()
        monkeypatch.setattr(pointwise_layout, "grid", grid)
        expected = results(loss, operands, reduction)
        others: list[Callable[..., int]] = [lambda *_, n=n: n for n in (1, 3, 5000 if GPU else 40)]
        others += [lambda groups, threads, _, n=n: grid(groups, threads, n) for n in (1, 7, 1000)[: 3 if GPU else 2]]
        for other in others:
            monkeypatch.setattr(pointwise_layout, "grid", other)
            fresh_plans()
            found = results(loss, operands, reduction)
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_streams_do_not_disturb_each_other(loss: Loss) -> None:
    """Concurrent calls on several streams have their own partial sums, and their own tickets of the last block."""
    function = by_position(loss)
    streams = [torch.cuda.Stream() for _ in range(4)]
    operands = [
        [torch.rand(LARGE, device="cuda", generator=torch.Generator("cuda").manual_seed(i)) for _ in loss.operands]
        for i in range(len(streams))
    ]
    expected = [function(*x) for x in operands]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[] for _ in streams]
    for _, (i, stream) in product(range(20), enumerate(streams)):
        with torch.cuda.stream(stream):
            found[i].append(function(*operands[i]))
    torch.cuda.synchronize()
    for values, value in zip(found, expected, strict=True):
        assert all(same_bits(x, value) for x in values)


@pytest.mark.kernels
def test_promise_of_torchs_deterministic_mode(loss: Loss) -> None:
    """Nothing raises under torch's switch, because nothing is non-deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        operands = [torch.rand(33, device=KERNELS, requires_grad=True) for _ in loss.operands]
        by_position(loss)(*operands).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.grad is not None for x in operands)


def test_kernels_have_no_floating_point_atomics() -> None:
    files = [x for x in kernel_directory().rglob("*.cuh") if x.parent.name != "softmax"]
    text = "".join(x.read_text(encoding="utf-8") for x in files)
    code = re.sub(r"//.*", "", text)
    calls: list[Any] = re.findall(r"\b(atomic\w+|(?:red|atom)\.[\w.]+)", code)
    # Counters, flags and sums of integers, whose order changes no bit. Additions are recognized by their operands.
    integers = {f"atom.acq_rel.gpu.global.{x}.u32" for x in ("inc", "add")}
    integers |= {"atomicInc", "atomicOr", "atomicCAS", "atomicExch"}
    counted = r"reinterpret_cast<unsigned long long\*>\(\w+\)|memory\.histogram|claims\b"
    added = re.findall(rf"\batomicAdd\((?:{counted})", code)
    assert set(calls) <= integers | {"atomicAdd"} and len(added) == calls.count("atomicAdd")
