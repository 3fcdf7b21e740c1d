"""Region losses by torch's operators, as segmentation libraries compute them.

Labels become one-hot, and the losses follow from the sums of p t, p and t.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.testing.eager import Call

if TYPE_CHECKING:
    from torch import Tensor

#: Settings that the operators below do not support, with the values that they must have.
PLAIN: Mapping[str, Any] = {
    "overlap": "product",
    "gamma_over": "group",
    "log_loss": False,
    "weight_in": "loss",
    "mean_of_weights": False,
    "average": "groups",
    "label_smoothing": 0.0,
    "floor": 0.0,
}


def twin(loss: RegionLoss, values: Mapping[str, Any], reduction: str, dim: int, ignored: int | None) -> Call | None:
    """Returns torch's way to compute a loss with these settings; None if the operators do not support them.

    ``ignored`` is a label that occurs but does not count. The returned function also takes class weights, for classes
    that are not pooled, and a mask.
    """
    known = {**values, **loss.fixed}
    if any(known.get(x, y) != y for x, y in PLAIN.items()) or reduction != "mean" or ignored is not None:
        return None
    if loss.has_voxels and known["activation"] == "none":
        return None

    def call(input: Tensor, target: Tensor, class_weight: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        import torch

        x = input if dim == 1 else input.movedim(dim, 1)
        # In 16 bits, sums of thousands of numbers would have no correct digits.
        wide = x if x.dtype.itemsize > 2 else x.float()
        dense = target.dim() == input.dim()
        if dense:
            t = target.to(wide.dtype) if dim == 1 else target.movedim(dim, 1).to(wide.dtype)
        else:
            t = torch.nn.functional.one_hot(target.long(), x.shape[1]).movedim(-1, 1).to(wide.dtype)
        value = _of_regions(wide, t, known, class_weight, mask)
        if loss.has_voxels:
            of_voxels = _of_voxels(loss, wide, t if dense else target.long(), t, known, mask)
            first, second = (known[name] for name in loss.share)
            value = first * value + second * of_voxels
        return value.to(torch.promote_types(input.dtype, target.dtype) if dense else input.dtype)

    return call


def _of_regions(
    x: Tensor, t: Tensor, known: Mapping[str, Any], class_weight: Tensor | None, mask: Tensor | None
) -> Tensor:
    import torch

    p = {"softmax": lambda: x.softmax(1), "sigmoid": x.sigmoid, "none": lambda: x}[known["activation"]]()
    if not known["include_background"]:
        p, t = p[:, 1:], t[:, 1:]
        class_weight = None if class_weight is None else class_weight[1:]
    if mask is not None:
        p, t = p * mask[:, None], t * mask[:, None]
    spatial = list(range(2, x.dim()))
    axes = ([0] if known["pool"] in ("batch", "both") else []) + spatial

    def pooled(y: Tensor) -> Tensor:
        return y.sum(axes, keepdim=True) if axes else y

    hits, of_p, of_t = pooled(p * t), pooled(p), pooled(t)
    if known["pool"] in ("class", "both"):
        if known["weighting"] != "uniform":
            weight = 1 / (of_t * of_t if known["weighting"] == "square" else of_t)
            infinite = weight.isinf()
            weight = weight.masked_fill(infinite, 0.0)
            weight = torch.where(infinite, weight.amax(1, keepdim=True), weight)
            hits, of_p, of_t = hits * weight, of_p * weight, of_t * weight
        hits, of_p, of_t = (y.sum(1, keepdim=True) for y in (hits, of_p, of_t))
    alpha, beta = known["alpha"], known["beta"]
    below = hits + alpha * (of_p - hits) + beta * (of_t - hits) + known["smooth_dr"]
    losses = known["offset"] - (hits + known["smooth_nr"]) / below
    if known["gamma"] != 1.0:
        losses = losses.clamp(min=0) ** known["gamma"]
    if class_weight is not None:
        losses = losses * class_weight.view(1, -1, *[1] * len(spatial))
    present = of_t > 0
    if known["absent"] == "skip":
        return torch.where(present, losses, 0.0).sum() / present.sum()
    return (losses if known["absent"] == "keep" else losses * present).mean()


def _of_voxels(
    loss: RegionLoss, x: Tensor, target: Tensor, t: Tensor, known: Mapping[str, Any], mask: Tensor | None
) -> Tensor:
    import torch.nn.functional as F

    softmax = known[loss.chosen_by] == "softmax"
    if mask is None and "gamma_focal" not in known:
        return F.cross_entropy(x, target) if softmax else F.binary_cross_entropy_with_logits(x, t)
    if softmax:
        cost = F.cross_entropy(x, target, reduction="none")
    else:
        cost = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    if "gamma_focal" in known:
        gamma, alpha = known["gamma_focal"], known["alpha_focal"]
        if softmax:
            cost = (1 - (-cost).exp()) ** gamma * cost
        else:
            p = x.sigmoid()
            miss = p * (1 - t) + (1 - p) * t
            if alpha >= 0:
                cost = cost * (alpha * t + (1 - alpha) * (1 - t))
            cost = miss**gamma * cost
    if mask is None:
        return cost.mean()
    kept = mask if softmax else mask[:, None].expand(cost.shape)
    return (cost * kept).sum() / kept.sum()
