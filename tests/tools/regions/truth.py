"""Losses of region overlap in float64, written from their formulas and independent of the library.

:func:`region_loss` has every option of ``tversky_loss``, with its names and defaults. It stores one-hot targets,
probabilities and all sums as whole tensors, and torch differentiates it. :func:`cross_entropy` and :func:`focal` are
the voxels' own losses. None of them knows presets: ``libraries.py`` spells them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as T


class Cells(NamedTuple):
    """Logits or probabilities (N, C, V), targets of that shape, and a mask (N, 1, V) of the voxels that count."""

    values: Tensor
    targets: Tensor
    counted: Tensor


def cells(input: Tensor, target: Tensor, class_dim: int, ignore_index: int, mask: Tensor | None) -> Cells:
    """Returns operands with the classes in dimension 1, voxels in one dimension, and labels as one-hot targets."""
    values = input.double().movedim(class_dim, 1)
    samples, classes, *voxels = values.shape
    counted = torch.ones((samples, 1, *voxels), dtype=torch.bool, device=values.device)
    if target.shape == input.shape and (target.is_floating_point() or classes > 1):
        dense = target.double().movedim(class_dim, 1)
    else:
        labels = target.reshape(samples, 1, *voxels).long()
        counted = labels != ignore_index
        labels = torch.where(counted, labels, 0)
        dense = labels.double() if classes == 1 else torch.zeros_like(values).scatter(1, labels, 1.0)
    if mask is not None:
        counted = counted & mask.bool().reshape(samples, 1, *voxels)
    # Voxels that do not count are replaced, because NaN times 0 is NaN.
    values = torch.where(counted, values, 0.0)
    dense = torch.where(counted, dense, 0.0)
    return Cells(values.flatten(2), dense.flatten(2), counted.flatten(2))


def probabilities(values: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Returns probabilities, and 1 minus them without cancellation."""
    if activation == "softmax":
        p = values.softmax(1)
        others = 1 - torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
        return p, torch.einsum("ij,njv->niv", others, p)
    if activation == "sigmoid":
        return values.sigmoid(), (-values).sigmoid()
    return values, 1 - values


