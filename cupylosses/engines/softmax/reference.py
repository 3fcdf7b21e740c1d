"""Losses of rows through the array API, for CPU arrays and for derivatives that no kernel computes.

The formulas aim at correctness, not speed. Logits are processed in the arithmetic type: float32, or float64 for float64
operands and NumPy arrays. Per-row quantities are float64, and the result is rounded once. The array library
differentiates the formulas, to any order.
"""

from __future__ import annotations

from math import inf, nan
from typing import Any, NamedTuple

from cupylosses import interop
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax.call import RowResult, Rows
from cupylosses.reference_math import detached, divide


def evaluate(call: Rows, promoted: str, readable: bool = True) -> Any:
    """Returns the loss of a call whose operands promote to dtype ``promoted``.

    A normalizer is a number or a double. Labels are checked if they are ``readable``, which traced labels are not.
    """
    xp = interop.namespace(call.operands[0])
    rows = counted_rows(xp, call)
    if rows.bad is not None and call.static.check != "off" and readable:
        check_labels(xp, call, rows.bad)
    wide = xp.float32 if promoted != "float64" and interop.kind(call.operands[0]) != "numpy" else xp.float64
    of_rows = _of_nothing if call.classes == 0 else _of_terms if rows.bad is None else _of_indices
    cost, lse, accuracy = of_rows(xp, call, rows, wide)
    zero = xp.zeros_like(cost)
    cost = xp.where(rows.used, cost, zero)
    if call.reduction != "none":
        cost = divide(xp, xp.sum(cost), divisor(xp, call, rows))
    if rows.bad is not None:
        # NaN is added to the value only: other rows keep their gradients.
        bad = rows.bad if call.reduction == "none" else xp.any(rows.bad)
        cost = cost + xp.where(bad, xp.full_like(detached(cost), nan), xp.zeros_like(detached(cost)))
    result = xp.astype(cost, getattr(xp, call.out_dtype or promoted), copy=False)
    if not (call.static.lse or call.static.accuracy):
        return _plain(result)
    return RowResult(
        _plain(result),
        _plain(xp.astype(detached(lse), wide, copy=False)) if call.static.lse else None,
        _plain(accuracy) if call.static.accuracy else None,
    )


class RowMask(NamedTuple):
    """Masks of rows: ``used``, and with class indices ``labels`` and ``bad``.

    ``used`` marks the rows that are neither masked nor ignored. ``bad`` marks the used rows with a label out of range.
    ``labels`` are 0 in rows that are unused or bad.
    """

    used: Any
    labels: Any = None
    bad: Any = None

    @property
    def sound(self) -> Any:
        """Used rows whose label is a class."""
        return self.used if self.bad is None else self.used & ~self.bad


def counted_rows(xp: Any, call: Rows) -> RowMask:
    """Returns the masks of the rows of a call."""
    target = call.operands[1]
    shape = call.shape
    like = xp.astype(target, xp.int64) if call.kind == "indices" else target
    everywhere = _placed(xp.ones(shape, dtype=xp.bool, **_device(like)), like)
    used = everywhere if call.mask is None else everywhere & call.mask
    if call.kind != "indices":
        return RowMask(used)
    used = used & (like != call.ignore_index)
    valid = (like >= 0) & (like < call.classes)
    return RowMask(used, xp.where(used & valid, like, xp.zeros_like(like)), used & ~valid)


def _of_indices(xp: Any, call: Rows, rows: RowMask, wide: Any) -> tuple[Any, Any, Any]:
    """Returns cost and lse per row, and the accuracy, for class indices.

    The cost of a bad row is 0.
    """
    sound = rows.sound
    x = _classes_last(xp, call, call.operands[0], sound, wide)
    label = _one_hot(xp, call.classes, rows.labels)
    weights = _weights(xp, call, x)
    label_weight = xp.sum(xp.where(label, weights, xp.zeros_like(x)), axis=-1, dtype=xp.float64)
    values = call.values
    if not call.loss.softmax:
        log_p = xp.sum(xp.where(label, x, xp.zeros_like(x)), axis=-1, dtype=xp.float64)
        cost = call.loss.references["row"](xp, nll=0 - log_p, weight=label_weight, **values)
        return xp.where(sound, cost, xp.zeros_like(cost)), None, None
    z = logits(xp, call, x)
    s, log_sum, total, lse = log_softmax_parts(xp, z)
    zero = xp.zeros_like(s)
    nll = log_sum - xp.sum(xp.where(label, s, zero), axis=-1, dtype=xp.float64)
    rest = xp.sum(xp.where(label, zero, xp.exp(s)), axis=-1, dtype=xp.float64) / total
    used_s = xp.where(weights == 0, zero, s)
    smooth = xp.sum(weights * (xp.zeros_like(s) + 1), axis=-1, dtype=xp.float64) * log_sum
    smooth = (smooth - xp.sum(weights * used_s, axis=-1, dtype=xp.float64)) / call.classes
    cost = call.loss.references["row"](xp, nll=nll, rest=rest, smooth=smooth, weight=label_weight, **values)
    cost = _finish(xp, call, cost, lse, [z], values)
    fixed = detached(z)
    own_logit = xp.sum(xp.where(label, fixed, zero), axis=-1)
    right = sound & (own_logit == xp.max(fixed, axis=-1))
    count = xp.sum(xp.astype(rows.used, xp.float64))
    accuracy = divide(xp, xp.sum(xp.astype(right, xp.float64)), count)
    void = xp.zeros_like(cost)
    lse = xp.where(rows.bad, void + nan, xp.where(sound, lse, void))
    return xp.where(sound, cost, void), lse, xp.astype(accuracy, xp.float32)


