"""Graph: GPU time of forward and backward in a CUDA graph, where launches cost no host time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarking import timing
from benchmarking.figures import EAGER
from benchmarking.pointwise import sweep
from benchmarking.providers import Call, attempt, rivals
from benchmarking.records import Row
from benchmarking.selection import Run
from benchmarking.workloads import Inputs, Workload, step

EXPONENTS = (10, 12, 14, 17, 20, 22, 24)
QUICK_EXPONENTS = (10, 17, 20)

#: Number of steps in a graph; each has its own operands.
STEPS = 20

COLUMNS = (
    "loss", "elements", "dtype", "provider", "status", "us", "us_low", "us_high", "repetitions", "eager_ratio",
)  # fmt: skip


def measure(run: Run) -> Iterator[Row]:
    """Yields the rows of all losses at all sizes."""
    for loss in run.swept_losses:
        for exponent in QUICK_EXPONENTS if run.quick else EXPONENTS:
            workload = sweep(loss, "float32", exponent)
            if run.begin(f"{workload}: CUDA graph"):
                yield from _measure(workload, run.target)


def _measure(workload: Workload, target: float) -> Iterator[Row]:
    inputs = Inputs(workload, STEPS)
    inputs.differentiate(1)
    built = {name: attempt(partial(captured, call, inputs)) for name, call in rivals(workload).items()}
    working = {name: partial(_replay, graph) for name, (_, graph) in built.items() if graph}
    timings = timing.interleaved(working, target)
    for name, (status, _) in built.items():
        row = {**workload.describe("forward+backward", COLUMNS), "provider": name, "status": status}
        if name in timings:
            time, scale = timings[name], 1e3 / STEPS
            row |= {"us": time.median * scale, "us_low": time.low * scale, "us_high": time.high * scale}
            row["repetitions"] = time.repetitions
            row["eager_ratio"] = time.median / timings[EAGER].median if EAGER in timings else None
        yield row


def _steps(call: Call, inputs: Inputs) -> None:
    for operands in inputs.sets:
        step(call, operands)


def _replay(graph: torch.cuda.CUDAGraph, number: int) -> None:
    graph.replay()


def captured(call: Call, inputs: Inputs) -> torch.cuda.CUDAGraph:
    """Captures a graph of one step per set of operands, after a warm-up on a side stream, as capture requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _steps(call, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _steps(call, inputs)
    graph.replay()
    return graph
