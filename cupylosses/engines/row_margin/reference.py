"""Losses of rows of scores through the array API: the path of CPU arrays, and of derivatives that no kernel has.

Rows are computed in float64 for every dtype, and the result is rounded once. Derivatives are those of the array
library. All pairs of a row exist at once.
"""

from __future__ import annotations

from math import nan
from typing import Any, NamedTuple

from cupylosses import interop
from cupylosses.engines.row_margin import checks as margin_checks
from cupylosses.engines.row_margin.call import Rows, constant_divisor
from cupylosses.engines.row_margin.definition import END
from cupylosses.reference_math import detached, divide


def evaluate(call: Rows, promoted: str, readable: bool = True) -> Any:
    """The loss of a call whose scores have dtype ``promoted``. Labels are checked where they are ``readable``, which
    those that are traced are not.
    """
    xp, static = interop.namespace(call.input), call.static
    rows = counted_rows(xp, call, readable)
    if static.check != "off" and readable:
        _check_labels(xp, call, rows.bad)
    cost = _cost(xp, call, rows)
    bad = xp.any(rows.bad, axis=-1)
    if static.reduction != "none":
        cost = divide(xp, xp.sum(cost), divisor(xp, call, rows))
        bad = xp.any(bad)
    # Added to the value alone: other rows keep their gradients.
    nothing = xp.zeros_like(detached(cost))
    cost = cost + xp.where(bad, nothing + nan, nothing)
    result = xp.astype(cost, getattr(xp, static.out_dtype or promoted), copy=False)
    # NumPy makes arrays without dimensions of some operations, and its own numbers of most.
    return result[()] if interop.kind(result) == "numpy" else result


class RowMask(NamedTuple):
    """Which rows are ``used``; the ``labels`` of each row in the last dimension, 0 where they are not looked at; which
    of these are ``listed``; and which labels of used rows are ``bad``.
    """

    used: Any
    labels: Any
    listed: Any
    bad: Any


def counted_rows(xp: Any, call: Rows, readable: bool = False) -> RowMask:
    """Which rows of a call count, and their labels."""
    static, several = call.static, call.loss.several
    labels = xp.astype(call.target, xp.int64)
    labels = xp.moveaxis(labels, static.class_dim, -1) if several else labels[..., None]
    used = xp.ones(call.shape, dtype=xp.bool, **_device(labels))
    if several:
        alive = xp.cumulative_sum(xp.astype(labels == END, xp.int64), axis=-1) == 0
        if readable and labels.shape[-1]:
            # Of padded lists only as much as there are labels.
            longest = int(xp.max(xp.sum(xp.astype(alive, xp.int64), axis=-1))) if labels.shape[0] else 0
            labels, alive = labels[..., :longest], alive[..., :longest]
    else:
        used = used & (labels[..., 0] != static.ignore_index)
        alive = xp.ones_like(labels) == 1
    if call.mask is not None:
        used = used & call.mask
    alive = alive & used[..., None]
    is_class = (labels >= 0) & (labels < call.classes)
    return RowMask(used, xp.where(alive & is_class, labels, xp.zeros_like(labels)), alive & is_class, alive & ~is_class)


def _cost(xp: Any, call: Rows, rows: RowMask) -> Any:
    """The cost of each row; 0 of one that does not count, or has a bad label."""
    x = xp.astype(xp.moveaxis(call.input, call.static.class_dim, -1), xp.float64, copy=False)
    sound = rows.used & ~xp.any(rows.bad, axis=-1)
    weight: Any = 1.0
    if call.weight is not None:
        flat = xp.take(xp.astype(call.weight, xp.float64), xp.reshape(rows.labels, (-1,)), axis=0)
        weight = xp.reshape(flat, rows.used.shape)
        sound = sound & (weight != 0)
    # Replaced before anything is computed, since afterwards their NaN would be in the gradient.
    x = xp.where(sound[..., None], x, xp.zeros_like(x))
    own = xp.take_along_axis(x, rows.labels, axis=-1)
    classes = xp.arange(call.classes, **_device(rows.labels))
    listed = rows.listed & sound[..., None]
    member = xp.any(listed[..., None] & (rows.labels[..., None] == classes), axis=-2)
    pairs = listed[..., None] & ~member[..., None, :]
    values = call.values
    excess = values["margin"] + (x[..., None, :] - own[..., None])
    # NaN is not below 0.
    active = pairs & ~(excess <= 0)
    hinges = call.loss.reference(xp, xp.where(active, excess, xp.ones_like(excess)), **values)
    hinges = xp.where(active, hinges, xp.zeros_like(hinges))
    cost = weight * (xp.sum(xp.sum(hinges, axis=-1), axis=-1) / call.classes)
    spoilt = xp.isnan(detached(cost))
    squares = xp.sum(xp.where(spoilt[..., None], x, xp.zeros_like(x)) ** 2, axis=-1)
    cost = xp.where(spoilt, squares * nan, cost)
    return xp.where(sound, cost, xp.zeros_like(cost))


def divisor(xp: Any, call: Rows, rows: RowMask) -> Any:
    """The divisor of the sum of the rows: a number, or an array without dimensions. A row with a bad label does not
    count, unless rows have lists of labels.
    """
    if call.normalizer is not None:
        return call.normalizer
    constant = constant_divisor(call.loss.several, call.static, call.shape)
    if constant is not None:
        return constant
    counted = rows.used if call.loss.several else rows.used & ~xp.any(rows.bad, axis=-1)
    return xp.sum(xp.astype(counted, xp.float64))


def _check_labels(xp: Any, call: Rows, bad: Any) -> None:
    """Raises for labels that are no class."""
    if not bool(xp.any(bad)):
        return
    labels = xp.moveaxis(call.target, call.static.class_dim, -1) if call.loss.several else call.target[..., None]
    labels = labels[..., : bad.shape[-1]]
    position = tuple(int(x[0]) for x in xp.nonzero(bad))
    label, every, row = labels[position], labels[bad], position[:-1]
    dim = call.static.class_dim
    at = (*row[:dim], position[-1], *row[dim:]) if call.loss.several else row
    raise margin_checks.bad_label(call.loss, at, int(label), call.classes, bool(xp.all(every == label)))


def _device(x: Any) -> dict[str, Any]:
    return {"device": x.device} if interop.kind(x) == "torch" else {}
