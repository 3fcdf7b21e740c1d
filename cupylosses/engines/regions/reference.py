"""Reference formulas in the array API, for CPU arrays and for derivatives without a kernel.

Probabilities, sums and the formula of groups are computed in float64 for every dtype, and the result is rounded once.
Derivatives come from the array library.
"""

from __future__ import annotations

from math import isnan, nan
from typing import Any, NamedTuple

from cupylosses import interop
from cupylosses.call import Call
from cupylosses.engines.regions.call import Regions
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax.reference import log_softmax_parts
from cupylosses.reference_math import detached, divide, float64_scalar, power, softplus, weighted


def evaluate(call: Call, promoted: str, readable: bool = True) -> Any:
    """Returns the loss of a call whose operands promote to dtype ``promoted``. Checks labels if ``readable``."""
    xp = interop.namespace(call.arrays[0])
    view = Regions(call)
    static = view.static
    voxels = counted(xp, view)
    if static.kind == "labels" and static.check != "off" and readable:
        _check_labels(xp, view, voxels)
    x = _classes_last(xp, view, view.input, voxels.sound)
    t = _target(xp, view, voxels)
    parts = _probabilities(xp, view, x)
    value = _of_regions(xp, view, _cells(xp, view, parts, t, voxels), voxels)
    if static.voxel:
        mean = _of_voxels(xp, view, x, t, parts, voxels)
        value = view.numbers["share"] * value + view.numbers["voxel_share"] * mean
    return xp.astype(value, getattr(xp, static.out_dtype or promoted), copy=False)


class Voxels(NamedTuple):
    """Flags and labels of all voxels, of shape (samples, voxels of a sample).

    ``sound`` is True for voxels that count and whose label, if there is one, is valid. ``labels`` are their labels, 0
    elsewhere. ``bad`` is True for voxels that count and whose label is invalid.
    """

    sound: Any
    labels: Any = None
    bad: Any = None


class Probabilities(NamedTuple):
    """Probabilities p of each class, 1 - p as ``rest``, and with a softmax log p."""

    p: Any
    rest: Any
    log_p: Any = None


def counted(xp: Any, view: Regions) -> Voxels:
    """Determines the voxels that count, and their labels."""
    shape = view.voxels
    like = view.target if view.static.kind == "labels" else xp.sum(view.target, axis=view.static.class_dim)
    everywhere = xp.ones_like(detached(like), dtype=xp.bool)
    used = everywhere if view.mask is None else everywhere & view.mask
    flat = (shape[0], -1) if 0 not in shape else (shape[0], 0)
    if view.static.kind == "dense":
        return Voxels(xp.reshape(used, flat))
    labels = xp.astype(view.target, xp.int64)
    used = used & (labels != view.static.ignore_index)
    valid = (labels >= 0) & (labels < view.classes)
    labels = xp.where(used & valid, labels, xp.zeros_like(labels))
    return Voxels(*(xp.reshape(y, flat) for y in (used & valid, labels, used & ~valid)))


def _classes_last(xp: Any, view: Regions, x: Any, sound: Any) -> Any:
    """Returns an operand as (samples, voxels, classes) in float64, with zeros in voxels that do not count.

    The zeros are set before anything is computed: later, NaN of these voxels would already be in the gradient.
    """
    dim = view.static.class_dim
    order = [d for d in range(x.ndim) if d != dim]
    x = xp.astype(xp.permute_dims(x, (*order, dim)), xp.float64, copy=False)
    x = xp.reshape(x, (*sound.shape, view.classes))
    return xp.where(sound[..., None], x, xp.zeros_like(x))


def _target(xp: Any, view: Regions, voxels: Voxels) -> Any:
    """Returns the target as a value per class, 0 in voxels that do not count."""
    if view.static.kind == "dense":
        return _classes_last(xp, view, view.target, voxels.sound)
    device = {"device": view.input.device} if interop.kind(view.input) == "torch" else {}
    one_hot = xp.arange(view.classes, **device) == voxels.labels[..., None]
    return xp.astype(one_hot & voxels.sound[..., None], xp.float64)


def _probabilities(xp: Any, view: Regions, x: Any) -> Probabilities:
    if view.static.activation == "none":
        return Probabilities(x, 1 - x)
    if view.static.activation == "sigmoid":
        return Probabilities(xp.exp(-softplus(xp, -x)), xp.exp(-softplus(xp, x)))
    return softmax(xp, x)


def softmax(xp: Any, x: Any) -> Probabilities:
    """Returns the softmax. For the largest logit, 1 - p is the sum of the other probabilities."""
    s, log_sum, total, _ = log_softmax_parts(xp, x)
    e = xp.exp(s)
    places = xp.argmax(detached(x), axis=-1)
    device = {"device": x.device} if interop.kind(x) == "torch" else {}
    leads = xp.arange(x.shape[-1], **device) == places[..., None]
    others = xp.sum(xp.where(leads, xp.zeros_like(e), e), axis=-1)
    rest = xp.where(leads, others[..., None], total[..., None] - e)
    return Probabilities(e / total[..., None], rest / total[..., None], s - log_sum[..., None])


