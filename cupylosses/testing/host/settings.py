"""Settings of kernel execution on the host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of a launch.

    ``seed`` determines the order in which blocks, warps and lanes run, and where they are interrupted; 0 runs them in
    ascending order. ``resident`` is the number of blocks that run at once. ``timeout`` is in seconds; an endless kernel
    is stopped at its next memory access. ``sanitize`` lists the sanitizers that kernels are compiled with, unless the
    environment names them. ``undefined`` doubles the compile time, and of a hundred seeded defects it found only two
    more, both of alignment, which the loads and stores of the shim check themselves.
    """

    seed: int = 0
    resident: int = 4
    check_races: bool = True
    timeout: int = 120
    sanitize: tuple[str, ...] = ("thread",)


_current = Settings()


def settings() -> Settings:
    """Returns the settings of the innermost `execution`."""
    return _current


def use(replacement: Settings) -> Settings:
    """Replaces the settings; returns the previous ones."""
    global _current
    before, _current = _current, replacement
    return before
