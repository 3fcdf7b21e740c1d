"""Random cases: GPU time of random losses, shapes, dtypes, layouts and modes beside eager and a copy.

A grid has only the cases that somebody thought of. No random case may be slower than eager, nor than our loss on
contiguous copies of its operands, copying included; there are no other bars. A seed always draws the same cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarking import cliffs
from benchmarking.cases import Case, Layout
from benchmarking.draw import DTYPES, Draw
from benchmarking.figures import HVP
from benchmarking.records import Row
from benchmarking.selection import Run
from benchmarking.workloads import Workload
from cupylosses.checks import FLOATING
from cupylosses.definition.base import Definition

GROUP = "random"

COLUMNS = cliffs.COLUMNS


def cases(losses: Sequence[Definition], count: int, seed: int) -> list[Case]:
    """Draws ``count`` cases of these losses, about equally many of each engine."""
    draw = Draw(seed)
    by_engine: dict[type[Workload], list[Definition]] = {}
    for loss in losses:
        by_engine.setdefault(Workload.of(loss), []).append(loss)
    engines = list(by_engine.values())
    return [_case(draw.choice(draw.choice(engines)), draw) for _ in range(count)]


def _case(loss: Definition, draw: Draw) -> Case:
    workload = Workload.of(loss).random(loss, draw)
    if workload.mixes and sum(x in FLOATING for x in workload.dtypes) > 1 and draw.random() < 0.15:
        workload = replace(workload, others=draw.choice(sorted({*DTYPES} - {workload.dtype})))
    modes = [*workload.modes, "forward+backward", *([HVP] if workload.moves_memory else [])]
    layouts = {
        i: _layout(len(shape), draw)
        for i, (_, shape, dtype) in enumerate(
            zip(workload.loss.operands, workload.shapes, workload.dtypes, strict=False)
        )
        if dtype in FLOATING and shape and draw.random() < 0.35
    }
    return Case(GROUP, workload, draw.choice(modes), layouts)


def _layout(dims: int, draw: Draw) -> Layout:
    """Draws a layout that is not contiguous or not aligned."""
    kind = draw.choice(("order", "order", "step", "padding", "offset")) if dims > 1 else draw.choice(("step", "offset"))
    if kind == "step":
        return Layout(step=draw.choice((2, 3)))
    if kind == "padding":
        return Layout(padding=draw.choice((1, 3, 8, 64)))
    if kind == "offset":
        return Layout(offset=draw.choice((1, 2, 3, 5)))
    order = list(range(dims))
    while order == sorted(order):
        draw.shuffle(order)
    return Layout(tuple(order), offset=draw.choice((0, 0, 1)))


def measure(run: Run) -> Iterator[Row]:
    """Yields the rows of the cases that the losses, count and seed of a run determine."""
    yield from cliffs.rows(cases(cliffs.measured(run), run.count, run.seed), run)
