"""What was done, for a report at the end of a run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Counters:
    """Of this process, and of those whose counts were added."""

    kernels: int = 0  #: different kernels that were executed
    compiled: int = 0  #: what the cache did not have, of kernels and the runtime
    seconds: float = 0.0  #: spent in the compiler, of all threads together
    launches: int = 0

    def count_compilation(self, seconds: float) -> None:
        """Another object has been compiled; by one of several threads, perhaps."""
        with _lock:
            self.compiled += 1
            self.seconds += seconds

    def add(self, counts: Mapping[str, float]) -> None:
        """Adds those of another process, as ``vars()`` of its counters."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def __str__(self) -> str:
        return (
            f"host execution: {self.launches} launches of {self.kernels} kernels; "
            f"{self.compiled} objects compiled in {self.seconds:.0f} s, the others were cached"
        )


_lock = threading.Lock()
counters = Counters()
