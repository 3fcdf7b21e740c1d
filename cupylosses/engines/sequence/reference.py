"""Reference formula in the array API, for CPU arrays and for derivatives without a kernel.

    alpha[s] <- log p[t, state s] + log sum of alpha[s], alpha[s - 1] and, between different labels, alpha[s - 2]

over states s = 0 .. 2 S: blanks at even s, labels at odd s. Everything is computed in float64 and rounded once.
Derivatives come from the array library. A state that no path reaches stays at -inf, whatever the log-probability of
its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from cupylosses import interop
from cupylosses.call import Call
from cupylosses.engines.sequence import checks as sequence_checks
from cupylosses.engines.sequence.call import Sizes, Static, arrays_by_name, constant_divisor, sizes_of
from cupylosses.reference_math import detached, divide, float64_scalar, with_derivative_of

#: Log-probabilities of a larger magnitude count as infinite, in formulas and in kernels.
LARGEST = 2.0**26


def evaluate(call: Call, promoted: str, readable: bool) -> Any:
    """Returns the loss of a call. Checks labels and lengths if they are ``readable`` and the call asks for it."""
    static, xp = call.static, interop.namespace(call.arrays[0])
    values, divides = sample_values(xp, call, readable and static.check != "off")
    if static.reduction != "none":
        per_sample = values / divides if static.averages_labels else values
        values = divide(xp, xp.sum(per_sample), divisor(xp, call))
    return xp.astype(values, getattr(xp, static.out_dtype or promoted), copy=False)


def divisor(xp: Any, call: Call) -> Any:
    """Returns the divisor of the sum over samples: a number, or an array without dimensions."""
    arrays = arrays_by_name(call)
    if call.normalizer is not None:
        return call.normalizer
    sizes = sizes_of(call)
    if not call.static.counted:
        return float64_scalar(xp, call.arrays[0], constant_divisor(call.static, sizes.samples))
    return xp.sum(xp.astype(xp.broadcast_to(arrays["mask"], sizes.samples), xp.float64))


def label_counts(xp: Any, call: Call) -> Any:
    """Returns the label counts, at least 1, that `mean` divides losses of samples by, in the shape of the values."""
    sizes, arrays = sizes_of(call), arrays_by_name(call)
    if "target_lengths" not in arrays:
        return max(sizes.labels, 1)
    lengths = xp.astype(arrays["target_lengths"], xp.float64)
    return xp.where(lengths < 1, xp.ones_like(lengths), lengths)


class Samples(NamedTuple):
    """The samples of a call as formulas read them.

    ``x`` is the first operand in float64, frames first, 0 in frames that are not read. ``inside`` is True for frames
    that are read. ``labels`` has a row per sample, with blanks past the end. ``ends`` and ``lengths`` are the numbers
    of frames and of labels, 0 for samples that are not read. ``used`` is False for masked samples and for those of
    weight 0. ``bad`` is True for samples with an invalid label or a length out of range. ``too_long`` is True for
    concatenated targets with more labels than there are frames. ``factor`` is the weight or None. ``divides`` is the
    number of labels that a mean divides by, at least 1.
    """

    x: Any
    inside: Any
    labels: Any
    ends: Any
    lengths: Any
    used: Any
    bad: Any
    too_long: Any
    factor: Any
    divides: Any


def samples(xp: Any, call: Call, report: bool) -> Samples:
    """Returns the samples of a call. With ``report``, raises for labels or lengths that are out of range."""
    loss, static = call.loss, call.static
    sizes, arrays = sizes_of(call), arrays_by_name(call)
    x = _frames_first(xp, static, sizes, arrays[loss.operands[0].name])
    frames, count, classes = x.shape
    kind = {"dtype": xp.int64, **_device(xp, x)}

    def per_sample(name: str, full: int) -> Any:
        if name not in arrays:
            return xp.full((count,), full, **kind)
        return xp.reshape(xp.astype(arrays[name], xp.int64), (count,))

    input_lengths = per_sample("input_lengths", frames)
    target_lengths = per_sample("target_lengths", sizes.labels)
    used = xp.ones((count,), dtype=xp.bool, **_device(xp, x))
    factor: Any = None
    if static.weighted:
        factor = xp.reshape(xp.astype(xp.broadcast_to(arrays["weight"], sizes.samples), xp.float64), (count,))
        used = factor != 0
    if static.masked:
        used = used & xp.reshape(xp.broadcast_to(arrays["mask"], sizes.samples), (count,))
    out = (input_lengths < 0) | (input_lengths > frames) | (target_lengths < 0) | (target_lengths > sizes.labels)
    if static.concatenated:
        groups = xp.reshape(target_lengths, (sizes.groups, sizes.inner))
        uneven = xp.sum(groups, axis=1, keepdims=True) != sizes.labels
        out = out | xp.reshape(xp.broadcast_to(uneven, groups.shape), (count,))
    labels = _padded(xp, static, sizes, arrays["targets"], xp.where(out, xp.zeros_like(target_lengths), target_lengths))
    place = xp.arange(labels.shape[1], **kind)[None, :]
    wrong = (place < target_lengths[:, None]) & ((labels < 0) | (labels >= classes) | (labels == static.blank))
    if report:
        _report(xp, call, sizes, input_lengths, target_lengths, used & out, wrong & (used & ~out)[:, None], labels)
    bad = out | xp.any(wrong, axis=1)
    use = used & ~bad
    zero = xp.zeros_like(target_lengths)
    # Concatenated targets are cut off at the number of frames. A longer one has no alignment.
    too_long = use & (target_lengths > labels.shape[1])
    ends = xp.where(use, input_lengths, zero)
    lengths = xp.where(use & ~too_long, target_lengths, zero)
    labels = xp.where(wrong | ~use[:, None] | (place >= lengths[:, None]), xp.full_like(labels, static.blank), labels)
    inside = xp.arange(frames, **kind)[:, None] < ends[None, :]
    # Replaced before the formula reads them: later, their NaN would already be in the gradient.
    x = xp.where(inside[..., None], x, xp.zeros_like(x))
    divides = xp.astype(xp.where(target_lengths < 1, xp.ones_like(zero), target_lengths), xp.float64)
    return Samples(x, inside, labels, ends, lengths, used, bad, too_long, factor, divides)


def sample_values(xp: Any, call: Call, report: bool) -> tuple[Any, Any]:
    """Returns the weighted float64 loss of each sample, and its number of labels, at least 1, in the values' shape.

    The loss of samples with an invalid label, or with a length out of range, is NaN with a gradient of 0. With
    ``report`` they raise.
    """
    loss: Any = call.loss
    static, sizes, s = call.static, sizes_of(call), samples(xp, call, report)
    values = _losses(xp, loss.logits, static, s.x, s.labels, s.ends, s.lengths, s.inside, s.too_long)
    values = xp.where(s.used & s.bad, xp.full_like(values, float("nan")), values)
    if s.factor is not None:
        values = xp.where(s.used, values, xp.zeros_like(values)) * xp.where(s.used, s.factor, xp.zeros_like(s.factor))
    elif static.masked:
        values = xp.where(s.used, values, xp.zeros_like(values))
    return xp.reshape(values, sizes.samples), xp.reshape(s.divides, sizes.samples)


def _losses(
    xp: Any,
    logits: bool,
    static: Static,
    x: Any,
    labels: Any,
    ends: Any,
    lengths: Any,
    inside: Any,
    too_long: Any,
) -> Any:
    """Returns the loss of each sample. Precondition: labels and lengths are valid."""
    low, high = x < -LARGEST, x > LARGEST
    original, x = x, xp.where(low, xp.full_like(x, -inf), xp.where(high, xp.full_like(x, float("nan")), x))
    log_z = _log_alignments(xp, x, labels, ends, lengths, inside, static.blank)
    impossible = too_long | (log_z == -inf)
    values = xp.where(impossible, xp.zeros_like(log_z), -log_z)
    if logits:
        # Rows past the end are zeros, whose log-sum-exp is left out.
        rows = log_sum(xp, xp.permute_dims(x, (2, 0, 1)))
        rows = xp.where(inside, rows, xp.zeros_like(rows))
        broken = xp.any(xp.isnan(rows), axis=0)
        total = xp.sum(xp.where(impossible[None, :] & ~xp.isnan(rows), xp.zeros_like(rows), rows), axis=0)
        values = values + total
        values = values + detached(xp.where(values < 0, -values, xp.zeros_like(values)))
        impossible = impossible & ~broken
    values = xp.where(impossible, xp.full_like(values, 0.0 if static.zero_infinity else inf), values)
    # A loss that is NaN has a gradient of NaN in all frames that count.
    nan = xp.isnan(detached(values))
    broken = nan[None, :, None] & inside[..., None]
    total = xp.sum(xp.where(broken, original, xp.zeros_like(original)), axis=(0, 2))
    values = xp.where(nan, total * float("nan"), values)
    if static.of_logits:
        fits = inside & ~(impossible | nan)[None, :]
        finite = xp.where(fits[..., None] & xp.isfinite(original), original, xp.full_like(original, -inf))
        probabilities = detached(xp.exp(finite))
        added = xp.sum(probabilities * xp.where(finite == -inf, xp.zeros_like(original), finite), axis=(0, 2))
        values = xp.where(impossible | nan, values, with_derivative_of(values, _finite(xp, values) + added))
    return values + 0.0


def _finite(xp: Any, x: Any) -> Any:
    return xp.where(xp.isfinite(x), x, xp.zeros_like(x))


def _log_alignments(xp: Any, x: Any, labels: Any, ends: Any, lengths: Any, inside: Any, blank: int) -> Any:
    """Returns the logarithm of the sum over the alignments of each sample."""
    states, skips = states_of(xp, labels, lengths, blank)
    s, last = xp.arange(states.shape[1], **_like(xp, labels))[None, :], 2 * lengths[:, None]
    nothing = xp.zeros(states.shape, dtype=x.dtype, **_device(xp, x)) - inf

    def before(alpha: Any, by: int) -> Any:
        return xp.where(s < by, nothing, xp.roll(alpha, by, axis=1))

    alpha = xp.where(s == 0, xp.zeros_like(nothing), nothing)
    for t in range(x.shape[0]):
        terms = [alpha, before(alpha, 1), xp.where(skips, before(alpha, 2), nothing)]
        reached = log_sum(xp, xp.stack(terms))
        emission = xp.take_along_axis(x[t, ...], states, axis=1)
        # A class with log-probability -inf ends a path, even one whose sum is NaN.
        ended = (reached == -inf) | (emission == -inf)
        alpha = xp.where(inside[t, ...][:, None], xp.where(ended, nothing, reached + emission), alpha)
    final = (s == last) | ((s == last - 1) & (last > 0))
    return log_sum(xp, xp.where(final, alpha, nothing).T)


def states_of(xp: Any, labels: Any, lengths: Any, blank: int) -> tuple[Any, Any]:
    """Returns the class of each state, and True for states that a path may enter from two states before."""
    s = xp.arange(2 * labels.shape[1] + 1, **_like(xp, labels))[None, :]
    last = 2 * lengths[:, None]
    padded = xp.concat([labels, xp.full_like(last, blank)], axis=1)
    state_labels = xp.take_along_axis(padded, xp.broadcast_to(s // 2, (labels.shape[0], s.shape[1])), axis=1)
    states = xp.where((s % 2 == 1) & (s < last), state_labels, xp.full_like(state_labels, blank))
    return states, (s > 1) & (states != blank) & (states != xp.roll(states, 2, axis=1))


def log_sum(xp: Any, terms: Any) -> Any:
    """Returns the log-sum-exp along the first axis: -inf, with a gradient of 0, if all terms are -inf."""
    largest = detached(xp.max(terms, axis=0))
    none = largest == -inf
    base = xp.where(none, xp.zeros_like(largest), largest)
    total = xp.sum(xp.exp(terms - base), axis=0)
    return xp.where(none, largest, base + xp.log(xp.where(none, xp.ones_like(total), total)))


def _frames_first(xp: Any, static: Static, sizes: Sizes, x: Any) -> Any:
    """Returns the first operand in float64 as (T, samples of all batches, C)."""
    x = xp.astype(x, xp.float64, copy=False)
    at = static.batches + int(static.batched and static.batch_first)
    x = xp.permute_dims(x, (at, *[d for d in range(x.ndim) if d != at]))
    return xp.reshape(x, (sizes.frames, sizes.every, sizes.classes))


def _padded(xp: Any, static: Static, sizes: Sizes, targets: Any, lengths: Any) -> Any:
    """Returns the targets as int64 of shape (samples, labels).

    Concatenated targets are padded or cut off to at most the number of frames: a longer target has no alignment.
    """
    targets = xp.astype(targets, xp.int64)
    if not static.concatenated:
        return xp.reshape(xp.broadcast_to(targets, (*sizes.samples, sizes.labels)), (sizes.every, sizes.labels))
    groups = xp.reshape(targets, (sizes.groups, sizes.labels))
    most = min(sizes.labels, sizes.frames)
    ends = xp.cumulative_sum(xp.reshape(lengths, (sizes.groups, sizes.inner)), axis=1)
    starts = xp.reshape(ends, (-1,)) - lengths
    at = starts[:, None] + xp.arange(most, **_like(xp, targets))[None, :]
    limit = xp.full_like(at, max(sizes.labels - 1, 0))
    at = xp.where(at > limit, limit, at)
    rows = xp.reshape(at, (sizes.groups, sizes.inner * most))
    if not sizes.labels:
        return xp.reshape(rows, (sizes.every, most))
    return xp.reshape(xp.take_along_axis(groups, rows, axis=1), (sizes.every, most))


def _report(
    xp: Any,
    call: Call,
    sizes: Sizes,
    input_lengths: Any,
    target_lengths: Any,
    out: Any,
    wrong: Any,
    labels: Any,
) -> None:
    """Raises for the first length that is out of range, or else for the first invalid label."""
    loss: Any = call.loss
    if bool(xp.any(out)):
        n = int(xp.argmax(xp.astype(out, xp.int64)))
        if not 0 <= int(input_lengths[n]) <= sizes.frames:
            raise sequence_checks.bad_length(loss, "input_lengths", n, int(input_lengths[n]), sizes.frames)
        if not 0 <= int(target_lengths[n]) <= sizes.labels:
            raise sequence_checks.bad_length(loss, "target_lengths", n, int(target_lengths[n]), sizes.labels)
        group = target_lengths[n - n % sizes.inner : n - n % sizes.inner + sizes.inner]
        raise sequence_checks.bad_length(loss, "sum", n, int(xp.sum(group)), sizes.labels)
    if bool(xp.any(wrong)):
        first = int(xp.argmax(xp.reshape(xp.astype(wrong, xp.int64), (-1,))))
        n, place = divmod(first, labels.shape[1])
        position: Sequence[int] = (n, place)
        if call.static.concatenated:
            position = (int(xp.sum(target_lengths[:n])) + place,)
        elif not call.static.batched:
            position = (place,)
        raise sequence_checks.bad_label(loss, position, int(labels[n, place]), sizes.classes)


def _device(xp: Any, x: Any) -> dict[str, Any]:
    return {"device": x.device} if interop.kind(x) == "torch" else {}


def _like(xp: Any, x: Any) -> dict[str, Any]:
    return {"dtype": x.dtype, **_device(xp, x)}
