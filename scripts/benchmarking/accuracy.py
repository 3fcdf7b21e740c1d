"""Accuracy: the error of the float32 mean of 2^30 elements against a float64 truth, in units in the last place."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

import torch

from benchmarking.pointwise import sweep
from benchmarking.providers import attempt, expressions
from benchmarking.records import Row
from benchmarking.selection import Run
from benchmarking.workloads import Inputs, Workload
from cupylosses.testing.tolerance import errors, ulp

EXPONENT = 30

COLUMNS = ("loss", "elements", "dtype", "provider", "status", "value", "truth", "ulp")


def measure(run: Run) -> Iterator[Row]:
    """Yields the rows of all losses."""
    for loss in run.swept_losses:
        workload = sweep(loss, "float32", EXPONENT)
        if run.begin(f"{workload}: accuracy"):
            yield from _measure(workload)
            gc.collect()
            torch.cuda.empty_cache()


def _measure(workload: Workload) -> Iterator[Row]:
    prepared, made = attempt(lambda: _with_truth(workload))
    for name, call in expressions(workload).items():
        row = {**workload.describe("forward", COLUMNS), "provider": name, "status": prepared}
        if made:
            operands, exact = made
            row["status"], value = attempt(partial(call, *operands))
            if value is not None:
                found = {"value": repr(value.item()), "truth": repr(exact.item())}
                row |= {**found, "ulp": ulps(value, exact)}
        yield row


def _with_truth(workload: Workload) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    operands = Inputs(workload)[0]
    return operands, workload.truth(operands)


def ulps(value: torch.Tensor, exact: torch.Tensor) -> float:
    """The distance of a value from the truth, in units in the last place of the value's dtype."""
    return (errors(value, exact) / ulp(exact, value.dtype)).item()
