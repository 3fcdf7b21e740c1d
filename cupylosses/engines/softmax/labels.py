"""Reports of labels out of range.

Kernels write the first one to memory that the host reads without waiting. The next call of any loss raises it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
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


#: Maps the row, label and number of classes of a report to its error.
Explanation = Callable[[int, int, int], Exception]

#: Explanations by site number. A site is a place at which a plan may find a bad label; kernels report its number.
sites: list[Explanation] = []
_numbers: dict[Any, int] = {}
_numbering = threading.Lock()


def site_of(
    loss: Any, shape: tuple[int, ...], first: int = 0, error: Callable[..., IndexError] = softmax_checks.bad_label
) -> int:
    """Returns the site number by which kernels report a bad label of a plan.

    ``shape`` is that of all labels; the plan begins with label number ``first``.
    """
    key = loss, shape, first, error
    return sites_of(loss, [(key, partial(_bad_label, *key))])


def _bad_label(
    loss: Any,
    shape: tuple[int, ...],
    first: int,
    error: Callable[..., IndexError],
    row: int,
    label: int,
    classes: int,
) -> IndexError:
    row += first
    position = []
    for n in reversed(shape):
        row, at = divmod(row, n)
        position.append(at)
    return error(loss, position[::-1], label, classes, False)


def sites_of(loss: Any, explanations: Sequence[tuple[Any, Explanation]]) -> int:
    """Returns the number of the first of consecutive sites, each with a hashable name and its explanation."""
    with _numbering:  # plans are made in a warm-up's thread, too
        first = _numbers.setdefault((loss, *[name for name, _ in explanations]), len(sites))
        if first == len(sites):
            sites.extend([explain for _, explain in explanations])
        return first


def raise_reported(device: Device) -> None:
    """Raises the error for a bad label that a kernel has reported since the last call."""
    if not device.report.value:
        return
    status = Status.from_address(device.status())
    if status.code != 2:
        return
    site, row, label, classes = status.site, status.row, status.label, status.classes
    status.code = 0
    raise sites[site](row, label, classes)