def overlaps(p: Tensor, rest: Tensor, t: Tensor, overlap: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns true positives, false positives and false negatives of every voxel."""
    missing = torch.where(t > 0.5, rest - (1 - t), t - p)  # t - p, without cancellation where t is 1
    zero = torch.zeros_like(p)
    if overlap == "min":
        return torch.minimum(p, t), torch.maximum(-missing, zero), torch.maximum(missing, zero)
    if overlap == "squared":
        return p * t, -p * missing, t * missing
    return p * t, p * (1 - t), rest * t


def inverse_sizes(size: Tensor, weighting: str) -> Tensor:
    """Weights 1 / T or 1 / T², for T = 0 the largest of the other classes."""
    weights = torch.where(size > 0, size, 1.0).pow(-2.0 if weighting == "square" else -1.0)
    largest = torch.where(size > 0, weights, 0.0).amax(1, keepdim=True)
    return torch.where(size > 0, weights, largest)


def power(x: Tensor, exponent: float) -> Tensor:
    """Returns ``x ** exponent``, whose derivative at 0 is 0 unless the exponent is 1."""
    if exponent == 1:
        return x
    return torch.where(x == 0, 0.0, torch.where(x == 0, 1.0, x) ** exponent)


def scores(
    sums: tuple[Tensor, Tensor, Tensor],
    alpha: float,
    beta: float,
    smooth_nr: float,
    smooth_dr: float,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """Returns S and 1 - S of groups, the latter without cancellation."""
    hits, extra, missed = sums
    denominator = hits + alpha * extra + beta * missed + smooth_dr
    free = denominator >= floor
    bounded = torch.where(free, denominator, floor)
    nothing = bounded == 0
    divisor = torch.where(nothing, 1.0, bounded)
    excess = torch.where(free, alpha * extra + beta * missed + (smooth_dr - smooth_nr), bounded - hits - smooth_nr)
    absent = (hits + missed == 0).double()
    return (
        torch.where(nothing, absent, (hits + smooth_nr) / divisor),
        torch.where(nothing, 1 - absent, excess / divisor),
    )


def region_loss(
    input: Tensor,
    target: Tensor,
    alpha: float = 0.5,
    beta: float = 0.5,
    *,
    activation: str = "softmax",
    pool: str = "none",
    overlap: str = "product",
    smooth_nr: float = 0.0,
    smooth_dr: float = 0.0,
    floor: float = 0.0,
    gamma: float = 1.0,
    gamma_over: str = "group",
    log_loss: bool = False,
    log_floor: float = 1e-7,
    offset: float = 1.0,
    absent: str = "skip",
    class_weight: Sequence[float] | None = None,
    weight_in: str = "loss",
    weighting: str = "uniform",
    mean_of_weights: bool = False,
    average: str = "groups",
    empty: float | None = None,
    include_background: bool = True,
    ignore_index: int = -100,
    class_dim: int = 1,
    mask: Tensor | None = None,
    reduction: str = "mean",
    normalizer: float | None = None,
) -> Tensor:
    """Returns the loss of the groups (samples, classes), with size 1 where they are pooled, or its mean or sum."""
    values, t, counted = cells(input, target, class_dim, ignore_index, mask)
    p, rest = probabilities(values, activation)
    parts = [torch.where(counted, x, 0.0).sum(2) for x in overlaps(p, rest, t, overlap)]
    size = (t * t if overlap == "squared" else t).sum(2)  # I + FN, which does not depend on p
    weight = torch.ones(p.shape[1], dtype=p.dtype, device=p.device)
    if class_weight is not None:
        weight = torch.as_tensor(class_weight, dtype=p.dtype, device=p.device)
    if not include_background and p.shape[1] > 1:
        parts, size, weight = [x[:, 1:] for x in parts], size[:, 1:], weight[1:]

    pools_batch, pools_classes = pool in ("batch", "both"), pool in ("class", "both")
    if pools_batch:
        parts, size = [x.sum(0, keepdim=True) for x in parts], size.sum(0, keepdim=True)
    if weighting != "uniform":
        parts = [x * inverse_sizes(size.detach(), weighting) for x in parts]
    if weight_in == "score":
        parts = [x * weight for x in parts]
        weight = torch.ones_like(weight)
    if pools_classes:
        parts, size = [x.sum(1, keepdim=True) for x in parts], size.sum(1, keepdim=True)
        weight = torch.ones_like(weight[:1])

    score, missing = scores((parts[0], parts[1], parts[2]), alpha, beta, smooth_nr, smooth_dr, floor)
    if log_loss:
        low = score < log_floor
        near = -torch.log1p(-torch.where(low, 0.0, missing))
        loss = torch.where(low, -torch.tensor(log_floor, dtype=p.dtype, device=p.device).log(), near)
    else:
        loss = missing + (offset - 1)
    if gamma_over == "group":
        loss = power(loss, gamma)

    present = size > 0
    if absent == "zero":
        loss = torch.where(present, loss, 0.0)
    included = present.double() if absent == "skip" else torch.ones_like(loss)
    loss = torch.where(included > 0, loss, 0.0) * weight
    if reduction == "none":
        return loss
    shares = included * weight if mean_of_weights else included
    if reduction == "sum":
        result = loss.sum()
    elif normalizer is not None:
        result = loss.sum() / normalizer
    elif average == "samples":
        count = shares.sum(1)
        lone = count == 0
        each = torch.where(lone, 0.0 if empty is None else empty, loss.sum(1) / torch.where(lone, 1.0, count))
        result = each.sum() / ((~lone).sum() if empty is None else len(each))
    else:
        result = loss.sum() / shares.sum()
    return power(result, gamma) if gamma_over == "mean" else result


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    weight: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    class_dim: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns the mean cross entropy of the voxels that count, divided by the weights of their labels."""
    values, t, counted = cells(input, target, class_dim, ignore_index, mask)
    classes = values.shape[1]
    w = torch.ones(classes) if weight is None else torch.as_tensor(weight)
    w = w.to(values)[None, :, None]
    costs = -values.log_softmax(1)
    each = (1 - label_smoothing) * (w * t * costs).sum(1) + label_smoothing / classes * (w * costs).sum(1)
    each = torch.where(counted[:, 0], each, 0.0)
    return each.sum() / (w * t).sum()


def focal(
    input: Tensor,
    target: Tensor,
    *,
    gamma: float = 2.0,
    alpha: float | None = None,
    over: str = "sigmoid",
    ignore_index: int = -100,
    class_dim: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns the mean focal loss: of all logits that count by their own sigmoid, or of voxels by the softmax."""
    values, t, counted = cells(input, target, class_dim, ignore_index, mask)
    if over == "softmax":
        _, rest = probabilities(values, "softmax")
        costs = t * rest.pow(gamma) * -values.log_softmax(1)
        each = (costs if alpha is None else alpha * costs).sum(1, keepdim=True)
    else:
        p, rest = probabilities(values, "sigmoid")
        each = (p * (1 - t) + rest * t).pow(gamma) * (t * T.softplus(-values) + (1 - t) * T.softplus(values))
        if alpha is not None:
            each = (alpha * t + (1 - alpha) * (1 - t)) * each
    each = torch.where(counted, each, 0.0)
    return each.sum() / (counted.sum() * each.shape[1])
