"""Host: the time that a call costs the Python thread, at a size where nothing waits for the GPU, and its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from benchmarking import timing
from benchmarking.figures import EAGER, OURS
from benchmarking.host_parts import parts
from benchmarking.providers import OK, attempt, attempts, ours, rivals
from benchmarking.records import Row
from benchmarking.selection import Run
from benchmarking.timing import Timing
from benchmarking.workloads import Inputs, Workload, step

#: The measured calls, with the number of operands that require grad.
CALLS: Mapping[str, int] = {"forward": 0, "forward with grad": 1, "forward+backward": 1}

COLUMNS = (
    "loss", "elements", "dtype", "kind", "what", "provider", "status", "us", "us_low", "us_high", "repetitions",
    "eager_ratio",
)  # fmt: skip


def measure(run: Run) -> Iterator[Row]:
    """Yields the rows of all losses; the first one whose operands may have any size is also broken down into parts."""
    broken_down = False
    for loss in run.section_losses:
        workload = Workload.of(loss).tiny(loss)
        if not run.begin(f"{workload}: host time"):
            continue
        for what, differentiated in CALLS.items():
            yield from _measure(workload, what, differentiated)
        if workload.sweeps and not broken_down:
            broken_down, inputs = True, Inputs(workload)
            for what in ("forward", "forward+backward"):
                yield from _breakdown(workload, what, inputs)


def _measure(workload: Workload, what: str, differentiated: int) -> Iterator[Row]:
    inputs = Inputs(workload)
    inputs.differentiate(differentiated)
    calls: dict[str, Callable[[], object]] = {
        name: partial(step if what == "forward+backward" else _forward, call, inputs[0])
        for name, call in rivals(workload).items()
    }
    statuses = attempts(calls)
    timings = timing.host({n: c for n, c in calls.items() if statuses[n] == OK}, torch.cuda.synchronize)
    for name, status in statuses.items():
        yield row(workload, "call", what, name, status, timings.get(name), timings.get(EAGER))


def _forward(call: Callable[..., torch.Tensor], operands: tuple[torch.Tensor, ...]) -> None:
    call(*operands)


def _breakdown(workload: Workload, what: str, inputs: Inputs) -> Iterator[Row]:
    status, measured = attempt(lambda: parts(ours(workload), inputs[0], what == "forward+backward"))
    if measured is None:
        yield row(workload, "part", what, OURS, status, None, None)
        return
    for name, time in measured.items():
        yield row(workload, "part", f"{what}: {name}", OURS, OK, time, None)


def row(
    workload: Workload, kind: str, what: str, provider: str, status: str, time: Timing | None, eager: Timing | None
) -> Row:
    """The row of a whole call or of a part of one."""
    found = workload.describe(what, COLUMNS)
    found |= {"kind": kind, "what": what, "provider": provider, "status": status}
    if time:
        found |= {"us": time.median, "us_low": time.low, "us_high": time.high, "repetitions": time.repetitions}
        if eager:
            found["eager_ratio"] = time.median / eager.median
    return found
