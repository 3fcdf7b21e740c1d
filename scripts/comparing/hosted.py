"""Rows whose kernels run on the CPU, through `cupylosses.testing.host`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from rich.console import Console
from rich.progress import Progress

from comparing.rows import Row
from cupylosses.codegen import Variant
from cupylosses.testing import host
from cupylosses.testing.check import Check

#: Half the time of the compiler goes into finding undefined behaviour, which is a matter of tests. Races are found.
CHECKED_FOR = "thread"


def choose_sanitizers() -> None:
    """Compiles kernels with `CHECKED_FOR` unless the environment names something else."""
    os.environ.setdefault("CUPYLOSSES_HOST_SANITIZE", CHECKED_FOR)


def executed(measure: Callable[[Check], Row]) -> Callable[[Check], Row]:
    """``measure`` with kernels: for each row anew, so that one that ends amid a launch leaves nothing to the next."""

    def on_host(check: Check) -> Row:
        with host.execution():
            return measure(check)

    return on_host


def needed(rehearsals: Iterable[tuple[Check, Callable[[Check], object]]]) -> Sequence[Variant]:
    """The kernels that checks run, each with what makes its calls."""
    with host.noting() as kernels:
        for check, rehearse in rehearsals:
            # What is wrong with a call is for its row to say.
            with suppress(Exception):
                rehearse(check)
    return list(kernels)


def compile_all(kernels: Sequence[Variant], console: Console) -> None:
    """Compiles kernels on all processors, in sight."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"compiling {len(kernels)} kernels", total=len(kernels))
        host.build_ahead(kernels, lambda: progress.advance(task))
