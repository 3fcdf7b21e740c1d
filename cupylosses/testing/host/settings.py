"""How kernels are executed on the host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Of every launch.

    ``seed`` chooses the order in which blocks, warps and lanes run, and where they are interrupted; 0 is in order.
    ``resident`` blocks run at once. ``timeout`` is in seconds; a kernel that does not end is noticed where it accesses
    memory. ``sanitize`` names what kernels are compiled to be checked for, where the environment does not:
    ``undefined`` doubles the time of a compilation, and of a hundred seeded defects found only two more, both of
    alignment, which the loads and stores of the shim check themselves.
    """

    seed: int = 0
    resident: int = 4
    check_races: bool = True
    timeout: int = 120
    sanitize: tuple[str, ...] = ("thread",)


_current = Settings()


def settings() -> Settings:
    """Those of the innermost `execution`."""
    return _current


def use(chosen: Settings) -> Settings:
    """Sets them, and returns what they were."""
    global _current
    before, _current = _current, chosen
    return before
