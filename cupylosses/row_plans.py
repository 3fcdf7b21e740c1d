"""The plan of a call of a loss of rows. No array library is named here: what is asked of arrays,
:class:`cupylosses.engine.Device` knows.
"""

from __future__ import annotations

from typing import Any

from cupylosses import row_checks
from cupylosses.engine import Device
from cupylosses.row_call import RowCall
from cupylosses.row_engine import RowPlan, RowTensor
from cupylosses.row_term_engine import TermPlan


def smoothed(call: RowCall) -> bool:
    """Whether labels are smoothed: kernels are compiled for it."""
    for parameter, value in zip(call.loss.parameters, call.parameters, strict=True):
        if parameter.name == "label_smoothing":
            return value != 0.0
    return False


def index_plan(call: RowCall, device: Device, promoted: str, out_dtype: str | None, directions: Any = None) -> RowPlan:
    """The plan of a call of class indices whose operands promote to dtype ``promoted``, or of its second derivatives
    along directions.
    """
    first, second = call.operands
    return RowPlan(
        call.loss, _tensor(first, device), _tensor(second, device), _tensor(call.weight, device),
        _tensor(call.mask, device), call.class_dim, promoted, out_dtype, smoothed(call), call.softcap != 0.0,
        device.processors, device.launcher, device.chip, _tensor(directions, device),
    )  # fmt: skip


def term_plan(call: RowCall, device: Device, promoted: str, out_dtype: str | None, moving: bool = False) -> TermPlan:
    """The same of a target per class, or of second derivatives along directions that lie as gradients do."""
    first, second = call.operands
    return TermPlan(
        call.loss, call.flags, (_tensor(first, device), _tensor(second, device)), _tensor(call.weight, device),
        _tensor(call.mask, device), call.class_dim, promoted, out_dtype, call.softcap != 0.0,
        device.processors, device.launcher, device.chip, moving,
    )  # fmt: skip


def _tensor(x: Any, device: Device) -> Any:
    """What a plan needs to know of an array; None of none."""
    if x is None:
        return None
    return RowTensor(row_checks.dtype_name(x), tuple(x.shape), device.strides(x), device.address(x) % 16)