def _of_terms(xp: Any, call: Rows, rows: RowMask, wide: Any) -> tuple[Any, Any, Any]:
    """Returns cost and lse per row for dense targets, which have no accuracy."""
    x, target = (_classes_last(xp, call, operand, rows.used, wide) for operand in call.operands)
    z = logits(xp, call, x)
    s, log_sum, _, lse = log_softmax_parts(xp, z)
    log_p = s - xp.astype(log_sum, wide)[..., None]
    values = call.values
    arguments = {"target": target, "weight": _weights(xp, call, x)}
    operands = [z, target]
    if call.kind == "logits":
        operands = [z, logits(xp, call, target)]
        of_target, target_log_sum, _, _ = log_softmax_parts(xp, operands[1])
        arguments = {"log_q": of_target - xp.astype(target_log_sum, wide)[..., None]}
    terms = call.loss.references["term"](xp, log_p=log_p, classes=call.classes, **arguments, **values)
    cost = _finish(xp, call, xp.sum(terms, axis=-1, dtype=xp.float64), lse, operands, values)
    return cost, xp.where(rows.used, lse, xp.zeros_like(lse)), None


def _of_nothing(xp: Any, call: Rows, rows: RowMask, wide: Any) -> tuple[Any, Any, Any]:
    """Returns cost, lse and accuracy of rows without classes.

    Costs are empty sums; as in torch, the mean over dense targets is NaN.
    """
    cost = sum([xp.sum(x, axis=call.class_dim, dtype=xp.float64) for x in call.operands if x.ndim > len(call.shape)])
    if call.kind != "indices" and call.reduction == "mean":
        cost = cost + nan
    lse = xp.where(rows.used, xp.full_like(cost, -inf), xp.zeros_like(cost))
    count = xp.sum(xp.astype(rows.used, xp.float64))
    return cost, lse, xp.astype(divide(xp, xp.zeros_like(count), count), xp.float32)


def _finish(xp: Any, call: Rows, cost: Any, lse: Any, operands: list[Any], values: dict[str, Any]) -> Any:
    """Adds the penalty to the cost of rows.

    If the cost of a row is NaN, so are its derivatives with respect to the whole row.
    """
    penalty = call.loss.references.get("penalty")
    if penalty is not None:
        cost = cost + penalty(xp, lse=lse, **values)
    bad = xp.isnan(detached(cost))
    for x in operands:
        squares = xp.where(bad[..., None], x, xp.zeros_like(x)) ** 2
        cost = xp.where(bad, xp.sum(squares, axis=-1, dtype=xp.float64) * nan, cost)
    return cost


