"""Time and memory of a loss on a GPU: forward and backward on large operands, beside torch and a copy."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch

from benchmarking import figures, memory, providers, throughput, workloads
from benchmarking.figures import COPY, EAGER, OURS
from benchmarking.selection import Run
from benchmarking.timing import Budget
from benchmarking.workloads import Inputs, Workload
from cupylosses.definition.base import Definition

MODE = "forward+backward"

#: Seconds of GPU time to spend on one measurement.
TARGET = 0.01

#: Free memory as a multiple of the largest operand: the rest is left for other operands and torch's intermediates.
INTERMEDIATES = 24


def workload(loss: Definition, free: int) -> Workload:
    """The timed workload of a loss, as large as fits into ``free`` bytes of memory."""
    return Workload.of(loss).fitting(loss, free // INTERMEDIATES)


def described(found: Workload) -> str:
    """A description of the timed workload."""
    return f"times of {figures.spell_shape(found.shape)} {found.dtype}, forward and backward"


def calls(found: Workload) -> None:
    """Makes the library calls of `measure`, to find the kernels that it needs."""
    inputs = Inputs(found)
    inputs.differentiate(found.differentiated(MODE))
    workloads.step(providers.ours(found), inputs[0])


def measure(found: Workload) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of a `Line` that need a GPU, and the problems."""
    run = Run([], [], [], [], [MODE], (EAGER,), False, TARGET, Budget(inf), lambda _: None)
    rows = {str(x["provider"]): x for x in throughput.timed(found, run, [MODE], ())}
    problems = [f"{OURS}: {rows[OURS]['status']}"] if rows[OURS]["status"] != providers.OK else []
    peaks = _peaks(found)
    gc.collect()
    torch.cuda.empty_cache()
    fields = {
        "ms": rows[OURS].get("ms"),
        "torch_ms": rows.get(EAGER, {}).get("ms"),
        "copy_fraction": rows[OURS].get("copy_fraction") if COPY in rows and found.moves_memory else None,
        "extra_bytes": peaks.get(OURS),
        "torch_extra_bytes": peaks.get(EAGER),
    }
    return fields, problems


def _peaks(found: Workload) -> dict[str, int]:
    """Peak bytes of GPU memory beyond operands and results, by provider."""
    inputs = Inputs(found)
    inputs.differentiate(found.differentiated(MODE))
    measured: dict[str, int] = {}
    for name, call in providers.providers(found, MODE, False, (EAGER,)).items():
        peak: Callable[[], tuple[int, int]] = partial(memory.peak, call, inputs[0])
        _, sizes = providers.attempt(peak)
        if sizes:
            outputs, most = sizes
            measured[name] = most - outputs
    return measured
