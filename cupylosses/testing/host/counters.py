"""What was done, for a report at the end of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Of this process."""

    kernels: int = 0  #: different kernels that were executed
    compiled: int = 0  #: of these, the ones that the cache did not have
    seconds: float = 0.0  #: spent in the compiler
    launches: int = 0

    def __str__(self) -> str:
        return (
            f"{self.launches} launches of {self.kernels} kernels on the host, "
            f"{self.compiled} of them compiled now in {self.seconds:.0f} s, the others cached"
        )


counters = Counters()
