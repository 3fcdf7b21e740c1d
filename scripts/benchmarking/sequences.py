"""Losses of sequences from logits, log-softmax included: time and peak memory beside torch's two implementations.

torch uses its own kernels if the targets are on the GPU, and cuDNN's if concatenated int32 targets and the lengths are
on the CPU; they are placed there before the measurement begins. Where torch cannot compute a shape, its error is the
status.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from benchmarking import memory, timing
from benchmarking.figures import EAGER, OURS, spell_shape
from benchmarking.providers import OK, attempt
from benchmarking.records import Row
from benchmarking.selection import Run
from benchmarking.sequence import SequenceWorkload
from benchmarking.workloads import Inputs, set_count, step
from cupylosses.testing.eager import Call

CUDNN = "cudnn"

GB = 1e9

COLUMNS = (
    "loss", "shape", "dtype", "mode", "provider", "status", "ms", "ms_low", "ms_high", "repetitions", "speedup_of_ours",
    "peak_gb",
)  # fmt: skip


def measure(run: Run) -> Iterator[Row]:
    """Yields the rows of all losses and shapes; a quick run has only the first shape."""
    for workload in SequenceWorkload.chosen(run):
        if run.begin(str(workload)):
            yield from _measure(workload, run)
            gc.collect()
            torch.cuda.empty_cache()


def _measure(workload: SequenceWorkload, run: Run) -> Iterator[Row]:
    sizes = spell_shape((*workload.shape, workload.shapes[1][-1]))
    describe = {"loss": workload.loss.name, "shape": sizes, "dtype": workload.dtype}
    made, inputs = attempt(lambda: Inputs(workload, set_count(workload.bytes, timing.footprint())))
    if inputs is None:
        yield {**describe, "provider": OURS, "status": f"inputs: {made}"}
        return
    calls: dict[str, Call] = {OURS: workload.ours()}
    eager = workload.torchs()
    if EAGER in run.providers and eager is not None:
        calls |= {EAGER: eager, CUDNN: _cudnn(eager, inputs)}
    for mode in [x for x in workload.modes if x in run.modes]:
        inputs.differentiate(workload.differentiated(mode))
        peaks: dict[str, int] = {}
        statuses = {}
        for name, call in calls.items():
            statuses[name], found = attempt(partial(_peak, call, inputs[0]))
            if found is not None:
                peaks[name] = found
        working: Mapping[str, Callable[[int], object]] = {
            name: partial(_step, call, inputs) for name, call in calls.items() if statuses[name] == OK
        }
        times = timing.interleaved(working, run.target) if working else {}
        for name, status in statuses.items():
            row = {**describe, "mode": mode, "provider": name, "status": status}
            if status != OK:
                run.say(f"{workload}, {mode}: {name} {status}")
            if name in times:
                x = times[name]
                row |= {"ms": x.median, "ms_low": x.low, "ms_high": x.high, "repetitions": x.repetitions}
                row |= {"peak_gb": peaks[name] / GB}
                row |= {"speedup_of_ours": x.median / times[OURS].median} if OURS in times else {}
            yield row


def _step(call: Call, inputs: Inputs, number: int) -> None:
    step(call, inputs[number])


def _peak(call: Call, operands: tuple[torch.Tensor, ...]) -> int:
    """Peak bytes of a second call beyond operands, value and gradients."""
    step(call, operands)
    outputs, most = memory.peak(call, operands)
    return most - outputs


def _cudnn(eager: Call, inputs: Inputs) -> Call:
    """torch's call with operands that it passes to cuDNN: concatenated int32 targets on the CPU, lengths as numbers.

    Lengths in tensors would have to be on the GPU, and so would the targets.
    """

    def numbers(lengths: torch.Tensor) -> tuple[int, ...]:
        return tuple(lengths.tolist())

    kept = {x[1].data_ptr(): (x[1].flatten().to("cpu", torch.int32), *map(numbers, x[2:])) for x in inputs.sets}
    return lambda x, targets, *_: eager(x, *kept[targets.data_ptr()])
