"""Rows of logits: GPU time of cross entropy at the shapes of the figures, beside its rivals, and the cost of options.

Every provider computes the mean's divisor and the gradient that it scales, so the timing covers all launches of a
training step. Two peers do less: `liger` writes the gradient over the logits (it has its own copy, which holds
gradients from the second call on), and `quack one pass` is QuACK's operator below its autograd Function, whose values
are per row and whose gradients are those of the sum. torch.compile is timed in forward and backward only.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from benchmarking import throughput
from benchmarking.figures import EXTREMES
from benchmarking.providers import not_installed
from benchmarking.records import Row
from benchmarking.row_workloads import selection
from benchmarking.selection import Run

COLUMNS = (*throughput.COLUMNS, "plain_ratio")


def measure(run: Run) -> Iterator[Row]:
    """Rows of all shapes, then of options."""
    for name, reason in not_installed(run.providers).items():
        run.say(f"{name} is absent: {reason}")
    for workload in selection(run.row_losses, run.dtypes, run.quick):
        if run.begin(str(workload)):
            modes = [x for x in workload.modes if x in run.modes]
            wanted = workload.compiled and (not run.quick or workload.title == EXTREMES)
            compiled = ["forward+backward"] if wanted else []
            yield from throughput.timed(workload, run, modes, compiled)
            gc.collect()
            torch.cuda.empty_cache()
