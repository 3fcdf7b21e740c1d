"""Throughput: GPU time of every provider over losses, sizes, dtypes and modes, beside a copy of as many bytes.

Two sections of the report consist of such measurements: `rows`, for losses of rows of logits, and `throughput`.

The timing of a provider covers all launches of a training step, including the mean's divisor and the gradient that it
scales. Two peers of cross entropy do less: `liger` overwrites the logits with the gradient (it has its own copy of the
logits, which holds gradients from the second call on), and `quack one pass` is QuACK's operator below its autograd
Function, whose values are per row and whose gradients are those of the sum.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch

from benchmarking import timing
from benchmarking.figures import COPY, KEY, OURS, PLAIN
from benchmarking.providers import OK, OVERWRITING, attempt, attempts, not_installed, ours, providers
from benchmarking.records import Row
from benchmarking.selection import Run
from benchmarking.timing import Timing
from benchmarking.workloads import DEVICE, Inputs, Workload, set_count, step

COLUMNS = (
    *KEY, "status", "ms", "ms_low", "ms_high", "repetitions", "bytes", "tb_per_s", "copy_fraction", "speedup_of_ours",
)  # fmt: skip


class Section:
    """A section of the report, with the losses whose workloads name it."""

    def __init__(self, name: str) -> None:
        self.kinds = [x for x in Workload.classes() if x.section == name]
        self.COLUMNS = (*COLUMNS, *dict.fromkeys(c for x in self.kinds for c in x.more_columns))

    def measure(self, run: Run) -> Iterator[Row]:
        """Yields the rows of all workloads of the run."""
        for name, reason in not_installed(run.providers).items():
            run.say(f"{name} is absent: {reason}")
        for workload in [x for kind in self.kinds for x in kind.chosen(run)]:
            if run.begin(str(workload)):
                modes = [x for x in workload.modes if x in run.modes]
                yield from timed(workload, run, modes, workload.compiled_in(modes, run.quick))
                gc.collect()
                torch.cuda.empty_cache()


def sections() -> dict[str, Section]:
    """The sections by name."""
    return {name: Section(name) for name in dict.fromkeys(x.section for x in Workload.classes()) if name}


def timed(workload: Workload, run: Run, modes: Sequence[str], compiled: Collection[str]) -> Iterator[Row]:
    """Yields the rows of a workload in these modes, with torch.compile in the modes in ``compiled``."""
    footprint = timing.footprint()
    status, inputs = attempt(lambda: Inputs(workload, set_count(workload.bytes, footprint)))
    if inputs is None:
        yield from rows(workload, "forward", {OURS: f"inputs: {status}"}, {})
        return
    for mode in modes:
        inputs.differentiate(workload.differentiated(mode))
        calls: dict[str, Callable[[int], object]] = {
            name: Apart(call, workload, mode, footprint)
            if (name, workload.loss.name) in OVERWRITING
            else partial(_step, call, inputs)
            for name, call in providers(workload, mode, mode in compiled, run.providers).items()
        }
        if workload.beside:
            calls[PLAIN] = Apart(ours(workload.beside), workload.beside, mode, footprint)
        calls[COPY] = Copies(workload.traffic(mode), footprint)
        statuses = attempts({name: partial(call, 0) for name, call in calls.items()})
        for name, status in statuses.items():
            if status != OK:
                run.say(f"{workload}, {mode}: {name} {status}")
        working = {name: call for name, call in calls.items() if statuses[name] == OK}
        timings = timing.interleaved(working, run.target, cold=True)
        yield from rows(workload, mode, statuses, timings)


def _step(call: Callable[..., torch.Tensor], inputs: Inputs, number: int) -> None:
    step(call, inputs[number])


class Apart:
    """A provider with operands of its own, because it computes another workload or overwrites its operands."""

    def __init__(self, call: Callable[..., torch.Tensor], workload: Workload, mode: str, footprint: int) -> None:
        self._call, self._workload, self._mode, self._footprint = call, workload, mode, footprint
        self._inputs: Inputs | None = None

    def __call__(self, number: int) -> None:
        if self._inputs is None:
            # Allocate here, not in the constructor, so that only this provider fails if memory runs out.
            self._inputs = Inputs(self._workload, set_count(self._workload.bytes, self._footprint))
            self._inputs.differentiate(self._workload.differentiated(self._mode))
        _step(self._call, self._inputs, number)


class Copies:
    """Device-to-device copies that move ``traffic`` bytes, reads and writes together, and rotate among buffers."""

    def __init__(self, traffic: int, footprint: int) -> None:
        self._words = max(1, traffic // 2 // 8)
        self._count = set_count(16 * self._words, footprint)
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, number: int) -> None:
        if not self._buffers:
            # Allocate here, not in the constructor, so that only this provider fails if memory runs out.
            shape = (self._count, self._words)
            source, target = (torch.empty(shape, dtype=torch.int64, device=DEVICE).random_() for _ in range(2))
            self._buffers = list(zip(target.unbind(), source.unbind(), strict=True))
        target, source = self._buffers[number % self._count]
        target.copy_(source)


def rows(workload: Workload, mode: str, statuses: Mapping[str, str], timings: Mapping[str, Timing]) -> Iterator[Row]:
    """Yields one row per provider, with its time and the bandwidth that this means for the minimal traffic.

    Ratios compare it with a copy, with ours and, by time per byte, with the workload ``beside``.
    """
    needed = workload.traffic(mode)
    for name, status in statuses.items():
        traffic = workload.beside.traffic(mode) if workload.beside and name == PLAIN else needed
        row = {**workload.describe(mode, COLUMNS), "provider": name, "status": status, "bytes": traffic}
        if name in timings:
            time = timings[name]
            row |= {
                "ms": time.median,
                "ms_low": time.low,
                "ms_high": time.high,
                "repetitions": time.repetitions,
                "tb_per_s": traffic / time.median / 1e9,
                "copy_fraction": timings[COPY].median / time.median * (traffic / needed) if COPY in timings else None,
                "speedup_of_ours": time.median / timings[OURS].median if OURS in timings else None,
            }
            if PLAIN in timings:
                plain = timings[PLAIN].median / workload.beside.traffic(mode)
                row["plain_ratio"] = time.median / traffic / plain
        yield row
