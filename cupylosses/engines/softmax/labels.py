"""Reports of labels out of range: kernels write the first one to memory of the device that the host reads without
waiting, and the next call of any loss raises.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cupylosses.engines.device import Device
from cupylosses.engines.softmax import checks as softmax_checks


class Status(ctypes.Structure):
    """``RowStatus`` of ``kernels/softmax/rows.cuh``."""

    _fields_ = (
        ("code", ctypes.c_uint),
        ("unused", ctypes.c_uint),
        ("row", ctypes.c_longlong),
        ("label", ctypes.c_longlong),
        ("classes", ctypes.c_longlong),
        ("site", ctypes.c_longlong),
    )


#: The loss, the shape of all labels, and the number of the label that a plan begins with; or the loss, a name, and what
#: makes the error of place, value and limit.
Site = tuple[Any, Any, Any]

#: Places of a possible bad label, each once, and their numbers.
sites: list[Site] = []
_numbers: dict[Any, int] = {}
_numbering = threading.Lock()


def site_of(loss: Any, shape: tuple[int, ...], first: int = 0) -> int:
    """The number by which kernels report a bad label of a plan."""
    with _numbering:  # plans are made in a warm-up's thread, too
        number = _numbers.setdefault((loss, shape, first), len(sites))
        if number == len(sites):
            sites.append((loss, shape, first))
        return number


def sites_of(loss: Any, explanations: Sequence[tuple[Any, Callable[[int, int, int], Exception]]]) -> int:
    """The number of the first of neighbouring sites, each with a hashable name and the error that it stands for."""
    with _numbering:
        first = _numbers.setdefault((loss, *[name for name, _ in explanations]), len(sites))
        if first == len(sites):
            sites.extend([(loss, name, explain) for name, explain in explanations])
        return first


def raise_reported(device: Device) -> None:
    """Raises for the bad label that a kernel has reported since the last time."""
    if not device.report.value:
        return
    status = Status.from_address(device.status())
    if status.code != 2:
        return
    site, row, label, classes = status.site, status.row, status.label, status.classes
    status.code = 0
    loss, shape, first = sites[site]
    if callable(first):
        raise first(row, label, classes)
    row += first
    position = []
    for n in reversed(shape):
        row, at = divmod(row, n)
        position.append(at)
    raise softmax_checks.bad_label(loss, position[::-1], label, classes, False)
