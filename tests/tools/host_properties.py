"""Properties of every loss that only host execution can check; see :mod:`cupylosses.testing.properties`.

Unlike there, these functions enter host execution themselves, as often as they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest import mock

from cupylosses.engines.pointwise import layout as pointwise_layout
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import samples
from cupylosses.testing.check import run
from cupylosses.testing.host.execution import execution
from cupylosses.testing.layouts import LAYOUTS
from cupylosses.testing.properties import require
from cupylosses.testing.tolerance import same_bits

if TYPE_CHECKING:
    from torch import Tensor

#: Numbers of blocks: one, few, more than there is work. Numbers of processors: those of a small and of a larger GPU.
BLOCKS = (1, 3, 50)
PROCESSORS = (1, 7)

#: So few groups of partial sums that even small losses have several batches per group, as large ones do.
FEW_CHUNKS = 5


def few_groups() -> Any:
    """Within this context, plans cut losses into at most :data:`FEW_CHUNKS` groups."""
    return mock.patch.object(pointwise_layout, "MAX_CHUNKS", FEW_CHUNKS)


@contextmanager
def _blocks(count: int) -> Iterator[None]:
    with mock.patch.object(pointwise_layout, "grid", lambda *_: count), execution(seed=count):
        yield


def keeps_its_bits_in_any_order(
    function: Callable[..., Tensor], loss: Loss, layout: str = "contiguous", shape: tuple[int, ...] = (33, 131)
) -> None:
    """Checks that value and gradients do not depend on the order of threads or on the grid."""
    shapes = LAYOUTS[layout].shapes_of(loss, shape)
    drawn = samples.operands(loss, loss.values(), ("float32",) * len(shapes), shapes)
    operands = LAYOUTS[layout].place(drawn)

    def results() -> list[Tensor]:
        found = []
        for reduction, grad_output in product(("none", "mean"), (1.0, 1.0, -3.0)):
            one = run(partial(function, reduction=reduction), operands, (True,) * len(shapes), grad_output)
            found += [one.value, *(g for g in one.gradients if g is not None)]
        return found

    with execution():
        expected = results()
    others = {f"order {seed}": execution(seed=seed) for seed in (1, 2)}
    others |= {f"{n} blocks": _blocks(n) for n in BLOCKS}
    others |= {f"{n} processors": execution(processors=n, seed=n) for n in PROCESSORS}
    for name, other in others.items():
        with other:
            same = [same_bits(a, b) for a, b in zip(results(), expected, strict=True)]
        require(all(same), f"{name}: other bits")


def goes_by_the_note_of_each_warp(
    function: Callable[..., Tensor], loss: Loss, layout: str = "contiguous", shape: tuple[int, ...] = (2500,)
) -> None:
    """A warp whose recorded ``grad_output`` differs from the true one writes its part again, and no other warp does.

    The expectation may change while forward runs, so the records of warps may differ; this test makes them differ. The
    next forward expects the ``grad_output`` that backward received.
    """
    import torch

    shapes = LAYOUTS[layout].shapes_of(loss, shape)
    drawn = samples.operands(loss, loss.values(), ("float32",) * len(shapes), shapes)
    operands = [x.requires_grad_() for x in LAYOUTS[layout].place(drawn)]

    with execution():
        expected = torch.autograd.grad(function(*operands), operands)
        surprise = torch.autograd.grad(value := function(*operands), operands, torch.full_like(value, -3.0))
        ((check, written),) = function(*operands).grad_fn.speculations
        learned = [same_bits(a, b) for a, b in zip(written, surprise, strict=True) if a is not None]
        require(all(learned), "what backward was given is not expected afterwards")
        torch.autograd.grad(function(*operands), operands)
        times = [torch.zeros_like(x, dtype=torch.int64) for x in expected]
        for warp in range(check.records.numel()):
            value = function(*operands)
            ((check, written),) = value.grad_fn.speculations
            if check.records[warp].isnan():  # As allocated: a warp without elements records nothing.
                continue
            check.records[warp] = 7.0
            for x in written:
                x.fill_(float("nan"))
            for count, found, exact in zip(times, torch.autograd.grad(value, operands), expected, strict=True):
                again = ~found.isnan()
                count += again
                require(bool(again.any()), f"warp {warp} has a note, but wrote nothing again")
                require(same_bits(found[again], exact[again]), f"what warp {warp} wrote again has other bits")
        require(all(bool((x == 1).all()) for x in times), f"parts that were written again: {times}")
