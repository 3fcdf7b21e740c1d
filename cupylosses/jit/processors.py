"""Processors that this process may use, which a container often has fewer of than the machine."""

from __future__ import annotations

import os
from contextlib import suppress
from math import ceil
from pathlib import Path

#: Files of control groups, with their second and first version, that hold a quota and a period in microseconds.
QUOTAS: tuple[tuple[str, ...], ...] = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


def usable() -> int:
    """The number of processors of this process: those of its affinity, but no more than its control group has time of.

    More compiler threads than that take turns, and all other threads wait for theirs.
    """
    found = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for paths in QUOTAS:
        # A quota that is not limited is "max" or -1.
        with suppress(OSError, ValueError):
            quota, period = map(int, " ".join([Path(x).read_text("ascii") for x in paths]).split())
            if quota > 0 and period > 0:
                found = min(found, quota / period)
    return max(1, ceil(found))
