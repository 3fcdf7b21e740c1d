"""Counts of kernels and the processor time behind them, for a report at the end of a run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    """Of this process, and of those whose counts were added."""

    kernels: int = 0  #: different kernels that each process executed
    compiled: int = 0  #: what the cache did not have, of kernels and the runtime
    launches: int = 0
    #: Processor time, of all threads together.
    compiling: float = 0.0  #: of the host's compiler
    nvrtc: float = 0.0
    launching: float = 0.0  #: of kernels that the host executed
    #: By content, what was asked for, from a compiler or a cache: independent of what the caches had, and each once.
    host_kernels: set[str] = field(default_factory=set)
    nvrtc_kernels: set[str] = field(default_factory=set)

    def count_compilation(self, seconds: float) -> None:
        """Counts an object that has been compiled for the host, by one of several threads, perhaps."""
        with _lock:
            self.compiled += 1
            self.compiling += seconds

    def count_nvrtc(self, seconds: float) -> None:
        """Adds processor time of NVRTC, in one of several threads, perhaps."""
        with _lock:
            self.nvrtc += seconds

    def add(self, counts: Mapping[str, Any]) -> None:
        """Adds those of another process, as ``vars()`` of its counters."""
        for name, count in counts.items():
            mine = getattr(self, name)
            setattr(self, name, mine | set(count) if isinstance(mine, set) else mine + count)

    def __str__(self) -> str:
        return (
            f"host execution: {self.launches} launches of {self.kernels} kernels; "
            f"{self.compiled} objects compiled in {self.compiling:.0f} s, the others were cached"
        )


_lock = threading.Lock()
counters = Counters()
