"""The plan of a call of a loss of rows. No array library is named here: what is asked of arrays,
:class:`cupylosses.engines.device.Device` knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupylosses.engines.device import Device
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.engines.softmax.call import RowCall
from cupylosses.engines.softmax.dense_plan import TermPlan
from cupylosses.engines.softmax.plan import RowPlan, RowTensor, rows_of
from cupylosses.engines.strides import dense_strides
from cupylosses.interop import ITEMSIZE


def smoothed(call: RowCall) -> bool:
    """Whether labels are smoothed: kernels are compiled for it."""
    for parameter, value in zip(call.loss.parameters, call.parameters, strict=True):
        if parameter.name == "label_smoothing":
            return value != 0.0
    return False


def copies(call: RowCall, device: Device) -> bool:
    """True of calls whose rows kernels that write gradients take from a copy (:func:`.row_launch.copied`); of those
    that write none, only losses with a softmax do.
    """
    operands = differentiable(call)
    sizes = [ITEMSIZE[softmax_checks.dtype_name(x)] for x in operands]
    strides = [device.strides(x) for x in operands] + [_gradient_strides(x, device) for x in operands]
    tensors = [rows_of(x, call.class_dim, size, 0) for x, size in zip(strides, sizes * 2, strict=True)]
    return softmax_layout.copied(call.row_shape, call.classes, tensors, len(operands), call.loss.softmax)


def with_classes_together(
    call: RowCall, device: Device, copy: Callable[[Any, tuple[int, ...]], Any] | None = None
) -> RowCall:
    """The call with copies of the operands of which the classes, or those of the gradient, lie apart."""

    def together(x: Any) -> Any:
        if device.strides(x)[call.class_dim] == _gradient_strides(x, device)[call.class_dim] == 1:
            return x
        return (copy or device.copy)(x, softmax_layout.classes_last(x.shape, call.class_dim))

    moved = tuple([together(x) for x in differentiable(call)])
    return call._replace(operands=(*moved, *call.operands[len(moved) :]))


def differentiable(call: RowCall) -> tuple[Any, ...]:
    """The operands that have classes, and gradients."""
    return call.operands[:1] if call.kind == "indices" else call.operands


def _gradient_strides(x: Any, device: Device) -> tuple[int, ...]:
    return dense_strides(x.shape, device.strides(x))


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
    return RowTensor(softmax_checks.dtype_name(x), tuple(x.shape), device.strides(x), device.address(x) % 16)
