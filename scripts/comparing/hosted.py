"""Checks whose kernels run on the CPU, through `cupylosses.testing.host`."""

from __future__ import annotations

from collections.abc import Callable

from comparing.table import Row
from cupylosses.testing import host
from cupylosses.testing.check import Check


def executed(measure: Callable[[Check], Row]) -> Callable[[Check], Row]:
    """Wraps ``measure`` in a fresh host execution for each check, so a check that fails mid-launch leaves no state."""

    def on_host(check: Check) -> Row:
        with host.execution():
            return measure(check)

    return on_host
