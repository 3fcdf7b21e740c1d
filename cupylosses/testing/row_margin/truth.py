"""Truth of losses of rows of scores: sums over pairs in float64, and their derivatives, label by label.

Kernels compute in double and round once, so the size of a result is its absolute value. Only float64 results show the
errors of the arithmetic, which are relative to the scores and the margin.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from cupylosses.testing.tolerance import Expected
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor

#: Share of the arithmetic's errors in a float64 result, and in one that is rounded to fewer bits.
IN_FLOAT64, NARROWER = 1.0, 2.0**-24


class _Rows(NamedTuple):
    """Values of rows, their derivatives with respect to the scores, and the sizes of both."""

    value: Tensor
    size: Tensor
    slopes: Tensor
    sizes: Tensor


def _pairs(x: Tensor, lists: Tensor, margin: float, power: int) -> _Rows:
    """Computes values and derivatives of rows of scores; their lists of labels end at the first number below 0."""
    import torch

    alive = (lists < 0).cumsum(-1) == 0
    labels = torch.where(alive, lists, 0)
    member = torch.zeros_like(x, dtype=torch.bool)
    for k in range(lists.shape[-1]):
        member |= alive[:, k, None] & (labels[:, k, None] == torch.arange(x.shape[-1], device=x.device))
    value, size, slopes, sizes = x.new_zeros(len(x)), x.new_zeros(len(x)), torch.zeros_like(x), torch.zeros_like(x)
    for k in range(lists.shape[-1]):
        label = labels[:, k, None]
        label_score = x.gather(-1, label)
        z = margin + (x - label_score)
        active = alive[:, k, None] & ~member & ~(z <= 0)
        scale = torch.where(active, x.abs() + label_score.abs() + margin, 0)
        hinge = torch.where(active, z, 0)
        slope = active.double() if power == 1 else 2 * hinge
        spread = torch.zeros_like(x) if power == 1 else 2 * scale
        value += (hinge**power).sum(-1)
        size += (scale * (1 if power == 1 else 2 * hinge)).sum(-1)
        slopes += slope
        sizes += spread
        slopes.scatter_add_(-1, label, -slope.sum(-1, keepdim=True))
        sizes.scatter_add_(-1, label, spread.sum(-1, keepdim=True))
    count = x.shape[-1]
    return _Rows(value / count, size / count, slopes / count, sizes / count)


def truth(
    operands: Mapping[str, Tensor], values: Mapping[str, Any], options: Mapping[str, Any], several: bool, upstream: Any
) -> Truth:
    """Computes the truth for operands by name, on their device.

    ``options`` are the reduction, the class dimension and the ignored label.
    """
    import torch

    dim, reduction = options["class_dim"], options["reduction"]
    scores, target = operands["input"].detach(), operands["target"]
    x = scores.double().movedim(dim, -1)
    shape, classes = x.shape[:-1], x.shape[-1]
    lists = (target.movedim(dim, -1) if several else target[..., None]).long()
    lists = lists.reshape(prod(shape), lists.shape[-1])
    used = torch.ones(shape, dtype=torch.bool, device=x.device)
    if not several:
        used = used & (target != options["ignore_index"])
    if "mask" in operands:
        used = used & operands["mask"]
    lists = torch.where(used.reshape(-1, 1), lists, -1)
    rows = _pairs(x.reshape(-1, classes), lists, values["margin"], values.get("p", 1))
    if "weight" in operands:
        weight = operands["weight"].double()[lists[:, 0].clamp(0)]
        rows = _Rows(*[y * (weight if y.dim() == 1 else weight[:, None]) for y in rows])
    share = IN_FLOAT64 if scores.dtype == torch.float64 else NARROWER
    value, size = rows.value.reshape(shape), (rows.value.abs() + share * rows.size.abs()).reshape(shape)
    count = used.sum().double() if not several or "mask" in operands else prod(shape)
    divisor = {"mean": count, "batchmean": shape[0] if shape else 1}.get(reduction, 1)
    if reduction == "none":
        expected = Expected(value, size, size)
    else:
        expected = Expected(value.sum() / divisor, size.square().sum().sqrt() / divisor, size.sum() / divisor)
    factor = torch.as_tensor(upstream, dtype=torch.float64, device=x.device) / divisor
    factor = factor[..., None] if factor.dim() else factor
    slopes = rows.slopes.reshape(x.shape) * factor
    terms = slopes.abs() + share * (rows.sizes.reshape(x.shape) * factor).abs()
    slopes, terms = slopes.movedim(-1, dim), terms.movedim(-1, dim)
    others = (None,) * (len(operands) - 1)
    return Truth(expected, (Expected(slopes, terms, terms), *others))
