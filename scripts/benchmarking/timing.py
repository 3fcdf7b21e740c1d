"""Clocks: events on the GPU and wall clock on the host, summarized by quantiles."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from time import perf_counter

import numpy
import torch

#: Limits on the number of repetitions of one measurement, whatever the time target.
FEWEST, MOST = 7, 100

#: Total size of rotating inputs, as a multiple of the L2 cache.
CACHE_FOOTPRINT = 3


@dataclass(frozen=True)
class Timing:
    """Median and 20 % and 80 % quantiles of repeated measurements, in the unit of the measurements."""

    median: float
    low: float
    high: float
    repetitions: int


def summarize(samples: Sequence[float]) -> Timing:
    """Returns median and quantiles of samples."""
    low, median, high = numpy.quantile(samples, [0.2, 0.5, 0.8])
    return Timing(float(median), float(low), float(high), len(samples))


def repetitions(target: float, seconds: float) -> int:
    """Number of repetitions of ``seconds`` each that take about ``target`` seconds, within `FEWEST` and `MOST`."""
    return int(min(MOST, max(FEWEST, target / max(seconds, 1e-9))))


class Budget:
    """The time budget of a run. Once it is spent, no measurement begins; a running one is not interrupted."""

    def __init__(self, seconds: float, clock: Callable[[], float] = perf_counter) -> None:
        self.seconds, self._clock, self._start = seconds, clock, clock()
        self.left_out: list[str] = []

    @property
    def spent(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._start

    def allows(self, what: str) -> bool:
        """Returns True if ``what`` may begin; otherwise records it as left out."""
        if self.spent < self.seconds:
            return True
        self.left_out.append(what)
        return False


@contextmanager
def no_collection() -> Iterator[None]:
    """Collects garbage first, and disables Python's garbage collector during a measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@cache
def footprint() -> int:
    """Number of bytes that evict everything else from the GPU's L2 cache when they are read or written."""
    return CACHE_FOOTPRINT * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


@cache
def _foreign_bytes() -> torch.Tensor:
    return torch.empty(footprint() // 8, dtype=torch.int64, device="cuda").random_()


def clean_cache() -> None:
    """Fills the L2 cache with clean lines that nothing else reads."""
    _foreign_bytes().sum()


@cache
def _cycles_per_second() -> float:
    cycles = 20_000_000
    torch.cuda._sleep(cycles)
    start, end = event(), event()
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (start.elapsed_time(end) / 1e3)


def event() -> torch.cuda.Event:
    """A CUDA event that records its time."""
    return torch.cuda.Event(enable_timing=True)


def interleaved(calls: Mapping[str, Callable[[int], object]], target: float, cold: bool = False) -> dict[str, Timing]:
    """Measures the GPU milliseconds of each call; ``target`` is the time to spend on each, in seconds.

    Precondition: each call has run before.

    Every repetition runs all calls in turn, starting with another one each time, so that they share clock rate,
    temperature and neighbours. Each call gets a running number to choose its inputs. A spinning kernel before each call
    lets the host run ahead: the queue is never empty while a call is timed, so the measurement covers the GPU's work
    and the gaps between its kernels, but not the host's time (which has its own section). A call that itself waits for
    the GPU empties the queue, and its time includes host time, as it does for a user; the next call's spinning kernel
    protects that call. (One spin per repetition did not: beside one peer, ours looked 30 times slower than without it.)

    With ``cold``, every call starts with the L2 cache full of clean foreign lines. Otherwise it would also pay for
    writing back dirty lines of the previous call: up to 50 MB on large GPUs, a twentieth of a bfloat16 forward of 2^28
    elements.
    """
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    pairs = []
    number = 0
    cycles_per_second = _cycles_per_second()
    torch.cuda.synchronize()
    with no_collection():
        begin = perf_counter()
        pauses = {}
        for name in names:
            enqueue = perf_counter()
            calls[name](number)
            number += 1
            pauses[name] = int(min(1.5 * (perf_counter() - enqueue) + 1e-4, 5e-3) * cycles_per_second)
        torch.cuda.synchronize()
        rounds = repetitions(target * len(names), perf_counter() - begin)
        for r in range(rounds):
            for i in range(len(names)):
                name = names[(r + i) % len(names)]
                start, end = event(), event()
                if cold:
                    clean_cache()
                torch.cuda._sleep(pauses[name])
                start.record()
                calls[name](number)
                end.record()
                number += 1
                pairs.append((name, start, end))
        torch.cuda.synchronize()
    for name, start, end in pairs:
        samples[name].append(start.elapsed_time(end))
    return {name: summarize(values) for name, values in samples.items()}


#: Number of samples of each call in a paired measurement.
ROUNDS = 9


def paired(baseline: Callable[[], object], candidate: Callable[[], object], target: float) -> tuple[Timing, Timing]:
    """Measures the GPU milliseconds per call of two alternating calls.

    A sample covers as many calls as take ``target`` seconds, but at least two. An untimed call of the baseline precedes
    it: while the GPU executes that, the host enqueues the timed calls, as in training. Preconditions: both calls have
    run before, and take a millisecond or more.
    """
    samples: tuple[list[float], list[float]] = ([], [])

    def sample(call: Callable[[], object], count: int) -> float:
        start, end = event(), event()
        baseline()
        start.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count

    with no_collection():
        baseline()
        # The first call may still select algorithms, so only the second one determines the number of calls per sample.
        counts = []
        for call in (baseline, candidate):
            sample(call, 1)
            counts.append(int(min(MOST, max(2, 1e3 * target / max(sample(call, 1), 1e-6)))))
        for _ in range(ROUNDS):
            for call, count, kept in zip((baseline, candidate), counts, samples, strict=True):
                kept.append(sample(call, count))
    return summarize(samples[0]), summarize(samples[1])


def host(
    calls: Mapping[str, Callable[[], object]],
    synchronize: Callable[[], object],
    batches: int = 40,
    batch: int = 40,
) -> dict[str, Timing]:
    """Measures the host microseconds of each call, by wall clock over interleaved batches.

    The GPU's queue is drained before each batch, outside the timed part, and a batch is too short to fill it, so no
    call waits for the GPU.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(batch):
            call()
    with no_collection():
        for _ in range(batches):
            for name, call in calls.items():
                synchronize()
                begin = perf_counter()
                for _ in range(batch):
                    call()
                samples[name].append((perf_counter() - begin) / batch * 1e6)
    synchronize()
    return {name: summarize(values) for name, values in samples.items()}
