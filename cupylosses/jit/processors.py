"""Number of processors that this process may use. A container often has fewer than its machine."""

from __future__ import annotations

import os
from contextlib import suppress
from math import ceil
from pathlib import Path

#: Control group files with a quota and a period in microseconds: those of cgroup v2, then those of v1.
QUOTAS: tuple[tuple[str, ...], ...] = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


def usable() -> int:
    """Returns the number of processors in the affinity of this process, capped by the quota of its control group.

    More compiler threads than that take turns, and all other threads wait for theirs.
    """
    processors = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for paths in QUOTAS:
        # A quota of "max" or -1 means unlimited.
        with suppress(OSError, ValueError):
            quota, period = map(int, " ".join([Path(x).read_text("ascii") for x in paths]).split())
            if quota > 0 and period > 0:
                processors = min(processors, quota / period)
    return max(1, ceil(processors))
