"""Losses executed on the host: the switch, the launches of a call, and results in any order of threads."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import cycle, product
from typing import Any

import pytest
import torch
from grids import FEWEST, REPRESENTATIVES, short_or_full
from tools import host_properties as host_properties

import cupylosses
import cupylosses.functional as F
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import host, properties, samples
from cupylosses.testing.check import by_position
from cupylosses.testing.host.settings import Settings
from cupylosses.testing.tolerance import same_bits

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or host.find_compiler() is None, reason="no C++ compiler on Linux"),
    pytest.mark.filterwarnings("ignore:.*broadcast"),
]


def each_in_turn(values: Sequence[str]) -> Any:
    """Parametrizes a test over values, each with one representative in turn; with ``--thorough``, with every one."""

    def parametrize(test: Callable[..., None]) -> Callable[..., None]:
        (name,) = (x for x in inspect.signature(test).parameters if x != "loss")
        few = list(zip(cycle(REPRESENTATIVES), values))
        return pytest.mark.parametrize(("loss", name), short_or_full(few, list(product(REPRESENTATIVES, values))))(test)

    return parametrize


def launches(call: Callable[[], Any]) -> int:
    before = host.counters.launches
    call()
    return host.counters.launches - before


def test_switch() -> None:
    """Kernels run inside the ``with`` block, formulas before and after it; blocks may be nested."""
    loss = FEWEST
    operands = samples.operands(loss, loss.values(), ("float32",) * len(loss.operands), [(5, 7)] * len(loss.operands))
    function = by_position(loss)
    assert not host.active()
    assert launches(lambda: function(*operands)) == 0
    with host.execution():
        assert host.active()
        assert launches(lambda: function(*operands)) == 1
        with host.execution(processors=1, seed=3):
            assert launches(lambda: function(*operands)) == 1
        assert launches(lambda: function(*operands)) == 1
    assert not host.active()
    assert launches(lambda: function(*operands)) == 0


def test_switch_comes_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), host.execution(seed=5):
        raise ZeroDivisionError
    assert not host.active()
    assert host.settings.settings() == Settings()


@pytest.mark.programs
def test_switch_by_environment(python: Callable[..., str]) -> None:
    program = """
import torch, cupylosses.functional as F, cupylosses.testing
from cupylosses.testing import host
F.mse_loss(torch.rand(5), torch.rand(5))
print(host.active(), host.counters.launches)
"""
    assert python(program, CUPYLOSSES_HOST="1") == "True 1"


def test_kernels_of_one_pass() -> None:
    """Forward takes one launch; backward takes a check, which recomputes the gradient if grad_output is unexpected."""
    x, y = torch.rand(9, requires_grad=True), torch.rand(9)
    with host.execution():
        value = F.mse_loss(x, y)
        assert launches(lambda: value.backward(torch.tensor(-3.0))) == 1
        assert same_bits(x.grad, (x.detach() - y) * 2 * torch.tensor(-3.0 * (1 / 9)))
        with cupylosses.set_one_pass(False):
            assert launches(lambda: F.mse_loss(x, y).backward()) == 2


def test_second_derivatives_take_the_formula() -> None:
    x, y = torch.rand(9, requires_grad=True), torch.rand(9)
    with host.execution():
        (first,) = torch.autograd.grad(F.mse_loss(x, y, reduction="sum"), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    assert (second == 2).all()


def test_products_with_second_derivatives_leave_out_what_nobody_asks_for() -> None:
    x, y = torch.rand(9, requires_grad=True), torch.rand(9)
    with host.execution():
        (first,) = torch.autograd.grad(F.mse_loss(x, y), x, create_graph=True)

        def product(create_graph: bool) -> torch.Tensor:
            return torch.autograd.grad(first, x, torch.ones(9), retain_graph=True, create_graph=create_graph)[0]

        expected = product(True).detach()
        # One launch for the gradients alone. With a graph, one for value and gradients, and one that checks these.
        assert launches(lambda: product(False)) == 1
        assert launches(lambda: product(True)) == 2
        assert same_bits(product(False), expected)
        # The derivative with respect to grad_output is the value.
        upstream = torch.ones((), requires_grad=True)
        (first,) = torch.autograd.grad(F.mse_loss(x, y), x, upstream, create_graph=True)
        (along,) = torch.autograd.grad(first, upstream, torch.ones(9))
        torch.testing.assert_close(along, (2 / 9 * (x - y)).sum().detach())


def test_autocast() -> None:
    """As on a GPU, operands are read unconverted, and the result is float32. The two modes share no plan."""
    x = torch.rand(9, dtype=torch.bfloat16)
    with host.execution():
        for enabled in (False, True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                assert F.mse_loss(x, x).dtype == (torch.float32 if enabled else torch.bfloat16)


@each_in_turn(["contiguous", "sliced", "row", "column", "scalar", "outer"])
def test_order_and_grid_do_not_matter(loss: Loss, layout: str) -> None:
    host_properties.keeps_its_bits_in_any_order(getattr(F, loss.name), loss, layout)


@each_in_turn(["contiguous", "sliced"])
def test_each_warp_answers_for_its_own_part(loss: Loss, layout: str) -> None:
    shape = (2500,) if layout == "contiguous" else (50, 50)
    host_properties.goes_by_the_note_of_each_warp(getattr(F, loss.name), loss, layout, shape)


@each_in_turn(["contiguous", "sliced", "row", "column"])
def test_one_pass_or_two(loss: Loss, layout: str) -> None:
    """One shape has several blocks and chunks and a tail; the other is a single partial batch."""
    for shape in ((33, 131), (1, 3)):
        with host.execution(seed=1):
            properties.writes_one_gradient_in_one_pass_or_two(
                getattr(F, loss.name), loss, layout=layout, reduction="sum", shape=shape
            )


@each_in_turn(["none", "mean"])
def test_more_batches_than_groups(loss: Loss, reduction: str) -> None:
    """Cases that otherwise need millions of elements: many batches per chunk, and many runs per lane."""
    for size in (10_301, 20_001):
        with host_properties.few_groups(), host.execution(seed=1):
            properties.agrees_with_truth(getattr(F, loss.name), loss, shape=(size,), reduction=reduction)


@pytest.mark.representatives
@pytest.mark.thorough
def test_offsets_beyond_32_bits(loss: Loss) -> None:
    with host.execution(seed=1):
        properties.reads_beyond_32_bits(getattr(F, loss.name), loss)


@pytest.mark.representatives
@pytest.mark.thorough
def test_nan_is_never_swallowed(loss: Loss) -> None:
    with host.execution(seed=1):
        properties.propagates_nan(getattr(F, loss.name), loss)
