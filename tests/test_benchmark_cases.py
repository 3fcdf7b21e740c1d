"""Results of the cases that ``scripts/benchmark.py`` times: kernels against torch operations in float64.

The random cases are drawn like those of its section ``random_cases``, at small sizes: losses, shapes, dtypes, layouts
and options. On a GPU, the cases of its section ``cliffs`` run as they are timed; on the host, with fewer rows and
pixels. An access out of bounds, a race or a wrong number fails; the accuracy tests cover rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from math import prod
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from devices import HOST, LARGE_BYTES
from torch import Tensor

from benchmarking import cliffs, random_cases, workloads
from benchmarking.cases import Case
from benchmarking.draw import Draw
from benchmarking.figures import HVP
from benchmarking.linear_softmax import LinearSoftmaxWorkload
from benchmarking.pointwise import PointwiseWorkload
from benchmarking.sequence import SequenceWorkload
from cupylosses.definition.registry import registry
from cupylosses.jit.gpu import Chip
from cupylosses.testing import host
from cupylosses.testing.eager import Call

#: Number of cases per test; largest size of a dimension that counts elements, and of any other dimension.
CASES, ELEMENTS, OTHERS = 250, 1 << 14, 300
#: By module: thresholds above which operands are copied or another kernel is chosen. Small cases would not reach them.
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
#: Maximum number of elements of an operand of the grid's cases on the host: if rows can be dropped, and otherwise.
FEW_ELEMENTS, MANY_ELEMENTS = 1 << 16, 1 << 20
#: Number of values that torch keeps per element of the operands: in its own losses, and in formulas of many
#: operations (that of ``general_robust_loss`` keeps more than 200).
KEPT, KEPT_BY_FORMULAS = 12, 250
#: Number of tests that the grid's cases are divided among.
PARTS = 16
#: Number of processors and limits of two GPUs: a small one with clusters, and an H200.
SMALL_GPU, H200 = (2, Chip(99 << 10, clusters=True)), (132, Chip(227 << 10, clusters=True))
#: Estimates the size of the terms that a result sums from the result's own numbers: their maximum or their median.
Scale = Callable[[Tensor], Tensor]
#: Losses of a row's variation. For rows of one element, second derivatives are 0 except for rounding of terms that
#: cancel.
OF_VARIATION = ("ccc_loss", "pearson_loss")


class SmallDraw(Draw):
    """Draws shapes that the host computes in milliseconds."""

    def size(self, low: int, high: int) -> int:
        if high > ELEMENTS:
            low, high = min(low, 64), ELEMENTS
        return super().size(min(low, OTHERS), high if high == ELEMENTS else min(high, OTHERS))


def results(case: Case, call: Call, operands: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Value, gradients and Hessian-vector product of a call, as far as the case's mode has them.

    With ``dtype``, the operands are contiguous copies in that dtype, since some of torch's functions accept no others.
    """
    own = [x.detach() for x in operands]
    if dtype:
        own = [x.to(dtype if x.is_floating_point() else x.dtype).contiguous() for x in own]
    wanted = [x.requires_grad_() for x, given in zip(own, operands, strict=True) if given.requires_grad]
    value = call(*own)
    found = [value]
    if case.mode != "forward":
        found += torch.autograd.grad(value.sum(), wanted, create_graph=case.mode == HVP)
    if case.mode == HVP:
        direction = torch.empty_like(operands[0]).copy_(torch.linspace(-1, 2, operands[0].numel()).view(found[1].shape))
        product = torch.zeros_like(found[1])
        if found[1].requires_grad:
            (product,) = torch.autograd.grad(found[1], wanted[0], direction.to(found[1].dtype))
        found.append(product)
    return [x.detach() for x in found]


def resolution(operands: Sequence[Tensor]) -> float:
    """Relative difference that rounding to the narrowest floating dtype among the operands explains."""
    narrowest = max([x.dtype for x in operands if x.is_floating_point()], key=lambda x: torch.finfo(x).eps)
    return {2: 20.0, 4: 400.0, 8: 1e5}[narrowest.itemsize] * torch.finfo(narrowest).eps


def difference(found: Tensor, right: Tensor, eps: float, scale: Scale) -> float:
    """Largest difference as a multiple of what rounding explains; infinite if only one of two numbers is finite.

    Rounding explains ``eps`` times the sum of a number and the ``scale`` of all of them.
    """
    # Spacing of float16's smallest numbers, and residue in float64 of terms near 1 that cancel.
    least = 2.0**-24 if found.dtype == torch.float16 else 1e-12
    found, finite = found.double(), right.isfinite()
    if ((found.isfinite() != finite) & (right.abs() < 6e4)).any():
        return torch.inf
    finite &= found.isfinite()
    if not finite.any():
        return 0.0
    allowed = eps * (right.abs() + scale(right[finite].abs())) + least
    return float(((found - right).abs() / allowed)[finite].max())


