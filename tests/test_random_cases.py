"""Random cases of every loss at small sizes: kernels on the host, beside the formula in float64.

They are drawn as those of the section ``random_cases`` of ``scripts/benchmark.py``: losses, shapes, dtypes, layouts and
options. An access outside of memory, a race or a wrong number fails; rounding is for the tests of accuracy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from devices import HOST
from torch import Tensor

from benchmarking import random_cases, workloads
from benchmarking.cases import Case
from benchmarking.draw import Draw
from benchmarking.figures import HVP
from cupylosses.backends.torch import plans
from cupylosses.definition.registry import registry
from cupylosses.jit.gpu import Chip
from cupylosses.testing import host

#: Cases of a test, and of a dimension that counts elements, or another, the largest sizes.
CASES, ELEMENTS, OTHERS = 250, 1 << 14, 300
#: Sizes from which on operands are copied, or kernels chosen, that small cases would not reach.
SIZES = {
    "pointwise.layout": ("ORDERED_ELEMENTS", "SINGLE_ELEMENTS"),
    "regions.engine": (
        "INTERLEAVED_ELEMENTS",
        "SCATTERED_ELEMENTS",
        "SCATTERED_TARGET",
        "SCATTERED_LABELS",
        "SCATTERED_OF_VALUES",
    ),
    "row_statistics.engine": ("SHORT_ELEMENTS", "SPARSE_ELEMENTS"),
}
#: Losses of how a row varies: second derivatives of one element are 0 but for the rounding of terms that cancel.
OF_VARIATION = ("ccc_loss", "pearson_loss")


class SmallDraw(Draw):
    """Shapes that take the host milliseconds."""

    def size(self, low: int, high: int) -> int:
        if high > ELEMENTS:
            low, high = min(low, 64), ELEMENTS
        return super().size(min(low, OTHERS), high if high == ELEMENTS else min(high, OTHERS))


def results(case: Case, operands: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Value, gradients, and product with the Hessian of a case, as its mode has them; of operands in another dtype."""
    own = [x.detach().to(dtype) if dtype and x.is_floating_point() else x.detach() for x in operands]
    wanted = [x.requires_grad_() for x, given in zip(own, operands, strict=True) if given.requires_grad]
    value = case.workload.ours()(*own)
    found = [value]
    if case.mode != "forward":
        found += torch.autograd.grad(value.sum(), wanted, create_graph=case.mode == HVP)
    if case.mode == HVP:
        direction = torch.empty_like(operands[0]).copy_(torch.linspace(-1, 2, operands[0].numel()).view(found[1].shape))
        product = torch.zeros_like(found[1])
        if found[1].requires_grad:
            (product,) = torch.autograd.grad(found[1], wanted[0], direction.to(found[1].dtype))
        found.append(product)
    return [x.detach().double() for x in found]


def difference(found: Tensor, right: Tensor, eps: float) -> float:
    """The largest difference in units of what rounding explains; infinite if just one of them is finite."""
    if ((found.isfinite() != right.isfinite()) & (right.abs() < 6e4)).any():
        return torch.inf
    both = found.isfinite() & right.isfinite()
    allowed = eps * (right.abs() + float(right[both].abs().max() if both.any() else 0.0)) + max(1e-9, eps**2)
    return float(((found - right).abs() / allowed)[both].max()) if both.any() else 0.0


@pytest.mark.thorough
@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
@pytest.mark.parametrize("seed", range(8))
def test_random_cases_agree_with_the_formula(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "DEVICE", "cpu")
    monkeypatch.setattr(random_cases, "Draw", SmallDraw)
    for module, names in SIZES.items() if seed % 2 else ():
        for name in names:
            monkeypatch.setattr(import_module(f"cupylosses.engines.{module}"), name, 1 << 8)
    wrong = []
    for case in random_cases.cases(list(registry().values()), CASES, seed):
        operands = case.operands()
        if case.workload.loss.name in OF_VARIATION and case.mode == HVP and operands[0].shape[-1] == 1:
            continue
        with host.execution() as device:
            device.chip = Chip(99 << 10, clusters=True)
            found = results(case, operands, None)
        before = plans.use_host(None)
        right = results(case, operands, torch.float64)
        plans.use_host(before)
        narrowest = max([x.dtype for x in operands if x.is_floating_point()], key=lambda x: torch.finfo(x).eps)
        eps = {2: 20.0, 4: 400.0, 8: 1e5}[narrowest.itemsize] * torch.finfo(narrowest).eps
        worst = max(difference(a, b, eps) for a, b in zip(found, right, strict=True))
        if not worst <= 1:
            wrong.append(f"{case.title}: {worst:.3g}")
    assert wrong == []
