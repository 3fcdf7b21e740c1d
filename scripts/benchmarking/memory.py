"""Memory: peak GPU allocation beyond operands and results while a loss and its gradients are computed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from benchmarking.providers import Call, attempt, expressions
from benchmarking.records import Row
from benchmarking.selection import Run
from benchmarking.workloads import Inputs, Workload

COLUMNS = ("loss", "elements", "dtype", "mode", "provider", "status", "outputs", "peak", "beyond_outputs")


def measure(run: Run) -> Iterator[Row]:
    """Yields the rows of all losses. Measures the very first call, so memory that the library keeps counts, too."""
    for loss in run.section_losses:
        workload = Workload.of(loss).large(loss)
        if run.begin(f"{workload}: peak memory"):
            yield from _measure(workload)
            gc.collect()
            torch.cuda.empty_cache()


def _measure(workload: Workload) -> Iterator[Row]:
    made, inputs = attempt(lambda: Inputs(workload))
    for mode in workload.modes:
        if inputs:
            inputs.differentiate(workload.differentiated(mode))
        for name, call in expressions(workload).items():
            measured = _row(call, inputs[0]) if inputs else {"status": made}
            yield {**workload.describe(mode, COLUMNS), "provider": name, **measured}


def _row(call: Call, operands: tuple[torch.Tensor, ...]) -> Row:
    status, found = attempt(lambda: peak(call, operands))
    if found is None:
        for x in operands:
            x.grad = None
        return {"status": status}
    outputs, most = found
    return {"status": status, "outputs": outputs, "peak": most, "beyond_outputs": most - outputs}


def peak(call: Call, operands: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Calls forward and backward; returns the bytes of value and gradients, and peak bytes beyond the operands."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    value = call(*operands)
    if value.requires_grad:
        value.backward()
    most = torch.cuda.max_memory_allocated() - before
    outputs = [value, *(x.grad for x in operands if x.grad is not None)]
    size = sum(x.numel() * x.element_size() for x in outputs)
    for x in operands:
        x.grad = None
    return size, most
