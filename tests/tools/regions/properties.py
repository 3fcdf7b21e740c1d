"""Properties of region losses, on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupylosses import functional
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
