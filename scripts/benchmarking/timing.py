"""Clocks: events on the GPU, wall clock on the host, quantiles of both."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from time import perf_counter

import numpy
import torch

#: Limits on the repetitions of one measurement, whatever the time target.
FEWEST, MOST = 7, 100

#: Rotating inputs together exceed the L2 cache by this factor.
CACHE_FOOTPRINT = 3


@dataclass(frozen=True)
class Timing:
    """The median of repeated measurements and their 20 % and 80 % quantiles, in the unit that was measured."""

    median: float
    low: float
    high: float
    repetitions: int


def summarize(samples: Sequence[float]) -> Timing:
    """Median and quantiles of samples."""
    low, median, high = numpy.quantile(samples, [0.2, 0.5, 0.8])
    return Timing(float(median), float(low), float(high), len(samples))


def repetitions(target: float, seconds: float) -> int:
    """The number of repetitions, each of ``seconds``, that fill about ``target`` seconds."""
    return int(min(MOST, max(FEWEST, target / max(seconds, 1e-9))))


class Budget:
    """The seconds of a run. Nothing is interrupted; once they are spent, nothing new begins."""

    def __init__(self, seconds: float, clock: Callable[[], float] = perf_counter) -> None:
        self.seconds, self._clock, self._start = seconds, clock, clock()
        self.left_out: list[str] = []

    @property
    def spent(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._start

    def allows(self, what: str) -> bool:
        """True if ``what`` may begin; otherwise records it as left out."""
        if self.spent < self.seconds:
            return True
        self.left_out.append(what)
        return False


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps Python's garbage collector out of a measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@cache
def footprint() -> int:
    """Bytes that together evict each other from the GPU's L2 cache."""
    return CACHE_FOOTPRINT * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


@cache
def _foreign_bytes() -> torch.Tensor:
    return torch.empty(footprint() // 8, dtype=torch.int64, device="cuda").random_()


def clean_cache() -> None:
    """Fills the L2 cache with clean bytes that nothing else reads."""
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
    """A timing event."""
    return torch.cuda.Event(enable_timing=True)


def interleaved(calls: Mapping[str, Callable[[int], object]], target: float, cold: bool = False) -> dict[str, Timing]:
    """GPU milliseconds of each call, which must have run before; ``target`` is the time for one, in seconds.

    Every repetition runs all calls in turn, starting with another one each time, so that they share clocks, temperature
    and neighbours. Each call gets a running number to choose its inputs. A spinning kernel in front of each call lets
    the host run ahead: the queue is never empty while a call is timed, so the measurement covers the GPU's work with
    the gaps between its kernels, not the host's time (which has its own section). A call that itself waits for the GPU
    empties the queue, and its time includes the host's, as it would for a user; the spinning kernel of the next call
    protects that one. (One spin per repetition did not: beside one peer ours looked 30 times slower than without it.)

    With ``cold`` every call starts with the cache full of clean foreign bytes. Otherwise it would also pay for writing
    back dirty lines of the previous call: up to 50 MB on large GPUs, a twentieth of a bfloat16 forward of 2^28
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


#: Rounds of a paired measurement.
ROUNDS = 9


def paired(baseline: Callable[[], object], candidate: Callable[[], object], target: float) -> tuple[Timing, Timing]:
    """GPU milliseconds per call of two calls that take turns, which must have run before.

    A sample covers several calls, as many as fill ``target`` seconds and two at least. A call of the baseline stands in
    front of it, uncounted: while the GPU is busy with that, the host enqueues what is counted, as in training. For
    calls of a millisecond and more.
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
        # The first call of each may still choose algorithms; the second one says how long it takes.
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
    """Host microseconds of each call, by wall clock over interleaved batches.

    The queue is drained between batches, outside of the timed part, and a batch is too short to fill it: nothing waits
    for the GPU.
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
