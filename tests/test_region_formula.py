"""Random combinations of all options of region losses, against a reference that shares no code with the library."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from grids import short_or_full
from tools.regions.truth import region_loss
from torch import Tensor

from cupylosses import functional as F


class Drawn(NamedTuple):
    """A call in float64: logits or probabilities, a target, and options that do not exclude each other."""

    input: Tensor
    target: Tensor
    options: dict[str, Any]


def draw(seed: int) -> Drawn:
    choose, torch_seed = random.Random(seed), torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=torch_seed, dtype=torch.float64)

    samples, classes = choose.choice((1, 2, 4)), choose.choice((1, 2, 3, 5))
    voxels = choose.choice(((7,), (3, 4), (2, 3, 4)))
    options: dict[str, Any] = {
        "alpha": choose.choice((0.0, 0.3, 0.5, 1.0)),
        "beta": choose.choice((0.5, 0.7, 1.0)),
        "activation": choose.choice(("sigmoid", "none", "softmax") if classes > 1 else ("sigmoid", "none")),
        "pool": choose.choice(("none", "batch", "class", "both")),
        "overlap": choose.choice(("product", "min", "squared")),
        "smooth_nr": choose.choice((0.0, 1e-3, 0.5)),
        "smooth_dr": choose.choice((0.5, 0.75)),  # not below smooth_nr, so a loss raised to a power is not negative
        "floor": choose.choice((0.0, 1e-7, 3.0)),
        "absent": choose.choice(("skip", "zero", "keep")),
        "include_background": classes == 1 or choose.random() < 0.7,
        "reduction": choose.choice(("mean", "mean", "mean", "sum", "none")),
    }
    if choose.random() < 0.3:
        options |= {"log_loss": True, "log_floor": choose.choice((1e-7, 0.3))}
    pools_classes, mean = options["pool"] in ("class", "both"), options["reduction"] == "mean"
    if options["overlap"] != "squared" and choose.random() < 0.5:
        over = choose.choice(("group", "mean")) if mean else "group"
        options |= {"gamma": choose.choice((0.75, 1.5)), "gamma_over": over}
    if choose.random() < 0.4:
        place = "score" if pools_classes else choose.choice(("loss", "score"))
        options |= {"class_weight": 0.2 + uniform(classes), "weight_in": place}
        options["mean_of_weights"] = choose.random() < 0.5
    if pools_classes and choose.random() < 0.5:
        options["weighting"] = choose.choice(("square", "simple"))
    if mean and choose.random() < 0.2:
        options["normalizer"] = 7.0
    elif mean and options["pool"] in ("none", "class") and choose.random() < 0.5:
        options |= {"average": "samples", "empty": choose.choice((None, 0.25))}
    if choose.random() < 0.3:
        options["mask"] = uniform(samples, *voxels) < 0.7

    x = choose.choice((1, 20)) * (2 * uniform(samples, classes, *voxels) - 1)
    if options["activation"] == "none":
        x = x.sigmoid()
    kind = choose.choice(("labels", "with a class dimension", "values", "soft") if classes > 1 else ("values", "soft"))
    if kind == "soft":
        target = uniform(samples, classes, *voxels)
        if options["activation"] == "none":  # some equal values: overlap "min" has a kink there
            target = torch.where(target < 0.3, x, target)
    elif kind == "values":
        target = (uniform(samples, classes, *voxels) < 0.4).double()
    else:
        target = (uniform(samples, *voxels) * choose.choice((1, classes))).long()  # or the first class only
        target[uniform(samples, *voxels) < choose.choice((0.0, 0.3))] = -100
        if choose.random() < 0.2:
            target[0] = -100
        if kind == "with a class dimension":
            target = target[:, None].to(torch.int32)
    return Drawn(x, target, options)


@pytest.mark.parametrize("seed", range(short_or_full(80, 2000)))
def test_options_are_the_formula(seed: int) -> None:
    x, target, options = draw(seed)
    results = []
    for function in (F.tversky_loss, region_loss):
        leaves = [x.clone().requires_grad_()]
        if target.is_floating_point():
            leaves.append(target.clone().requires_grad_())
        value = function(leaves[0], leaves[-1] if len(leaves) > 1 else target, **options)
        slopes = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
        results.append((value.detach().flatten(), *slopes))
    for found, right in zip(*results, strict=True):
        scale = right.nan_to_num().abs().max().item() if right.numel() else 0.0
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-11 * (1 + scale), equal_nan=True)