def log_softmax_parts(xp: Any, z: Any) -> tuple[Any, Any, Any, Any]:
    """Returns s = z - max z, log sum exp s, sum exp s and log sum exp z.

    All of these, and their derivatives, keep their digits in any row. In a row in which one class has more than half of
    the probability, s is relative to the logit of that class, derivatives included, and constant for the class itself.
    The logarithm of 1 + the rest then has the derivatives of the rest, in which nothing cancels, and the derivative
    with respect to the class's own logit is minus their sum.
    """
    top = xp.max(detached(z), axis=-1, keepdims=True)
    leads = _one_hot(xp, z.shape[-1], xp.argmax(detached(z), axis=-1))
    zero = xp.zeros_like(z)
    outside = xp.sum(xp.where(leads, zero, xp.exp(detached(z) - top)), axis=-1, dtype=xp.float64)
    sure = outside < 1
    leader = xp.sum(xp.where(leads & sure[..., None], z, zero), axis=-1, keepdims=True)
    s = xp.where(leads & sure[..., None], zero, (z - top) - (leader - detached(leader)))
    e = xp.exp(s)
    total = xp.sum(e, axis=-1, dtype=xp.float64)
    others = xp.sum(xp.where(leads, zero, e), axis=-1, dtype=xp.float64)
    safe = xp.where(sure, xp.ones_like(total), total)
    log_sum = xp.where(sure, xp.log1p(xp.where(sure, others, xp.zeros_like(others))), xp.log(safe))
    height = xp.sum(leader, axis=-1, dtype=xp.float64)
    top = xp.astype(top[..., 0], xp.float64)
    return s, log_sum, total, xp.where(sure, height, top) + log_sum


def logits(xp: Any, call: Rows, x: Any) -> Any:
    """Returns the scaled and capped logits."""
    z = x if call.scale == 1.0 else x * call.scale
    return call.softcap * xp.tanh(z / call.softcap) if call.softcap else z


def _classes_last(xp: Any, call: Rows, x: Any, used: Any, wide: Any) -> Any:
    """Returns an operand in the arithmetic type, with classes last and zeros in rows that are not ``used``.

    These rows are replaced before anything is computed, because otherwise a NaN in them would reach the gradient.
    """
    order = [d for d in range(x.ndim) if d != call.class_dim]
    x = xp.astype(xp.permute_dims(x, (*order, call.class_dim)), wide, copy=False)
    return xp.where(used[..., None], x, xp.zeros_like(x))


def _one_hot(xp: Any, classes: int, labels: Any) -> Any:
    return _placed(xp.arange(classes, **_device(labels)), labels) == labels[..., None]


def _weights(xp: Any, call: Rows, like: Any) -> Any:
    """Returns the class weights in the arithmetic type."""
    if call.weight is None:
        return _placed(xp.ones((call.classes,), dtype=like.dtype, **_device(like)), like)
    return _placed(xp.astype(call.weight, like.dtype, copy=False), like)


def divisor(xp: Any, call: Rows, rows: RowMask, row_weights: Any = None) -> Any:
    """Returns the divisor of the sum over rows, which may have weights: a number, or an array without dimensions.

    Bad rows do not count.
    """
    if call.normalizer is not None:
        return call.normalizer
    if call.divisor is not None and (row_weights is None or call.reduction != "mean"):
        return call.divisor
    counted = xp.astype(rows.sound, xp.float64)
    if call.weighs_mean:
        weights = _placed(xp.astype(call.weight, xp.float64), rows.labels)
        weights = xp.take(weights, xp.reshape(rows.labels, (-1,)), axis=0)
        counted = xp.where(rows.sound, xp.reshape(weights, call.shape), xp.zeros_like(counted))
    if row_weights is not None:
        counted = xp.where(rows.sound, counted * xp.astype(row_weights, xp.float64), xp.zeros_like(counted))
    return xp.sum(counted)


def check_labels(xp: Any, call: Rows, bad: Any) -> None:
    """Raises if a label is out of range."""
    if not bool(_whole(xp.any(bad))):
        return
    bad, labels = _whole(bad), _whole(call.operands[1])
    position = tuple(int(x[0]) for x in xp.nonzero(bad)) if bad.ndim else ()
    label, bad_labels = labels[position], labels[bad]
    raise softmax_checks.bad_label(call.loss, position, int(label), call.classes, bool(xp.all(bad_labels == label)))


def _device(x: Any) -> dict[str, Any]:
    return {"device": x.device} if interop.kind(x) == "torch" else {}


def _placed(x: Any, like: Any) -> Any:
    """Moves an array that was created here next to one of the call.

    It is replicated if that one is a `DTensor`, which cannot be combined with plain tensors.
    """
    if not _is_distributed(like) or _is_distributed(x):
        return x
    from torch.distributed.tensor import Replicate

    mesh = like.device_mesh
    return type(like).from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _whole(x: Any) -> Any:
    """Returns all of a `DTensor`, of which each process holds a part; returns other arrays unchanged."""
    return x.full_tensor() if _is_distributed(x) else x


def _is_distributed(x: Any) -> bool:
    return type(x).__name__ == "DTensor"


def _plain(x: Any) -> Any:
    """Converts a NumPy array without dimensions, which some operations return, to a NumPy scalar, as most return."""
    return x[()] if interop.kind(x) == "numpy" else x