class Cells(NamedTuple):
    """Sums I, FP and FN of each sample and class."""

    hits: Any
    false_positives: Any
    false_negatives: Any


def _cells(xp: Any, view: Regions, parts: Probabilities, t: Any, voxels: Voxels) -> Cells:
    p, rest = parts.p, parts.rest
    # p - t, without cancellation at t = 1, and with the derivatives by p and t.
    difference = xp.where(t == 1, (1 - t) - rest, p - t)
    if view.static.overlap == "squared":
        terms = p * t, p * difference, -t * difference
    elif view.static.overlap == "min":
        zero = xp.zeros_like(difference)
        terms = (
            xp.where(difference < 0, p, xp.where(difference > 0, t, (p + t) / 2)),
            xp.where(difference > 0, difference, xp.where(difference < 0, zero, difference / 2)),
            xp.where(difference < 0, -difference, xp.where(difference > 0, zero, -difference / 2)),
        )
    else:
        terms = p * t, p * (1 - t), rest * t
    sound = voxels.sound[..., None]
    sums = [xp.sum(xp.where(sound, y, xp.zeros_like(y)), axis=1) for y in terms]
    return Cells(*(y if view.static.background else y[:, 1:] for y in sums))


def _of_regions(xp: Any, view: Regions, cells: Cells, voxels: Voxels) -> Any:
    """Returns the region loss: one number, or one per group."""
    static, number = view.static, view.numbers
    axes = (*[0] * static.pools_batch, *[1] * static.pools_classes)

    def pooled(y: Any) -> Any:
        return xp.sum(y, axis=axes, keepdims=True) if axes else y

    true = detached(cells.hits + cells.false_negatives)
    weights = _weights_of_cells(xp, view, true)
    hits, positives, negatives = cells
    if weights is not None:
        hits, positives, negatives = (weighted(xp, weights, y) for y in cells)
    hits, positives, negatives = pooled(hits), pooled(positives), pooled(negatives)
    present = pooled(true) > 0
    losses = _formula(xp, view, hits, positives, negatives, present)
    if static.gamma_over == "group" and number["gamma"] != 1.0:
        losses = power(xp, losses, number["gamma"])
    counts = present if static.absent == "skip" else present | ~present
    # A group whose sums are NaN compares as absent. It counts all the same, so that the result is NaN.
    used = present if static.absent != "keep" else counts
    unknown = xp.isnan(detached(hits + positives + negatives))
    used, counts = used | unknown, counts | unknown
    weight = xp.ones_like(losses)
    if static.class_weighted and static.weight_in == "loss":
        weight = weight * _class_weight(xp, view)
    losses = xp.where(used & (weight != 0), losses, xp.zeros_like(losses)) * weight
    bad: Any = xp.zeros_like(losses)
    if voxels.bad is not None:
        spoilt = xp.astype(xp.any(voxels.bad, axis=1), xp.float64)[:, None]
        if static.pools_batch:
            spoilt = xp.sum(spoilt, axis=0, keepdims=True)
        bad = xp.where(spoilt > 0, xp.full_like(bad, nan), bad)
    if static.reduction == "none":
        return xp.reshape(losses + bad, view.groups)
    total = _reduced(xp, view, losses, xp.astype(counts, xp.float64), weight)
    if static.gamma_over == "mean" and number["gamma"] != 1.0:
        total = power(xp, total, number["gamma"])
    return total + xp.sum(bad)


def _reduced(xp: Any, view: Regions, losses: Any, counts: Any, weight: Any) -> Any:
    static = view.static
    divisors = counts * weight if static.mean_of_weights else counts
    if static.average == "samples":
        below = xp.sum(divisors, axis=1)
        has = below != 0
        means = xp.sum(losses, axis=1) / xp.where(has, below, xp.ones_like(below))
        empty = view.numbers["empty"]
        losses = xp.where(has, means, xp.zeros_like(means) + (0.0 if isnan(empty) else empty))
        divisors = xp.astype(has, xp.float64) if isnan(empty) else xp.ones_like(below)
    total = xp.sum(losses)
    if static.reduction == "sum":
        return total
    return divide(xp, total, xp.sum(divisors) if view.normalizer is None else view.normalizer)


