"""Reports of labels out of range: kernels write the first one to memory of the device that the host reads without
waiting, and the next call of any loss raises.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
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


#: The loss, the shape of all labels, the number of the label that a plan begins with, and the function of the error.
Site = tuple[Any, tuple[int, ...], int, Callable[..., IndexError]]

#: Places of a possible bad label, each once, and their numbers.
sites: list[Site] = []
_numbers: dict[Site, int] = {}
_numbering = threading.Lock()


def site_of(
    loss: Any, shape: tuple[int, ...], first: int = 0, error: Callable[..., IndexError] = softmax_checks.bad_label
) -> int:
    """The number by which kernels report a bad label of a plan."""
    with _numbering:  # plans are made in a warm-up's thread, too
        number = _numbers.setdefault((loss, shape, first, error), len(sites))
        if number == len(sites):
            sites.append((loss, shape, first, error))
        return number


def raise_reported(device: Device) -> None:
    """Raises for the bad label that a kernel has reported since the last time."""
    if not device.report.value:
        return
    status = Status.from_address(device.status())
    if status.code != 2:
        return
    site, row, label, classes = status.site, status.row, status.label, status.classes
    status.code = 0
    loss, shape, first, error = sites[site]
    row += first
    position = []
    for n in reversed(shape):
        row, at = divmod(row, n)
        position.append(at)
    raise error(loss, position[::-1], label, classes, False)
