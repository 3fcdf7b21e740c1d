"""Processor time of a test run by part, and the limit on its kernels: ``budget.json``, for the suite as a whole.

A kernel counts once, whichever processes request it, and whether or not one of them had it cached.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from cupylosses.testing.counters import Counters

PATH = Path(__file__).with_name("budget.json")


def python_seconds() -> float:
    """Processor time of this process, summed over its threads."""
    return time.process_time()


def other_seconds() -> float:
    """Processor time of completed child processes, such as compilers."""
    used = os.times()
    return used.children_user + used.children_system


def times(counters: Counters, python: float, others: float) -> str:
    """Describes the processor time of all processes, by part.

    ``python`` is their own time, ``others`` that of their child processes.
    """
    parts = {
        "compiling for the host": counters.compiling,
        "NVRTC": counters.nvrtc,
        "launches on the host": counters.launching,
        "other programs": max(0.0, others - counters.compiling),
        "Python and torch": max(0.0, python - counters.nvrtc - counters.launching),
    }
    found = ", ".join(f"{name} {seconds:.0f}" for name, seconds in parts.items())
    return f"processor time: {sum(parts.values()):.0f} s, of which {found}"


def kernels(counters: Counters) -> dict[str, int]:
    """Returns the number of different requested kernels, by compiler."""
    return {"host": len(counters.host_kernels), "NVRTC": len(counters.nvrtc_kernels)}


def allowed() -> dict[str, int]:
    """Returns the limits on requested kernels, by compiler."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def report(counters: Counters) -> str:
    """Describes the numbers of kernels, with their limits."""
    budget = allowed()
    return "kernels: " + ", ".join(f"{n} for {x} (budget {budget[x]})" for x, n in kernels(counters).items())


def excess(counters: Counters) -> str | None:
    """Explains an excess over the budget, with the ways out; returns None if there is no excess."""
    budget, found = allowed(), kernels(counters)
    over = [f"{n} kernels for {x}, {budget[x]} are in the budget" for x, n in found.items() if n > budget[x]]
    if not over:
        return None
    return (
        f"{'; '.join(over)}. Every kernel is compiled on each machine that runs the suite: share kernels with another "
        f"test, or select fewer settings (grids.in_turn). If they are worth their time, raise {PATH.name}."
    )
