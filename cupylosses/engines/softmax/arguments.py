"""What a call of a loss of rows needs beside its plan, before its kernels run and after: arguments, divisor, what is
returned besides, labels that are no class; and where plans are kept. No array library is named here: what is asked of
arrays, :class:`cupylosses.engines.device.Device` knows, or the array API.
"""

from __future__ import annotations

from typing import Any

from cupylosses import interop
from cupylosses.engines.device import Device, Divisor
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax import planning
from cupylosses.engines.softmax.call import RowCall
from cupylosses.engines.softmax.dense_plan import TermArguments, TermPlan
from cupylosses.engines.softmax.plan import Arguments, Outputs, RowPlan, Status

_MAX_PLANS = 4096

#: Plans, and the devices they are for, by `own_key` and what the library says of the arrays.
plans: dict[Any, tuple[Any, Any]] = {}


def remember(key: Any, plan: Any, device: Any) -> tuple[Any, Any]:
    """Keeps a plan; both again."""
    if len(plans) >= _MAX_PLANS:
        plans.clear()
    plans[key] = plan, device
    return plan, device


def own_key(call: RowCall) -> tuple[Any, ...]:
    """What a plan depends on but for the arrays. Kernels are compiled for labels that are smoothed, and for logits that
    are capped.
    """
    own = planning.smoothed(call) if call.kind == "indices" else call.flags
    return call.loss, call.class_dim, call.out_dtype, own, call.softcap != 0.0


def index_arguments(call: RowCall, device: Device) -> Arguments:
    """What a plan does not say of a call of class indices."""
    numbers = call.ignore_index, call.scale, call.softcap, call.parameters
    return Arguments(*_addresses(call, device), *numbers, call.check != "off")


def term_arguments(call: RowCall, device: Device) -> TermArguments:
    """The same of a target per class."""
    return TermArguments(*_addresses(call, device), call.scale, call.softcap, call.parameters)


def _addresses(call: RowCall, device: Device) -> tuple[int, int, int, int]:
    """Of operands, class weights and mask; 0 of what there is not."""
    (first, second), weight, mask, address = call.operands, call.weight, call.mask, device.address
    return (
        address(first),
        address(second),
        0 if weight is None else address(weight),
        0 if mask is None else address(mask),
    )


def divisor_of(call: RowCall, device: Device) -> Divisor | None:
    """What the sum of the rows is divided by; None if that is to be counted on the device."""
    normalizer = call.normalizer
    if normalizer is not None and type(normalizer) is not float and call.reduction not in ("none", "sum"):
        x = device.double(normalizer)
        return Divisor(x) if type(x) is float else Divisor(1.0, x, device.address(x))
    known = call.divisor
    return None if known is None else Divisor(known)


def new_lse(plan: RowPlan | TermPlan, device: Device) -> Any:
    """Room for the log-partition functions of the rows."""
    return device.empty(plan.shape, plan.result_strides, plan.compute)


def outputs_of(call: RowCall, plan: RowPlan, device: Device) -> tuple[Outputs, Any, Any]:
    """What is stored per row besides: where, the log-partition functions, and whether no logit is larger than the
    label's.
    """
    outputs, lse, correct = Outputs(), None, None
    if call.lse:
        lse = new_lse(plan, device)
        outputs.lse = device.address(lse)
    if call.accuracy:
        correct = device.empty(plan.shape, plan.result_strides, "uint8")
        outputs.correct = device.address(correct)
    return outputs, lse, correct


def accuracy_of(call: RowCall, correct: Any) -> Any:
    """The share of the rows that count in which no logit is larger than the label's; None if it is not asked for."""
    if correct is None:
        return None
    xp = interop.namespace(correct)
    # Widened, because a byte without a sign is never what is ignored below 0.
    counts = xp.astype(call.operands[1], xp.int64) != call.ignore_index
    if call.mask is not None:
        counts = counts & call.mask
    share = xp.sum(correct, dtype=xp.float64) / xp.sum(counts, dtype=xp.float64)
    return xp.astype(share, xp.float32)


def check_labels(device: Device) -> None:
    """Raises if a kernel has met a label out of range since the last time."""
    if not device.has_status:
        return
    status = Status.from_address(device.status())
    if status.code != 2:
        return
    site, row, label, classes = status.site, status.row, status.label, status.classes
    status.code = 0
    loss, shape = RowPlan.sites[site]
    position = []
    for n in reversed(shape):
        row, at = divmod(row, n)
        position.append(at)
    raise softmax_checks.bad_label(loss, position[::-1], label, classes, False)
