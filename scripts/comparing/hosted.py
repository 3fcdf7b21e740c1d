"""Rows whose kernels run on the CPU, through `cupylosses.testing.host`."""

from __future__ import annotations

import os
from collections.abc import Callable

from comparing.rows import AnyCheck, Row
from cupylosses.testing import host

#: Half the time of the compiler goes into finding undefined behaviour, which is a matter of tests. Races are found.
CHECKED_FOR = "thread"


def choose_sanitizers() -> None:
    """Compiles kernels with `CHECKED_FOR` unless the environment names something else."""
    os.environ.setdefault("CUPYLOSSES_HOST_SANITIZE", CHECKED_FOR)


def executed(measure: Callable[[AnyCheck], Row]) -> Callable[[AnyCheck], Row]:
    """``measure`` with kernels: for each row anew, so that one that ends amid a launch leaves nothing to the next."""

    def on_host(check: AnyCheck) -> Row:
        with host.execution():
            return measure(check)

    return on_host
