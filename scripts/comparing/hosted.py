"""Rows whose kernels run on the CPU, through `cupylosses.testing.host`."""

from __future__ import annotations

from collections.abc import Callable

from comparing.rows import AnyCheck, Row
from cupylosses.testing import host


def executed(measure: Callable[[AnyCheck], Row]) -> Callable[[AnyCheck], Row]:
    """``measure`` with kernels: for each row anew, so that one that ends amid a launch leaves nothing to the next."""

    def on_host(check: AnyCheck) -> Row:
        with host.execution():
            return measure(check)

    return on_host
