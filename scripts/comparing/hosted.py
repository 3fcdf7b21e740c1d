"""Rows whose kernels run on the CPU, through `cupylosses.testing.host`."""

from __future__ import annotations

from collections.abc import Callable

from comparing.rows import AnyCheck, Row
from cupylosses.testing import host


def executed(measure: Callable[[AnyCheck], Row]) -> Callable[[AnyCheck], Row]:
    """Wraps ``measure`` in a fresh host execution for each row, so a row that fails mid-launch leaves no state to the
    next.
    """

    def on_host(check: AnyCheck) -> Row:
        with host.execution():
            return measure(check)

    return on_host
