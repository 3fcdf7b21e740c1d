"""Properties of region losses, on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from cupylosses import functional
from cupylosses.engines.regions.plan import RegionPlan
from cupylosses.testing.check import perform
from cupylosses.testing.regions.check import RegionCheck


def agrees_with_truth(name: str, layout: str, *dtypes: str, reduction: str = "mean", **case: Any) -> None:
    """Value and gradients match the formula in float64."""
    loss = getattr(functional, name).loss
    check = RegionCheck(loss, case, dtypes or ("float64",), reduction, layout)
    assert perform(check).problems == ()
    if not loss.has_voxels and check.laid.shape[1] < 5:
        # Another sample, whose sums differ.
        assert perform(replace(check, seed=1)).problems == ()


def leaves_voxels_out() -> None:
    """Voxels with an ignored label, which may be a class, and masked voxels are left out, whatever they hold."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, 40, generator=generator, dtype=torch.float64)
    y = torch.arange(40)[None] % 3
    mask = torch.arange(40)[None] % 4 != 1
    kept = mask & (y != 1)
    right = functional.dice_loss(x[..., kept[0]], y[kept][None])
    x[:, :, ~kept[0]] = float("nan")
    found = functional.dice_loss(x, y, ignore_index=1, mask=mask)
    assert abs(float(found) - float(right)) < 1e-14


def leaves_absent_classes_out() -> None:
    """A class without a voxel is neither in the sum nor in its divisor."""
    x = torch.randn(1, 3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(40)[None] % 2
    each = functional.dice_loss(x, y, reduction="none")
    mean = functional.dice_loss(x, y)
    assert float(each[0, 2]) == 0.0 and abs(float(mean) - float(each.sum()) / 2) < 1e-14


def keeps_the_digits_of_confident_voxels() -> None:
    """Nearly perfect logits have the same loss in float32 as in float64."""
    x = torch.tensor([0.0, 20.0]).reshape(1, 2, 1).repeat(1, 1, 96)
    y = torch.ones(1, 96, dtype=torch.int64)
    found, exact = (float(functional.dice_loss(z, y, out_dtype="float64")) for z in (x, x.double()))
    assert 0 < exact < 2e-9 and abs(found / exact - 1) < 1e-5


def moves_vectors_by_warps() -> None:
    """Adjacent classes, whose vectors pass through shared memory, have bit-equal results to classes stored apart."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(1, 5, 40, 60, generator=generator), torch.randint(5, (1, 40, 60), generator=generator)
    found = []
    with mock.patch.object(RegionPlan, "by_warps", True):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            leaf = x.clone(memory_format=memory_format).requires_grad_()
            value = functional.dice_loss(leaf, y)
            found.append((value.detach(), *torch.autograd.grad(value, leaf)))
    assert all(map(torch.equal, *found))


def second_agrees_with_differences() -> None:
    """A product with the second derivatives agrees with central differences of gradients."""
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(2, 3, 701, generator=generator, dtype=torch.float64) for _ in range(2))
    y = torch.arange(1402).reshape(2, 701) % 3

    def slope(z: torch.Tensor, again: bool = False) -> torch.Tensor:
        z = z.detach().requires_grad_()
        value = functional.dice_ce_loss(z, y, gamma=1.5, smooth_dr=20.0)
        (found,) = torch.autograd.grad(value, z, create_graph=again)
        return torch.autograd.grad(found, z, v)[0] if again else found

    expected = (slope(x + 1e-5 * v) - slope(x - 1e-5 * v)) / 2e-5
    torch.testing.assert_close(slope(x, True), expected, rtol=1e-6, atol=1e-7 * float(expected.abs().max()))
