"""Reference formula of log-probabilities and entropies through the array API.

It computes CPU arrays, and derivatives that have no kernel. Logits are processed in the arithmetic dtype (float32;
float64 for float64 logits and NumPy arrays), quantities of a row in float64, and the result is rounded once.
"""

from __future__ import annotations

from math import nan
from typing import Any

from cupylosses import interop
from cupylosses.engines.log_probs.call import Static
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax.reference import log_softmax_parts
from cupylosses.reference_math import detached


def evaluate(
    loss: Any, static: Static, x: Any, index: Any, mask: Any, scalars: tuple[float, ...], promoted: str, readable: bool
) -> Any:
    """Returns the packed result for logits ``x``. Labels are checked if they are ``readable``."""
    xp = interop.namespace(x)
    wide = xp.float32 if promoted != "float64" and interop.kind(x) != "numpy" else xp.float64
    classes = x.shape[-1]
    result = getattr(xp, static.out_dtype or promoted)
    labels = xp.astype(index, xp.int64)
    labels = labels if static.several else labels[..., None]
    used = labels != static.ignore_index
    if mask is not None:
        used = used & mask[..., None]
    valid = (labels >= 0) & (labels < classes)
    bad = used & ~valid
    if static.check != "off" and readable:
        _check(xp, loss, index, bad if static.several else bad[..., 0], classes)
    # If rows have no labels, every row that is not masked counts, for its entropy.
    counts = xp.any(used, axis=-1) if labels.shape[-1] else xp.ones(labels.shape[:-1], dtype=xp.bool, **_device(x))
    if mask is not None:
        counts = counts & mask
    log_p, entropy = (
        _of_nothing(xp, x, labels) if classes == 0 else _of_rows(xp, static, x, labels, counts, scalars, wide)
    )
    zero = xp.zeros_like(log_p)
    log_p = xp.where(used & valid, log_p, zero)
    # NaN is added to the value outside the graph, so other labels of the row keep their gradients.
    log_p = log_p + xp.where(bad, xp.full_like(detached(zero), nan), detached(zero))
    packed = log_p
    if static.entropy:
        entropy = xp.where(counts, entropy, xp.zeros_like(entropy))
        packed = xp.concat([log_p, entropy[..., None]], axis=-1)
    elif not static.several:
        packed = log_p[..., 0]
    return xp.astype(packed, result, copy=False)


def _of_rows(
    xp: Any, static: Static, x: Any, labels: Any, counts: Any, scalars: tuple[float, ...], wide: Any
) -> tuple[Any, Any]:
    """Returns log-probabilities and the entropy of each row. Values of labels out of range are arbitrary."""
    x = xp.astype(x, wide, copy=False)
    # Rows that do not count are zeroed before any computation; later, a NaN of theirs would be in the gradient.
    x = xp.where(counts[..., None], x, xp.zeros_like(x))
    scale, softcap = scalars
    z = x if scale == 1.0 else x * scale
    if softcap:
        z = softcap * xp.tanh(z / softcap)
    s, log_sum, total, _ = log_softmax_parts(xp, z)
    is_class = (labels >= 0) & (labels < x.shape[-1])
    at_labels = xp.take_along_axis(s, xp.where(is_class, labels, xp.zeros_like(labels)), axis=-1)
    log_p = xp.astype(at_labels, xp.float64) - log_sum[..., None]
    log_p = xp.where(detached(log_p) > 0, xp.zeros_like(log_p), log_p)
    # A row without a finite maximum has NaN values and NaN derivatives.
    spoilt = ~xp.isfinite(detached(log_sum)) | ~xp.isfinite(xp.max(detached(z), axis=-1))
    squares = xp.sum(xp.where(spoilt[..., None], z, xp.zeros_like(z)) ** 2, axis=-1, dtype=xp.float64) * nan
    log_p = xp.where(spoilt[..., None], squares[..., None], log_p)
    if not static.entropy:
        return log_p, None
    # H = log S + sum of p (m - z); no term is negative.
    e = xp.exp(s)
    gap = -xp.sum(e * xp.where(e == 0, xp.zeros_like(s), s), axis=-1, dtype=xp.float64)
    return log_p, xp.where(spoilt, squares, log_sum + gap / total)


def _of_nothing(xp: Any, x: Any, labels: Any) -> tuple[Any, Any]:
    """Returns the results of rows without classes, which are empty sums."""
    nothing = xp.sum(x, axis=-1, dtype=xp.float64)
    return nothing[..., None] + xp.zeros_like(xp.astype(labels, xp.float64)), nothing


def _check(xp: Any, loss: Any, index: Any, bad: Any, classes: int) -> None:
    if not bool(xp.any(bad)):
        return
    position = tuple(int(x[0]) for x in xp.nonzero(bad)) if bad.ndim else ()
    label, bad_labels = index[position], index[bad]
    raise softmax_checks.bad_label(loss, position, int(label), classes, bool(xp.all(bad_labels == label)))


def _device(x: Any) -> dict[str, Any]:
    return {"device": x.device} if interop.kind(x) == "torch" else {}
