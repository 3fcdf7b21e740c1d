"""Kernels whose blocks claim rows until none is left: a grid is no larger than the number of blocks that run at once.

A block that has to wait until another one ends would start only after all rows have been claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from devices import KERNELS

import cupylosses.functional as F
from cupylosses.jit import compiler
from cupylosses.jit.kernel import Kernel
from cupylosses.testing import host
from cupylosses.testing.tolerance import same_bits


class Launched(NamedTuple):
    kernel: Kernel
    planned: int
    grid: int


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """Kernels launched from now on and their grids, in the order of their first launches."""
    found: list[Launched] = []
    bind = compiler.Launcher.bind

    def noted(self: Any, variant: Kernel, loaded: Any, geometry: tuple[int, ...]) -> Any:
        launch: Any = bind(self, variant, loaded, geometry)
        grid: int = launch.args[-len(geometry)]
        found.append(Launched(variant, geometry[0], grid))
        return launch

    monkeypatch.setattr(compiler.Launcher, "bind", noted)
    return found


def room_for(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, every launcher reports that this many blocks run at once."""
    for kind in (compiler.Launcher, host.launch.Launcher):
        monkeypatch.setattr(kind, "at_once", classmethod(lambda *_: blocks))


def results(function: Callable[..., Any], operands: list[torch.Tensor], reduction: str) -> list[torch.Tensor]:
    leaf = operands[0].clone().requires_grad_()
    with torch.no_grad():
        found = [function(*operands, reduction=reduction)]
    value = function(leaf, *operands[1:], reduction=reduction)
    return [*found, value.detach(), *torch.autograd.grad(value, leaf, torch.full_like(value, 0.5))]


def drawn(name: str, rows: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    first, second = torch.randn(2, rows, size, generator=generator)
    if name == "cross_entropy":
        return [first.to(KERNELS), torch.randint(size, (rows,), generator=generator).to(KERNELS)]
    return [first.to(KERNELS), (second.softmax(1) if name == "kl_div_with_logits" else second).to(KERNELS)]


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["cross_entropy", "kl_div_with_logits", "pearson_loss"])
def test_no_more_blocks_than_run_at_once(
    name: str, launched: list[Launched], monkeypatch: pytest.MonkeyPatch, fresh_plans: Callable[[], None]
) -> None:
    """Results have the same bits, however many blocks run at once."""
    operands = drawn(name, 1300, 40)
    expected: dict[str, list[torch.Tensor]] = {}
    for room in (1, 3, 1 << 20):
        room_for(room, monkeypatch)
        fresh_plans()
        launched.clear()
        for reduction in ("mean", "none"):
            found = results(getattr(F, name), operands, reduction)
            first = expected.setdefault(reduction, found)
            assert all(same_bits(a, b) for a, b in zip(found, first, strict=True))
        shortened = [x for x in launched if x.grid < x.planned]
        assert all(x.grid == room for x in shortened) and bool(shortened) == (room < 4)
        valued = [x for x in shortened if x.kernel.kind == "value_and_gradient"]  # type: ignore[attr-defined]
        assert bool(valued) == bool(shortened)


@pytest.mark.kernels
def test_blocks_of_columns_wait_for_their_turn(
    launched: list[Launched], monkeypatch: pytest.MonkeyPatch, fresh_plans: Callable[[], None]
) -> None:
    room_for(1, monkeypatch)
    fresh_plans()
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(1)).to(KERNELS).t()
    F.kl_div_with_logits(logits, logits.softmax(1))
    columns = [x for x in launched if getattr(x.kernel, "layout", "") == "columns"]
    assert columns and all(x.grid == x.planned > 1 for x in columns)


@pytest.mark.gpu
def test_a_gpu_tells_what_it_has_room_for(launched: list[Launched], fresh_plans: Callable[[], None]) -> None:
    """With 4096 chunks, each multiprocessor runs a few blocks at a time, and all run the same number."""
    fresh_plans()
    F.pearson_loss(*torch.randn(2, 1 << 17, 32, device=KERNELS))
    (found,) = launched
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    assert found.grid < found.planned and found.grid % processors == 0
