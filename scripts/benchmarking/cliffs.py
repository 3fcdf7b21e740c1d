"""Off-headline cases: GPU time of ours beside eager and a copy with the minimal traffic, with the bars that apply.

Each engine lists its cases in a module that its workload class names. Ours alternates with

- eager: torch's function, or the formula by torch operations;
- copy: a copy that moves as many bytes as the case must;
- contiguous, if operands are strided: `.contiguous()` of them, then ours;
- beside, if the case names another case, such as the same one with aligned operands.

The L2 cache is full of foreign bytes at the start of each call, so one set of operands is enough. torch.compile is left
out, so that the whole grid takes less than four minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module

import torch

from benchmarking import timing
from benchmarking.cases import Case
from benchmarking.figures import COPY, EAGER, OURS
from benchmarking.providers import OK, attempt, attempts, ours
from benchmarking.records import Row
from benchmarking.selection import Run
from benchmarking.throughput import Copies
from benchmarking.timing import Timing
from benchmarking.workloads import Workload
from cupylosses.definition.base import Definition
from cupylosses.definition.registry import functions, registry
from cupylosses.testing.eager import Call

#: Providers that only this section has.
CONTIGUOUS, BESIDE = "contiguous", "beside"

#: Maximum seconds for one measurement of one provider, because there are many cases.
TARGET = 0.012

COLUMNS = (
    "group", "case", "loss", "shape", "elements", "dtype", "reduction", "mode", "status", "ms", "ms_low", "ms_high",
    "repetitions", "eager_status", "eager_ms", "contiguous_ms", "beside", "beside_ms", "copy_ms", "bytes",
    "copy_fraction", "copy_bar", "eager_copy_fraction", "eager_ratio", "contiguous_ratio", "beside_ratio", "beside_bar",
    "shortfall", "met", "reason",
)  # fmt: skip


#: Functions that have cases though they are not losses.
FUNCTIONS = ("token_log_probs",)


def cases() -> list[Case]:
    """The cases of all engines."""
    kinds = dict.fromkeys([*Workload.classes(), *(Workload.of(functions()[x]) for x in FUNCTIONS)])
    return [case for x in kinds for case in import_module(f"benchmarking.{x.cliffs}").cases()]


def measured(run: Run) -> list[Definition]:
    """The losses of a run, with the functions if it has all losses."""
    all_losses = {x.name for x in run.losses} >= {*registry()}
    return [*run.losses, *(functions()[x] for x in FUNCTIONS if all_losses)]


def chosen(run: Run) -> list[Case]:
    """The cases of what a run measures. If it has substrings of titles, only the cases with one of them."""
    names = {x.name for x in measured(run)}
    return [
        case
        for case in cases()
        if case.workload.loss.name in names
        and (case.quick or not run.quick)
        and (not run.cases or any(x in case.title for x in run.cases))
    ]


def measure(run: Run) -> Iterator[Row]:
    """Yields the rows of all cases of the run."""
    yield from rows(chosen(run), run)


def rows(cases: Iterable[Case], run: Run) -> Iterator[Row]:
    """Yields the rows of these cases, as far as the budget allows."""
    for case in cases:
        if run.begin(case.title):
            yield _measure(case, run)
            torch.cuda.empty_cache()


def _measure(case: Case, run: Run) -> Row:
    status, operands = attempt(case.operands)
    if operands is None:
        return {**case.describe(), "status": f"inputs: {status}"}
    calls = _calls(case, operands)
    statuses = attempts({name: partial(call, 0) for name, call in calls.items()})
    working = {name: call for name, call in calls.items() if statuses[name] == OK}
    return row(case, statuses, timing.interleaved(working, min(run.target, TARGET), cold=True))


def _calls(case: Case, operands: tuple[torch.Tensor, ...]) -> dict[str, Callable[[int], object]]:
    function, eager = ours(case.workload), case.eager()
    found: dict[str, Callable[[int], object]] = {OURS: Prepared(case, function, lambda: operands)}
    if eager is not None:
        found[EAGER] = Prepared(case, eager, lambda: operands)
    if not case.contiguous:
        found[CONTIGUOUS] = Prepared(case, function, lambda: operands, copied=True)
    if case.beside:
        found[BESIDE] = Prepared(case.beside, ours(case.beside.workload), case.beside.operands)
    return {**found, COPY: Copies(case.traffic, timing.footprint())}


class Prepared:
    """A call of a case. Prepares itself at the first call, so that only this provider fails if memory runs out."""

    def __init__(
        self, case: Case, call: Call, operands: Callable[[], tuple[torch.Tensor, ...]], copied: bool = False
    ) -> None:
        self._case, self._function, self._operands, self._copied = case, call, operands, copied
        self._call: Callable[[], object] | None = None

    def __call__(self, number: int) -> None:
        if self._call is None:
            self._call = self._case.steps(self._function, self._operands(), self._copied)
        self._call()


def row(case: Case, statuses: Mapping[str, str], timings: Mapping[str, Timing]) -> Row:
    """The row of a case: times, ratios, and the verdict on its bars."""
    found = {**case.describe(), "status": statuses[OURS], "eager_status": statuses.get(EAGER, "absent")}
    found |= {f"{name}_ms": time.median for name, time in timings.items() if name != OURS}
    if OURS not in timings:
        return found
    time = timings[OURS]
    found |= {"ms": time.median, "ms_low": time.low, "ms_high": time.high, "repetitions": time.repetitions}
    found |= {
        f"{name}_ratio": time.median / timings[name].median for name in (EAGER, CONTIGUOUS, BESIDE) if name in timings
    }
    if COPY in timings:
        found["copy_fraction"] = timings[COPY].median / time.median
        if EAGER in timings:
            found["eager_copy_fraction"] = timings[COPY].median / timings[EAGER].median
    found["shortfall"] = max(shortfalls(found).values(), default=0.0)
    return {**found, "met": "yes" if found["shortfall"] <= 1 else "no"}


def shortfalls(found: Row) -> dict[str, float]:
    """The factor by which a row misses each bar that applies to it; at most 1 if it meets the bar.

    No case may be slower than eager, nor than ours on contiguous copies of the operands, copying included.
    """
    missed = {name: found[f"{name}_ratio"] for name in (EAGER, CONTIGUOUS) if f"{name}_ratio" in found}
    if found["copy_bar"] is not None and "copy_fraction" in found:
        missed[COPY] = found["copy_bar"] / found["copy_fraction"]
    if found["beside_bar"] is not None and "beside_ratio" in found:
        missed[BESIDE] = found["beside_ratio"] / found["beside_bar"]
    return missed