def _formula(xp: Any, view: Regions, hits: Any, positives: Any, negatives: Any, present: Any) -> Any:
    """Returns the loss of each group, before the exponent `gamma`."""
    number = view.numbers
    above, below, floor = number["smooth_nr"], number["smooth_dr"], number["floor"]
    wrong = number["alpha"] * positives + number["beta"] * negatives
    size = hits + wrong + below
    free = ~(size < floor)
    size = xp.where(free, size, xp.zeros_like(size) + floor)
    # Numerator of 1 - S. Above the floor, hits have cancelled.
    missed = xp.where(free, wrong + (below - above), floor - above - hits)
    void = size == 0
    safe = xp.where(void, xp.ones_like(size), size)
    one = xp.ones_like(size)
    lost = xp.where(void, xp.where(present, one, xp.zeros_like(one)), missed / safe)
    if not view.static.log_loss:
        return (number["offset"] - 1) + lost
    score = xp.where(void, 1 - lost, (hits + above) / safe)
    least = number["log_floor"]
    high = score > 0.5
    low = score < least
    near = -xp.log1p(-xp.where(high, lost, xp.zeros_like(lost)))
    far = -xp.log(xp.where(high | low, one, score))
    bottom = -xp.log(float64_scalar(xp, score, least))
    return xp.where(high, near, xp.where(low, xp.zeros_like(far) + bottom, far))


def _weights_of_cells(xp: Any, view: Regions, true: Any) -> Any:
    """Returns the factors of the sums of each cell, or None: weights by size times class weights in the score."""
    static = view.static
    weights = None
    if static.weighting != "uniform":
        sizes = xp.sum(true, axis=0, keepdims=True) if static.pools_batch else true
        has = sizes > 0
        safe = xp.where(has, sizes, xp.ones_like(sizes))
        inverse = 1 / (safe * safe) if static.weighting == "square" else 1 / safe
        largest = xp.max(xp.where(has, inverse, xp.zeros_like(inverse)), axis=1, keepdims=True)
        weights = xp.where(has, inverse, largest) + xp.zeros_like(true)
    if static.class_weighted and static.weight_in == "score":
        class_weight = _class_weight(xp, view) + xp.zeros_like(true)
        weights = class_weight if weights is None else weights * class_weight
    return weights


def _class_weight(xp: Any, view: Regions) -> Any:
    """Returns the weights of the classes that have a region, as a row."""
    weights = xp.astype(view.class_weight, xp.float64)
    return (weights if view.static.background else weights[1:])[None, :]


def _of_voxels(xp: Any, view: Regions, x: Any, t: Any, parts: Probabilities, voxels: Voxels) -> Any:
    """Returns the mean of the voxel losses."""
    static, loss = view.static, view.loss
    weights = float64_scalar(xp, x, 1.0) if view.weight is None else xp.astype(view.weight, xp.float64)
    sound, values = voxels.sound, view.of_voxels
    zero = xp.zeros_like(x[..., 0])
    if static.voxel == "element":
        costs = loss.references["element"](xp, input=x, target=t, weight=weights, **values)
        costs = xp.sum(xp.where(sound[..., None], costs, xp.zeros_like(costs)), axis=-1) / view.classes
        return _mean_of_voxels(xp, costs, xp.astype(sound, xp.float64), voxels)
    if static.activation != "softmax":
        parts = softmax(xp, x)
    if static.voxel == "term":
        terms = loss.references["term"](xp, log_p=parts.log_p, target=t, weight=weights, classes=view.classes, **values)
        costs = xp.where(sound, xp.sum(terms, axis=-1), zero)
        return _mean_of_voxels(xp, costs, xp.astype(sound, xp.float64), voxels)
    is_label = t == 1
    nll = -xp.sum(xp.where(is_label, parts.log_p, xp.zeros_like(x)), axis=-1)
    rest = xp.sum(xp.where(is_label, parts.rest, xp.zeros_like(x)), axis=-1)
    of_label = xp.sum(xp.where(is_label, weights + xp.zeros_like(x), xp.zeros_like(x)), axis=-1)
    used = xp.where(weights == 0, xp.zeros_like(x), -parts.log_p)
    smooth = xp.sum(weights * used, axis=-1) / view.classes
    costs = loss.references["row"](xp, nll=nll, rest=rest, smooth=smooth, weight=of_label, **values)
    counts = of_label if loss.of_weights else xp.astype(sound, xp.float64)
    return _mean_of_voxels(xp, xp.where(sound, costs, zero), xp.where(sound, counts, zero), voxels)


def _mean_of_voxels(xp: Any, costs: Any, counts: Any, voxels: Voxels) -> Any:
    mean = divide(xp, xp.sum(costs), xp.sum(counts))
    if voxels.bad is None:
        return mean
    void = xp.zeros_like(detached(mean))
    return mean + xp.where(xp.any(voxels.bad), void + nan, void)


def _check_labels(xp: Any, view: Regions, voxels: Voxels) -> None:
    """Raises for invalid labels."""
    if not bool(xp.any(voxels.bad)):
        return
    bad = xp.reshape(voxels.bad, tuple(view.target.shape))
    position = tuple(int(x[0]) for x in xp.nonzero(bad))
    label, bad_labels = view.target[position], view.target[bad]
    alike = bool(xp.all(bad_labels == label))
    raise softmax_checks.bad_label(view.loss, position, int(label), view.classes, alike)
