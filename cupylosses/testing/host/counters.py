"""What was done, for a report at the end of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Of this process."""

    kernels: int = 0  #: different kernels that were executed
    compiled: int = 0  #: what the cache did not have, of kernels and the runtime
    seconds: float = 0.0  #: spent in the compiler
    launches: int = 0

    def __str__(self) -> str:
        return (
            f"host execution: {self.launches} launches of {self.kernels} kernels; "
            f"{self.compiled} objects compiled in {self.seconds:.0f} s, the others were cached"
        )


counters = Counters()
