"""Margin losses through the array API, for CPU arrays and for derivatives that no kernel computes.

Rows are computed in float64 for every dtype, and the result is rounded once. The array library differentiates them. All
pairs of labels and classes are materialized.
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
    """Returns the loss of a call whose scores have dtype ``promoted``. Labels are checked if their values are
    ``readable``; they are not while a call is traced.
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
    # NaN is added as a constant, so that all other rows keep their gradients.
    nothing = xp.zeros_like(detached(cost))
    cost = cost + xp.where(bad, nothing + nan, nothing)
    result = xp.astype(cost, getattr(xp, static.out_dtype or promoted), copy=False)
    # Some NumPy operations return arrays without dimensions, most return NumPy scalars: always return a scalar.
    return result[()] if interop.kind(result) == "numpy" else result


class RowMask(NamedTuple):
    """Masks of the rows and labels of a call.

    Attributes:
        used: True for rows that count.
        labels: Labels of each row in the last dimension, replaced by 0 where they are not ``listed``.
        listed: True for valid labels of used rows, up to the end of a list.
        bad: True for labels of used rows that are not a class, before the end of a list.
    """

    used: Any
    labels: Any
    listed: Any
    bad: Any


def counted_rows(xp: Any, call: Rows, readable: bool = False) -> RowMask:
    """Returns the rows of a call that count, and their labels."""
    static, several = call.static, call.loss.several
    labels = xp.astype(call.target, xp.int64)
    labels = xp.moveaxis(labels, static.class_dim, -1) if several else labels[..., None]
    used = xp.ones(call.shape, dtype=xp.bool, **_device(labels))
    if several:
        alive = xp.cumulative_sum(xp.astype(labels == END, xp.int64), axis=-1) == 0
        if readable and labels.shape[-1]:
            # Padded lists are cut to the longest list of labels.
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
    """Returns the cost of each row: 0 for rows that do not count or have a bad label."""
    x = xp.astype(xp.moveaxis(call.input, call.static.class_dim, -1), xp.float64, copy=False)
    sound = rows.used & ~xp.any(rows.bad, axis=-1)
    weight: Any = 1.0
    if call.weight is not None:
        flat = xp.take(xp.astype(call.weight, xp.float64), xp.reshape(rows.labels, (-1,)), axis=0)
        weight = xp.reshape(flat, rows.used.shape)
        sound = sound & (weight != 0)
    # Scores of other rows are replaced before anything is computed from them. Masking the cost would be too late: their
    # NaN would already have entered the gradient.
    x = xp.where(sound[..., None], x, xp.zeros_like(x))
    label_scores = xp.take_along_axis(x, rows.labels, axis=-1)
    classes = xp.arange(call.classes, **_device(rows.labels))
    listed = rows.listed & sound[..., None]
    member = xp.any(listed[..., None] & (rows.labels[..., None] == classes), axis=-2)
    pairs = listed[..., None] & ~member[..., None, :]
    values = call.values
    excess = values["margin"] + (x[..., None, :] - label_scores[..., None])
    # A pair is active unless its excess is at most 0: NaN is active.
    active = pairs & ~(excess <= 0)
    hinges = call.loss.reference(xp, xp.where(active, excess, xp.ones_like(excess)), **values)
    hinges = xp.where(active, hinges, xp.zeros_like(hinges))
    cost = weight * (xp.sum(xp.sum(hinges, axis=-1), axis=-1) / call.classes)
    spoilt = xp.isnan(detached(cost))
    squares = xp.sum(xp.where(spoilt[..., None], x, xp.zeros_like(x)) ** 2, axis=-1)
    cost = xp.where(spoilt, squares * nan, cost)
    return xp.where(sound, cost, xp.zeros_like(cost))


def divisor(xp: Any, call: Rows, rows: RowMask) -> Any:
    """Returns the divisor of the sum over rows: a number, or an array without dimensions. A row with a bad label does
    not count, unless rows have lists of labels.
    """
    if call.normalizer is not None:
        return call.normalizer
    constant = constant_divisor(call.loss.several, call.static, call.shape)
    if constant is not None:
        return constant
    counted = rows.used if call.loss.several else rows.used & ~xp.any(rows.bad, axis=-1)
    return xp.sum(xp.astype(counted, xp.float64))


def _check_labels(xp: Any, call: Rows, bad: Any) -> None:
    """Raises IndexError for the first label that is not a class, if there is one."""
    if not bool(xp.any(bad)):
        return
    labels = xp.moveaxis(call.target, call.static.class_dim, -1) if call.loss.several else call.target[..., None]
    labels = labels[..., : bad.shape[-1]]
    position = tuple(int(x[0]) for x in xp.nonzero(bad))
    label, bad_labels, row = labels[position], labels[bad], position[:-1]
    dim = call.static.class_dim
    at = (*row[:dim], position[-1], *row[dim:]) if call.loss.several else row
    raise margin_checks.bad_label(call.loss, at, int(label), call.classes, bool(xp.all(bad_labels == label)))


def _device(x: Any) -> dict[str, Any]:
    return {"device": x.device} if interop.kind(x) == "torch" else {}
