"""Stand-ins for GPU-only features, so that benchmark code runs on the CPU, with meaningless times."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from benchmarking import throughput, timing, workloads

#: Peak bytes that the stand-in reports for every call.
PEAK = 4 << 20


class Event:
    """A GPU event that reads the host's clock."""

    def record(self) -> None:
        self.time = perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.time - self.time) * 1e3


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places operands on the CPU."""
    monkeypatch.setattr(workloads, "DEVICE", "cpu")
    monkeypatch.setattr(throughput, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places operands on the CPU, and replaces clocks, memory counters and the cleaning of the cache."""
    on_cpu(monkeypatch)
    monkeypatch.setattr(timing, "event", Event)
    monkeypatch.setattr(timing, "_cycles_per_second", lambda: 1e9)
    monkeypatch.setattr(timing, "footprint", lambda: 1 << 12)
    monkeypatch.setattr(timing, "clean_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000 + PEAK)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
