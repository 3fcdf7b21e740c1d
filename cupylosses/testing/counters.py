"""Counts of kernels and their processor time, for a report at the end of a run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    """Counts of this process and of the processes added to it."""

    kernels: int = 0  #: distinct kernels executed, per process
    compiled: int = 0  #: kernels and runtimes that were not cached
    launches: int = 0
    #: Processor time, summed over threads.
    compiling: float = 0.0  #: of the host's compiler
    nvrtc: float = 0.0
    launching: float = 0.0  #: of kernels executed on the host
    #: Requested kernels by content, each once, whether compiled or cached.
    host_kernels: set[str] = field(default_factory=set)
    nvrtc_kernels: set[str] = field(default_factory=set)

    def count_compiled(self) -> None:
        """Counts an object that the cache lacked; thread-safe."""
        with _lock:
            self.compiled += 1

    def count_compiling(self, seconds: float) -> None:
        """Adds processor time of the host's compiler; thread-safe."""
        with _lock:
            self.compiling += seconds

    def count_nvrtc(self, seconds: float) -> None:
        """Adds processor time of NVRTC; thread-safe."""
        with _lock:
            self.nvrtc += seconds

    def add(self, counts: Mapping[str, Any]) -> None:
        """Adds the counts of another process, given as ``vars()`` of its counters."""
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