def median(numbers: Tensor) -> Tensor:
    """Median of at most ``MANY_ELEMENTS`` of the numbers, evenly spaced."""
    return numbers[:: 1 + numbers.numel() // MANY_ELEMENTS].median()


def test_one_wrong_number_is_noticed_among_larger_ones() -> None:
    right = torch.full((1 << 10,), 1e-9, dtype=torch.float64)
    right[0] = 1.0
    eps = resolution([right.bfloat16()])
    assert difference(right.bfloat16(), right, eps, median) < 0.1
    for wrong in (0.0, -1e-9, 2e-9, torch.nan):
        found = right.bfloat16()
        found[-1] = wrong
        assert difference(found, right, eps, median) > 1


def shorter(size: int, most: int) -> int:
    """Largest size up to ``most`` that equals ``size`` modulo 32, but at least 3.

    Sizes that are equal modulo 32 keep the alignment of rows.
    """
    return size if size <= most else max(3, most - (most - size) % 32)


def shortened(case: Case, few: int = FEW_ELEMENTS, many: int = MANY_ELEMENTS) -> Case:
    """The case with fewer rows and smaller images, so that an operand has at most ``few`` elements.

    The number of classes and features stays the same, unless an operand would still have more than ``many`` elements.
    """
    shapes = [list(x) for x in case.workload.shapes]
    first = shapes[0]
    broadcast = isinstance(case.workload, PointwiseWorkload)
    for d, limit, least in (
        (0, few, 1), *((d, few, 32) for d in range(2, len(first))), (1, many, 32)
    ):  # fmt: skip
        elements = max(map(prod, shapes))
        if d >= len(first) or elements <= limit:
            continue
        before, first[d] = first[d], shorter(first[d], max(least, limit * first[d] // elements))
        for x in shapes[1:]:
            # Labels have no class dimension.
            at = d + len(x) - len(first) if broadcast or d > 1 else d
            if 0 <= at < len(x) and x[at] == before:
                x[at] = first[d]
    return replace(case, workload=replace(case.workload, shapes=tuple(map(tuple, shapes))))


def differences(case: Case, execution: AbstractContextManager[object], against: Call) -> float:
    """Largest `difference` between a case's results and those of ``against`` in float64."""
    operands = case.operands()
    with execution:
        found = results(case, case.workload.ours(), operands)
    right, eps = results(case, against, operands, torch.float64), resolution(operands)
    return max(
        difference(a, b, eps, torch.max if cancels(case, i) else median)
        for i, (a, b) in enumerate(zip(found, right, strict=True))
    )


def cancels(case: Case, i: int) -> bool:
    """True if result ``i`` of a case has numbers that are small because the terms of a sum cancel.

    These are products with a Hessian, gradients of linear layers, which are products of matrices, and gradients of
    sequences, which are differences of probabilities.
    """
    if isinstance(case.workload, LinearSoftmaxWorkload | SequenceWorkload):
        return i > 0
    return i > 1 and case.mode == HVP


@contextmanager
def on_the_host(processors: int, chip: Chip) -> Iterator[None]:
    """Runs kernels on the host, chosen as for a GPU with these processors and limits."""
    with host.execution(processors) as device:
        device.chip = chip
        yield


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
        if case.workload.loss.name in OF_VARIATION and case.mode == HVP and case.workload.shape[-1] == 1:
            continue
        worst = differences(case, on_the_host(*SMALL_GPU), case.workload.ours())
        if not worst <= 1:
            wrong.append(f"{case.title}: {worst:.3g}")
    assert wrong == []


@pytest.mark.thorough
@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
@pytest.mark.parametrize("part", range(PARTS))
def test_cases_of_the_grid_agree_with_torch(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "DEVICE", "cpu")
    wrong = []
    for case in cliffs.cases()[part::PARTS]:
        few = shortened(case)
        # torch's second derivatives follow other conventions at kinks.
        worst = differences(few, on_the_host(*H200), few.workload.ours() if few.mode == HVP else few.eager())
        if not worst <= 1:
            wrong.append(f"{case.title}: {worst:.3g}")
    assert wrong == []


@pytest.mark.thorough
@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("part", range(PARTS))
def test_cases_of_the_grid_agree_with_torch_as_they_are_timed(part: int) -> None:
    wrong = []
    for case in cliffs.cases()[part::PARTS]:
        if case.mode == HVP:
            continue
        kept = KEPT if case.workload.torchs() else KEPT_BY_FORMULAS
        most = LARGE_BYTES // (8 * kept * len(case.workload.shapes))
        case = shortened(case, most, most)
        worst = differences(case, nullcontext(), case.eager())
        torch.cuda.empty_cache()
        if not worst <= 1:
            wrong.append(f"{case.title}: {worst:.3g}")
    assert wrong == []
