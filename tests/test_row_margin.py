"""Margin losses of rows of scores: exact cases, kernels against float64 formulas, transforms, graphs, arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, nan
from typing import Any

import numpy
import pytest
import torch
from devices import HOST, KERNELS
from grids import in_turn, short_or_full
from tools import cupy_stand_in as stand_in

import cupylosses
from cupylosses import functional as F
from cupylosses import nn
from cupylosses.backends.torch import formulas, plans
from cupylosses.engines.row_margin import layout as margin_layout
from cupylosses.engines.softmax.layout import RowStrides
from cupylosses.jit.gpu import Chip
from cupylosses.testing import host
from cupylosses.testing.check import Check, perform
from cupylosses.testing.row_margin.check import LAYOUTS
from cupylosses.testing.tolerance import same_bits

ONE, LISTS = F.multi_margin_loss, F.multilabel_margin_loss
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def drawn(function: Any, rows: int, classes: int, dtype: torch.dtype = f64, labels: int = 0, longest: int = 3) -> Any:
    """Draws scores, and labels (the first one ignored) or lists of labels with arbitrary numbers after their ends."""
    generator = torch.Generator().manual_seed(rows + classes)
    scores = torch.randn(rows, classes, generator=generator, dtype=torch.float64).to(dtype)
    if function is ONE:
        target = torch.randint(classes, (rows,), generator=generator)
        target[0] = -100
        return scores.to(KERNELS), target.to(KERNELS)
    labels = labels or classes
    target = torch.randint(-3, classes + 3, (rows, labels), generator=generator)
    for row, length in enumerate(torch.randint(longest + 1, (rows,), generator=generator).tolist()):
        length = min(length if row else longest, labels)
        target[row, :length] = torch.randint(classes, (length,), generator=generator)
        target[row, length : length + 1] = -1
    return scores.to(KERNELS), target.to(KERNELS)


def gradients(
    function: Callable[..., Any], operands: Sequence[torch.Tensor], scale: float = 1.0, **options: Any
) -> list[torch.Tensor]:
    """Returns the value, and the gradient with respect to the scores."""
    scores = operands[0].detach().requires_grad_()
    value = function(scores, operands[1], **options)
    upstream = torch.linspace(0.5, 2, max(1, value.numel()), dtype=value.dtype, device=value.device)
    upstream = scale * upstream[: value.numel()].reshape(value.shape)
    return [value.detach(), *torch.autograd.grad(value, scores, upstream)]


def exact(function: Callable[..., Any], operands: Sequence[torch.Tensor], scale: float = 1.0, **options: Any) -> Any:
    """Returns the results of the formula in float64 on the CPU."""
    wide = {k: x.cpu() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    before = plans.use_host(None)
    try:
        return gradients(function, (operands[0].cpu().double(), operands[1].cpu()), scale, **wide)
    finally:
        plans.use_host(before)


def agree(function: Callable[..., Any], operands: Sequence[torch.Tensor], **options: Any) -> None:
    """Asserts that kernels give the value and gradients of the formula."""
    for a, b in zip(gradients(function, operands, **options), exact(function, operands, **options), strict=True):
        tolerance = 2e-12 if a.dtype == f64 else 2 * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a.cpu().double(), b, rtol=tolerance, atol=tolerance / 4, equal_nan=True)


# ----------------------------------------------------------------------------------------------------------------------
# Exact cases

X = (0.1, 0.2, 0.4, 0.8)
W = torch.tensor([1.0, 0.5, 2.0, 3.0])

#: Loss, dtype, scores, labels, options, value and gradient.
CASES: Sequence[tuple[Any, ...]] = (
    (ONE, f64, X, 3, {}, 0.325, (0.25, 0.25, 0.25, -0.75)),
    (ONE, f64, X, 1, {}, 0.925, (0.25, -0.75, 0.25, 0.25)),
    (ONE, f64, X, 1, {"p": 2}, 1.2025, (0.45, -1.85, 0.6, 0.8)),
    (ONE, f64, X, 1, {"p": 2, "margin": 0.3}, 0.275, (0.1, -0.8, 0.25, 0.45)),
    (ONE, f64, X, 1, {"weight": W}, 0.4625, (0.125, -0.375, 0.125, 0.125)),
    (ONE, f64, X, 1, {"weight": W, "p": 2}, 0.60125, (0.225, -0.925, 0.3, 0.4)),
    (
        ONE, f64, (X, X), (1, 3), {"weight": W, "reduction": "mean"}, 0.71875,
        ((0.0625, -0.1875, 0.0625, 0.0625), (0.375, 0.375, 0.375, -1.125)),
    ),
    (ONE, f64, (1.0, 0.0), 0, {}, 0.0, (0.0, 0.0)),
    (ONE, f32, (1e8, 1e8), 0, {}, 0.5, (-0.5, 0.5)),
    (ONE, f64, (0.5, nan, 0.2), 0, {}, nan, (nan, nan, nan)),
    (ONE, f64, (nan, 0.5, 0.2), 0, {}, nan, (nan, nan, nan)),
    (ONE, f64, X, -100, {}, 0.0, (0.0,) * 4),
    (ONE, f64, (nan, 1.0), -100, {}, 0.0, (0.0, 0.0)),
    (ONE, f64, (0.5, -inf, 0.7), 0, {}, 0.4, (-1 / 3, 0.0, 1 / 3)),
    (ONE, f64, (nan, 1.0, -inf, inf), 1, {"weight": torch.tensor([1.0, 0.0, 1.0, 1.0])}, 0.0, (0.0,) * 4),
    (ONE, f64, (-inf, 1.0), 0, {}, inf, (-0.5, 0.5)),
    (ONE, f64, (inf, inf), 0, {}, nan, (nan, nan)),
    (ONE, f64, (3.0,), 0, {}, 0.0, (0.0,)),
    (LISTS, f64, X, (3, 0, -1, 1), {}, 0.85, (-0.5, 0.5, 0.5, -0.5)),
    (LISTS, f64, X, (3, 3, -1, 1), {}, 0.65, (0.5, 0.5, 0.5, -1.5)),
    (LISTS, f64, X, (3, -1, -1, 1), {}, 0.325, (0.25, 0.25, 0.25, -0.75)),
    (LISTS, f64, X, (3, -1, 77, -7), {}, 0.325, (0.25, 0.25, 0.25, -0.75)),
    (LISTS, f64, X, (-1, 0, 1, 2), {}, 0.0, (0.0,) * 4),
    (LISTS, f64, (nan, inf, 1.0, 2.0), (-1, 0, 1, 2), {}, 0.0, (0.0,) * 4),
    (LISTS, f64, X, (0, 1, 2, 3), {}, 0.0, (0.0,) * 4),
    (LISTS, f64, (nan, 1.0), (1, 0), {}, 0.0, (0.0, 0.0)),
    (LISTS, f64, (1.0, 0.0), (0, -1), {}, 0.0, (0.0, 0.0)),
    (LISTS, f64, (1.0, nan), (0, -1), {}, nan, (nan, nan)),
    (LISTS, f64, (nan, 1.0), (0, -1), {}, nan, (nan, nan)),
    (LISTS, f64, (-inf, 1.0, 2.0), (0, -1, -1), {}, inf, (-2 / 3, 1 / 3, 1 / 3)),
    (LISTS, f64, (0.5, -inf, 0.7), (0, -1, -1), {}, 0.4, (-1 / 3, 0.0, 1 / 3)),
    (LISTS, f32, (1e8, 1e8), (0, -1), {}, 0.5, (-0.5, 0.5)),
    (LISTS, f32, (1.0, 0.0, -0.0, 2.0), (0, -1), {}, 0.5, (-0.25, 0.0, 0.0, 0.25)),
    (LISTS, f32, (3e38, 3e38, -3e38, -3e38), (0, -1), {}, 0.25, (-0.25, 0.25, 0.0, 0.0)),
    (LISTS, f64, X, (3,), {"margin": 0.5}, 0.025, (0.0, 0.0, 0.25, -0.25)),
)  # fmt: skip


@pytest.mark.plain
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "dtype", "scores", "labels", "options", "value", "slopes"),
    CASES,
    ids=[f"{x[0].__name__}-{i}" for i, x in enumerate(CASES)],
)
def test_exact_values(
    function: Any, dtype: Any, scores: Any, labels: Any, options: Mapping[str, Any], value: float, slopes: Any
) -> None:
    operands = torch.tensor(scores, dtype=dtype, device=KERNELS), torch.tensor(labels, device=KERNELS)
    given = {k: x.to(KERNELS) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    arguments = {"reduction": "none", **given}
    for found in (gradients(function, operands, 2.0, **arguments), exact(function, operands, 2.0, **arguments)):
        for a, b in zip(found, (value, slopes), strict=True):
            expected = torch.tensor(b, dtype=f64)
            torch.testing.assert_close(a.cpu().double(), expected, rtol=1e-14, atol=1e-15, equal_nan=True)


# ----------------------------------------------------------------------------------------------------------------------
# Kernels against formulas


@pytest.mark.kernels
@pytest.mark.parametrize(("function", "dtype"), in_turn([ONE, LISTS], [f16, bf16, f32, f64]))
def test_dtypes(function: Any, dtype: torch.dtype) -> None:
    agree(function, drawn(function, 9, 130, dtype))


#: Numbers of rows and classes: rows that subwarps, warps and blocks share, with and without edge elements.
SIZES = [(70, 3), (9, 130), (5, 133), (3, 1100), (2, 4203)]


@pytest.mark.kernels
@pytest.mark.parametrize(("size", "reduction"), in_turn(SIZES, ["mean", "none"]))
def test_lengths(size: tuple[int, int], reduction: str) -> None:
    agree(ONE, drawn(ONE, *size, f32), reduction=reduction, p=1 if reduction == "mean" else 2)
    agree(LISTS, drawn(LISTS, *size, f32, labels=20, longest=20), reduction=reduction)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("rows", "classes", "ties"),
    [(3, 133, False), (2, 1103, True), *short_or_full([], [(3, 133, True), (2, 1103, False)])],
)
def test_long_lists(rows: int, classes: int, ties: bool, monkeypatch: pytest.MonkeyPatch, fresh_plans: Any) -> None:
    """Covers lists that are sorted on chip, lists that do not fit there, and equal scores."""
    scores, target = drawn(LISTS, rows, classes, f32, longest=classes - 30)
    scores = (2 * scores).round() / 2 if ties else scores
    agree(LISTS, (scores, target), reduction="none")
    sorted_ones = gradients(LISTS, (scores, target), reduction="none")
    monkeypatch.setattr(margin_layout, "MAX_SORTED", 40)
    monkeypatch.setattr(margin_layout, "WARP_CLASSES", 40)
    fresh_plans()
    for a, b in zip(sorted_ones, gradients(LISTS, (scores, target), reduction="none"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.kernels
def test_warps_leave_rows_of_long_lists_to_their_block(monkeypatch: pytest.MonkeyPatch, fresh_plans: Any) -> None:
    monkeypatch.setattr(margin_layout, "MANY_LISTS", 0)
    scores, target = drawn(LISTS, 9, 517, f32, labels=70, longest=60)
    target[1:3, 0] = -1
    target[3, :3] = torch.tensor([5, 5, -1])
    target[4, :2] = torch.tensor([7, -1])
    # If the score of a label is not finite, the block processes even a short list.
    scores[4, 7] = inf
    agree(LISTS, (scores, target))


@pytest.mark.kernels
def test_long_lists_of_infinite_scores() -> None:
    """Labels or other classes have NaN and infinite scores, in rows whose lists would otherwise be sorted."""
    scores, target = drawn(LISTS, 6, 133, f32, longest=90)
    target[1:] = target[0]
    label, other = int(target[0, 50]), next(c for c in range(133) if c not in target[0, :90].tolist())
    scores[1, label], scores[2, label] = -inf, inf
    scores[3, other], scores[4, other], scores[5, label] = -inf, inf, nan
    agree(LISTS, (scores, target), reduction="none")


@pytest.mark.kernels
@pytest.mark.parametrize(("function", "layout"), short_or_full(
    [(ONE, "subwarp"), (ONE, "apart"), (LISTS, "block")], [(f, x) for f in (ONE, LISTS) for x in LAYOUTS]
))  # fmt: skip
def test_checks(function: Any, layout: str) -> None:
    """Runs the checks of `scripts/compare.py` in each layout."""
    outcome = perform(Check(function.loss, function.loss.cases[-1], ("float32",), layout=layout))
    assert outcome.ok, outcome.problems


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_of_other_dtypes(dtype: torch.dtype) -> None:
    for function in (ONE, LISTS):
        scores, target = drawn(function, 9, 130)
        target = target.clamp_min(0) if function is ONE else target[:, :3].clamp(0, 129)
        wide = gradients(function, (scores, target))
        for a, b in zip(gradients(function, (scores, target.to(dtype))), wide, strict=True):
            assert same_bits(a, b)


@pytest.mark.kernels
@pytest.mark.parametrize(("reduction", "masked"), in_turn(["none", "mean", "sum", "batchmean"], [False, True]))
def test_reductions(reduction: str, masked: bool) -> None:
    for function in (ONE, LISTS):
        scores, target = drawn(function, 6, 10)
        options: dict[str, Any] = {"reduction": reduction}
        if masked:
            # Not all rows count, although gradients of few rows assume so until they are verified.
            options["mask"] = torch.tensor([True, False, True, True, False, True], device=KERNELS)
            scores[1], scores[4] = nan, inf
        if function is ONE:
            options["weight"] = torch.linspace(0, 2, 10, dtype=f16 if masked else f64, device=KERNELS)
        agree(function, (scores, target), **options)


@pytest.mark.kernels
@pytest.mark.parametrize(("dim", "copied"), [(0, False), (1, True), (-1, False)])
def test_class_dim(dim: int, copied: bool, monkeypatch: pytest.MonkeyPatch, fresh_plans: Any) -> None:
    """Images with classes in any dimension, read in place or from copies, have the bits of contiguous rows."""
    if copied:
        monkeypatch.setattr(margin_layout, "GATHERED_ELEMENTS", 0)
        fresh_plans()
    for function in (ONE, LISTS):
        scores, target = drawn(function, 12, 40, f32, labels=6)
        plain = gradients(function, (scores, target), reduction="none")
        place = dim % 3
        moved = scores.reshape(3, 4, 40).movedim(-1, place)
        labels = target.reshape(3, 4) if function is ONE else target.reshape(3, 4, 6).movedim(-1, place)
        for given in (moved, moved.contiguous()):
            value, slope = gradients(function, (given, labels), class_dim=dim, reduction="none")
            assert same_bits(value.reshape(-1), plain[0])
            assert same_bits(slope.movedim(place, -1).reshape(12, 40).contiguous(), plain[1])


@pytest.mark.kernels
@pytest.mark.parametrize(("dtype", "reduction", "warps"), [(bf16, "none", 1), (f32, "mean", 2), (bf16, "none", 2)])
def test_rows_apart_in_place(
    dtype: torch.dtype, reduction: str, warps: int, monkeypatch: pytest.MonkeyPatch, fresh_plans: Any
) -> None:
    """Images of many pixels are read in place, with rows that do not count, NaN, and labels out of range."""
    monkeypatch.setattr(margin_layout, "APART_BYTES", 0)
    monkeypatch.setattr(margin_layout, "SHARING_WARPS", warps)
    kinds = noted(monkeypatch)
    fresh_plans()
    scores, target = drawn(ONE, 150, 19, dtype)
    scores, target = scores.reshape(2, 75, 19).movedim(-1, 1).contiguous(), target.reshape(2, 75)
    weight = torch.linspace(0, 2, 19, device=KERNELS)
    agree(ONE, (scores, target), reduction=reduction, weight=weight, p=2 if dtype == f32 else 1)
    scores[1, 3, 5], target[0, 7] = nan, 19
    agree(ONE, (scores, target), reduction="none", check_targets="off")
    assert kinds == {"shared_rows" if warps > 1 else "thread_per_row"}


@pytest.mark.kernels
@pytest.mark.parametrize(("dtype", "gap"), [(f32, 0), (bf16, 3)])
def test_a_cluster_per_row(dtype: torch.dtype, gap: int, monkeypatch: pytest.MonkeyPatch, fresh_plans: Any) -> None:
    """Covers few long rows, with rows that do not count, NaN, and a grad_output that forward does not expect."""
    monkeypatch.setattr(margin_layout, "MAX_BLOCK_THREADS", 64)
    monkeypatch.setattr(margin_layout, "CLUSTERED_VECTORS", 1)
    clusters = noted(monkeypatch, "cluster")
    fresh_plans()
    classes = 5 * 64 * 16 // dtype.itemsize + 21
    scores, target = drawn(ONE, 5, classes, dtype)
    scores = torch.nn.functional.pad(scores, (0, gap))[:, :classes]
    weight = torch.linspace(0, 2, classes, device=KERNELS)
    agree(ONE, (scores, target), scale=3.0)
    agree(ONE, (scores, target), reduction="none", weight=weight, p=2)
    scores[1, -1], target[0], target[3] = nan, classes, -100
    agree(ONE, (scores, target), reduction="sum", check_targets="off")
    if has_clusters():
        assert clusters == {4}


@pytest.mark.parametrize(
    ("rows", "classes", "cluster"),
    [(8, 65536, 8), (9, 65536, 4), (8, 65532, 4), (32, 16384, 2), (32, 8192, 1), (33, 1 << 20, 1), (1, 2048, 1)],
)
def test_blocks_of_a_long_row(rows: int, classes: int, cluster: int) -> None:
    """Blocks share a row if each has vectors for all its threads and multiprocessors would otherwise be idle."""
    scores, one = RowStrides((classes,), 1, 4, 0), [(1,)] * 3
    for chip, expected in ((Chip(clusters=True), cluster), (Chip(), 1)):
        found = margin_layout.layout((rows,), classes, scores, scores, one, 0, None, True, chip)
        second = margin_layout.second_layout((rows,), classes, scores, scores, scores, one, chip)
        assert found.cluster == second.cluster == expected
        assert found.blocks(132) == min(rows, 132 // expected) * expected


@pytest.mark.parametrize(
    ("rows", "classes", "kind", "width"),
    [(2048, 4096, "subwarp", 32), (4096, 8192, "subwarp", 32), (2047, 4096, "block", 64), (512, 16384, "block", 256),
     (511, 2048, "block", 64), (65536, 1000, "subwarp", 16)],
)  # fmt: skip
def test_threads_of_a_long_row(rows: int, classes: int, kind: str, width: int) -> None:
    """With many rows a warp processes each; with fewer, a thread has twice as many vectors as with few rows."""
    scores, one = RowStrides((classes,), 1, 4, 0), [(1,)] * 3
    found = margin_layout.layout((rows,), classes, scores, scores, one, 0, None, True, Chip())
    assert (found.kind, found.width) == (kind, width)


def noted(monkeypatch: pytest.MonkeyPatch, field: str = "kind", choice: str = "layout") -> set[Any]:
    """Records a field of all layouts that the function ``choice`` of `margin_layout` returns from now on."""
    values, layout = set[Any](), getattr(margin_layout, choice)

    def noting(*given: Any) -> Any:
        found = layout(*given)
        values.add(getattr(found, field))
        return found

    monkeypatch.setattr(margin_layout, choice, noting)
    return values


def has_clusters() -> bool:
    return KERNELS == "cpu" or torch.cuda.get_device_capability()[0] >= 9


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("dtype", "classes", "places", "gap"),
    [(f32, 9, 16, 0), (bf16, 64, 30, 0), (f64, 2, 3, 1), *short_or_full([], [(f16, 40, 12, 0)])],
)
def test_a_thread_per_list(
    dtype: torch.dtype, classes: int, places: int, gap: int, monkeypatch: pytest.MonkeyPatch, fresh_plans: Any
) -> None:
    """Each thread processes a row with a list: lists of all lengths, repeated labels, rows that do not count, and rows
    that are adjacent in memory.
    """
    for name in ("THREAD_LISTS", "APART_LISTS"):
        monkeypatch.setattr(margin_layout, name, 0)
    monkeypatch.setattr(margin_layout, "THREAD_WARPS", 1)
    kinds = noted(monkeypatch)
    fresh_plans()
    scores, target = drawn(LISTS, 75, classes, dtype, labels=places, longest=min(places, 2 * classes))
    scores = torch.nn.functional.pad(scores, (0, gap))[:, :classes]
    mask = torch.arange(75, device=KERNELS) % 5 != 1
    for reduction in ("mean", "none"):
        agree(LISTS, (scores, target), reduction=reduction)
    agree(LISTS, (scores.t().contiguous().t(), target))
    # These are copied, although other layouts would read so few scores in place.
    agree(LISTS, (scores.repeat_interleave(3, 1)[:, ::3], target))
    scores[mask.logical_not()] = nan
    agree(LISTS, (scores, target), mask=mask)
    scores[2, 0], scores[3, 1], target[4, 0], target[5, :2] = nan, inf, classes, torch.tensor([1, -7])
    agree(LISTS, (scores, target), mask=mask, reduction="none", check_targets="off")
    assert kinds == {"thread_per_list", "thread_per_list_apart"}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("dtype", "classes", "places", "longest", "gap"),
    [
        (bf16, 128, 128, 12, 0),
        (bf16, 97, 97, 12, 0),
        (bf16, 96, 40, 40, 1),
        (f32, 68, 6, 6, -1),
        *short_or_full([], [(f16, 256, 60, 8, 0), (f32, 128, 40, 40, 0), (f32, 67, 6, 6, 0), (bf16, 242, 60, 8, 0)]),
    ],
)
def test_short_lists(
    dtype: torch.dtype,
    classes: int,
    places: int,
    longest: int,
    gap: int,
    monkeypatch: pytest.MonkeyPatch,
    fresh_plans: Any,
) -> None:
    """The lanes of a warp read the labels of short lists for each other: lists of all lengths, rows that do not count,
    labels out of range, and scores that are not finite or far apart. Each row is followed by a gap, or all rows are
    preceded by one element.
    """
    sizes = {"THREAD_LISTS": 0, "WARP_CHUNKS": 2, "SUBWARP_THREADS": 64, "RESIDENT_THREADS": 64}
    for name, value in sizes.items():
        monkeypatch.setattr(margin_layout, name, value)
    kinds = noted(monkeypatch)
    fresh_plans()
    scores, target = drawn(LISTS, 139, classes, dtype, labels=places, longest=longest)
    target[7, :3] = target[7, 0]
    if gap < 0:
        scores = torch.nn.functional.pad(scores.flatten(), (1, 0))[1:].unflatten(0, scores.shape)
    elif gap:
        scores = torch.nn.functional.pad(scores, (0, gap))[:, :classes]
    mask = torch.arange(139, device=KERNELS) % 5 != 1
    for reduction in ("mean", "none"):
        agree(LISTS, (scores, target), reduction=reduction)
    scores[mask.logical_not()] = nan
    scores[10], scores[20:23] = scores[10] + 1e4, scores[20:23] * 1e4
    agree(LISTS, (scores, target), mask=mask)
    scores[2, 0], scores[3, 1], scores[12, target[12, 0]] = nan, inf, -inf
    target[4, 0], target[5, :2] = classes, torch.tensor([1, -7])
    agree(LISTS, (scores, target), mask=mask, reduction="none", check_targets="off")
    assert kinds == {"short_lists"}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "dtype", "classes", "gap", "step", "p"),
    [
        (ONE, bf16, 71, 1, 1, 1), (ONE, f32, 35, 2, 1, 2), (ONE, f32, 133, 0, 2, 1), (LISTS, bf16, 71, 1, 1, 1),
        (LISTS, f32, 133, 1, 2, 1),
        *short_or_full([], [(ONE, f64, 1031, 1, 1, 1), (LISTS, f16, 1031, 3, 1, 1), (ONE, bf16, 1031, 0, 3, 2)]),
    ],
)  # fmt: skip
def test_rows_that_lie_otherwise_than_their_gradients(
    function: Any, dtype: torch.dtype, classes: int, gap: int, step: int, p: int,
    monkeypatch: pytest.MonkeyPatch, fresh_plans: Any,
) -> None:  # fmt: skip
    """Scores with a gap after each row, or after each class, are read into the vectors of their gradients."""
    monkeypatch.setattr(margin_layout, "GATHERED_ELEMENTS", 0)
    chosen = noted(monkeypatch, "scores")
    fresh_plans()
    scores, target = drawn(function, 12, classes, dtype, labels=6)
    scores = torch.nn.functional.pad(scores, (0, gap)).repeat_interleave(step, 1)[:, : classes * step : step]
    options = {"p": p} if function is ONE else {}
    agree(function, (scores, target), reduction="none", **options)
    scores[0, 1], scores[2, 0], scores[3, target[3].flatten()[0]], scores[11, classes - 1] = nan, inf, -inf, 3
    agree(function, (scores, target), reduction="none", **options)
    assert chosen == {"shifted" if step == 1 and dtype.itemsize == 2 else "gathered"}


@pytest.mark.parametrize(
    ("rows", "classes", "in_place"), [(5, 46984, False), (16, 1 << 15, False), (17, 1 << 15, True), (16, 5000, True)]
)
def test_few_long_rows_with_a_step_are_copied(rows: int, classes: int, in_place: bool) -> None:
    scores, gradients = RowStrides((2 * classes,), 2, 4, 0), RowStrides((classes,), 1, 4, 0)
    assert margin_layout.reads_steps((rows,), classes, scores, gradients, False) is in_place


@pytest.mark.kernels
def test_edges_of_many_rows(monkeypatch: pytest.MonkeyPatch, fresh_plans: Any) -> None:
    """Few lanes share a row, so each processes several edge elements, before the first and after the last vector."""
    monkeypatch.setattr(margin_layout, "THREAD_LISTS", 0)
    edges = noted(monkeypatch, "edges")
    fresh_plans()
    scores, target = drawn(ONE, 37, 71, bf16)
    scores[2, 0], scores[3, target[3]], scores[36, 70] = nan, -inf, 3
    agree(ONE, (scores, target), reduction="none")
    assert edges == {4}


@pytest.mark.kernels
@pytest.mark.parametrize(("dtype", "classes", "gap"), [(f32, 9, 2), (bf16, 17, 0)])
def test_a_thread_per_label(
    dtype: torch.dtype, classes: int, gap: int, monkeypatch: pytest.MonkeyPatch, fresh_plans: Any
) -> None:
    """Each thread processes a row of few classes: ignored rows, scores that are not finite, labels out of range."""
    monkeypatch.setattr(margin_layout, "THREAD_LISTS", 0)
    fresh_plans()
    scores, target = drawn(ONE, 75, classes, dtype)
    scores = torch.nn.functional.pad(scores, (0, gap))[:, :classes]
    weight = torch.linspace(0, 2, classes, device=KERNELS)
    agree(ONE, (scores, target), weight=weight, p=2 if gap else 1)
    target[3], target[4] = -100, classes
    scores[3], scores[5, target[5]], scores[6, 0], scores[7, 1] = nan, inf, nan, -inf
    agree(ONE, (scores, target), reduction="none", check_targets="off")


@pytest.mark.kernels
def test_a_thread_reports_a_label_that_is_no_class(monkeypatch: pytest.MonkeyPatch, fresh_plans: Any) -> None:
    monkeypatch.setattr(margin_layout, "THREAD_LISTS", 0)
    fresh_plans()
    scores, target = drawn(LISTS, 40, 5, f32)
    target[33, :2] = torch.tensor([1, 5])
    with pytest.raises(IndexError, match=r"multilabel_margin_loss.*33.*5"):
        LISTS(scores, target, check_targets="sync")


@pytest.mark.kernels
def test_rows_that_lie_anywhere() -> None:
    """Covers rows with gaps, misaligned rows, strided classes, and one row expanded to all."""
    for function in (ONE, LISTS):
        scores, target = drawn(function, 9, 130, f32, labels=5)
        plain = gradients(function, (scores, target), reduction="none")
        gaps = torch.cat((scores, scores), 1)[:, :130]
        shifted = torch.cat((scores[:, :1], scores), 1)[:, 1:]
        behind = torch.cat((scores.flatten()[:1], scores.flatten()))[1:].view(9, 130)
        for placed in (gaps, shifted, behind, scores.movedim(0, 1).contiguous().movedim(0, 1)):
            for a, b in zip(gradients(function, (placed, target), reduction="none"), plain, strict=True):
                assert same_bits(a.contiguous(), b)
        agree(function, (scores[:1].expand(9, 130), target), reduction="none")


@pytest.mark.kernels
@pytest.mark.parametrize("classes", [10, 1100])
def test_a_wrong_speculation_is_noticed(classes: int) -> None:
    for function in (ONE, LISTS):
        scores, target = drawn(function, 5, classes, f32, labels=4)
        right = exact(function, (scores, target))[1] / 0.5
        leaf = scores.requires_grad_()
        for factor in (1.0, 3.0, 3.0, -2.0):
            (found,) = torch.autograd.grad(function(leaf, target), leaf, torch.tensor(factor, device=KERNELS))
            torch.testing.assert_close(found.cpu().double(), right * factor, rtol=1e-6, atol=1e-9)


@pytest.mark.kernels
@pytest.mark.parametrize("normalizer", [3.0, "array"])
def test_normalizer_and_out_dtype(normalizer: Any) -> None:
    operands = drawn(ONE, 4, 10, f32)
    if normalizer == "array":
        normalizer = torch.tensor(3.0, dtype=f64, device=KERNELS)
    value = ONE(*operands, normalizer=normalizer, out_dtype="float64")
    total = ONE(*operands, reduction="sum", out_dtype="float64")
    assert value.dtype == f64
    torch.testing.assert_close(value, total / 3, rtol=1e-14, atol=0)


@pytest.mark.kernels
def test_many_rows_are_counted_before(monkeypatch: pytest.MonkeyPatch, fresh_plans: Any) -> None:
    monkeypatch.setattr("cupylosses.engines.row_margin.plan.SELF_COUNTING_ROWS", 3)
    fresh_plans()
    agree(ONE, drawn(ONE, 70, 10, f32))


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
def test_bits_in_any_order_and_grid() -> None:
    """Results do not depend on grid and thread order, nor does a value depend on its gradients."""
    for function, labels in ((ONE, 0), (LISTS, 6), (LISTS, 133)):
        scores, target = (x.cpu() for x in drawn(function, 40, 133, f32, labels=labels, longest=60))
        found = []
        for processors, seed in ((1, 1), (7, 2)):
            with host.execution(processors=processors, seed=seed):
                found.append([*gradients(function, (scores, target)), function(scores, target)])
        for a, b in zip(*found, strict=True):
            assert same_bits(a, b)
        assert same_bits(found[0][0], found[0][2])


# ----------------------------------------------------------------------------------------------------------------------
# Labels out of range


@pytest.mark.kernels
@pytest.mark.parametrize("label", [4, -1, -(2**31), 2**40])
def test_bad_labels(label: int) -> None:
    """The row of the label is NaN with a gradient of 0, and other rows are unaffected."""
    scores = torch.tensor([X, X], dtype=f64, device=KERNELS)
    target = torch.tensor([1, label], device=KERNELS)
    value, slope = gradients(ONE, (scores, target), 2.0, reduction="none", check_targets="off")
    assert float(value[0]) == pytest.approx(0.925) and value[1].isnan() and not slope[1].count_nonzero()
    value, slope = gradients(ONE, (scores, target), 2.0, check_targets="off")
    assert value.isnan() and slope.isfinite().all() and not slope[1].count_nonzero()
    with pytest.raises(IndexError, match=rf"^multi_margin_loss: `target\[1\]` must be .*got {label} for 4 classes"):
        ONE(scores, target, check_targets="sync")


@pytest.mark.kernels
@pytest.mark.parametrize("label", [4, -2, 2**40])
@pytest.mark.parametrize("dim", [1, 2])
def test_bad_labels_of_lists(label: int, dim: int) -> None:
    scores = torch.tensor([[X, X], [X, X]], dtype=f64, device=KERNELS)
    target = torch.tensor([[[3, 0, -1], [1, -1, label]], [[0, label, -1], [-1, 9, 9]]], device=KERNELS)
    scores, target = scores.movedim(-1, dim), target.movedim(-1, dim)
    options = {"class_dim": dim, "reduction": "none"}
    value, slope = gradients(LISTS, (scores, target), 2.0, check_targets="off", **options)
    assert value.flatten()[[0, 1, 3]].tolist() == pytest.approx([0.85, 0.925, 0.0]) and value[1, 0].isnan()
    assert slope.isfinite().all() and not slope.movedim(dim, -1)[1, 0].count_nonzero()
    where = r"\[1, 1, 0\]" if dim == 1 else r"\[1, 0, 1\]"
    message = rf"^multilabel_margin_loss: `target{where}` must be a class index, 0 to 3, or -1 .*got {label} for 4"
    for check in ("sync", "lazy") if KERNELS == "cpu" else ("sync",):
        with pytest.raises(IndexError, match=message):
            LISTS(scores, target, check_targets=check, **options)
    with pytest.raises(IndexError, match=message):
        exact(LISTS, (scores, target), **options)


# ----------------------------------------------------------------------------------------------------------------------
# Transforms, graphs, other libraries


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compute second derivatives of squared hinges without the formula; those of other hinges are 0."""
    monkeypatch.setattr(formulas, "hvp", None)
    scores, target = drawn(ONE, 3, 5)
    leaf = scores.requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda x: ONE(x, target, p=2, reduction=reduction), (leaf,), check_undefined_grad=False
    )
    labels = drawn(LISTS, 3, 5)[1]
    for function, y in ((ONE, target), (LISTS, labels)):
        value = function(leaf, y, reduction=reduction).sum()
        (slope,) = torch.autograd.grad(value, leaf, create_graph=True)
        (second,) = torch.autograd.grad((slope * slope.detach()).sum(), leaf, allow_unused=True, materialize_grads=True)
        assert not second.count_nonzero()


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("shape", "dtype", "transposed"),
    [((9, 72), torch.bfloat16, False), ((3, 1003), f32, False), ((3, 1005), f32, False), ((40, 6), f32, True)],
)
def test_products_of_second_derivatives(
    shape: tuple[int, int], dtype: torch.dtype, transposed: bool, monkeypatch: pytest.MonkeyPatch, fresh_plans: Any
) -> None:
    """Covers rows of whole vectors, rows of odd sizes, rows shared by a cluster, and strided classes, with weights,
    ignored and masked rows, and NaN.
    """
    shared = shape[1] == 1005
    if shared:
        monkeypatch.setattr(margin_layout, "MAX_BLOCK_THREADS", 64)
    clusters = noted(monkeypatch, "cluster", "second_layout")
    fresh_plans()
    scores, target = (x.cpu() for x in drawn(ONE, *shape))
    tangent = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    scores, weight = scores.to(dtype), torch.linspace(0, 2, shape[1])
    scores[0, 0], target[1], mask = nan, -100, torch.arange(shape[0]) != 2
    scores = scores.mT.contiguous().mT if transposed else scores

    def second(device: str, *dtypes: torch.dtype) -> torch.Tensor:
        leaf, v, w = (x.to(device, d) for x, d in zip((scores, tangent, weight), dtypes, strict=True))
        given = {"weight": w, "mask": mask.to(device), "p": 2}
        value = ONE(leaf.requires_grad_(), target.to(device), reduction="none", **given)
        upstream = torch.linspace(-1, 2, shape[0], device=device).to(value.dtype)
        (slope,) = torch.autograd.grad(value, leaf, upstream, create_graph=True)
        return torch.autograd.grad(slope, leaf, v)[0]

    before = plans.use_host(None)
    right = second("cpu", f64, f64, f64)
    plans.use_host(before)
    monkeypatch.setattr(formulas, "hvp", None)
    tolerance = 4 * torch.finfo(dtype).eps
    found = second(KERNELS, dtype, dtype, f32).cpu().double()
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert clusters == {2 if shared and has_clusters() else 1}


@pytest.mark.kernels
@pytest.mark.parametrize(("function", "reduction"), in_turn([ONE, LISTS], ["mean", "none"]))
def test_transforms(function: Any, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, target = drawn(function, 3, 5)
    generator = torch.Generator().manual_seed(5)
    tangent = torch.randn(3, 5, generator=generator, dtype=f64).to(KERNELS)
    batch = torch.randn(4, 3, 5, generator=generator, dtype=f64).to(KERNELS)

    def call(x: torch.Tensor) -> torch.Tensor:
        return function(x, target, reduction=reduction).sum()

    slope = torch.func.grad(call)(scores)
    if reduction == "mean":
        torch.testing.assert_close(slope.cpu(), exact(function, (scores, target))[1] / 0.5)
    along = torch.func.jvp(call, (scores,), (tangent,))[1]
    torch.testing.assert_close(along, (slope * tangent).sum())
    monkeypatch.setattr(formulas, "evaluate", None)
    found = torch.func.vmap(torch.func.grad(call))(batch)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(call)(x) for x in batch]))


@pytest.mark.kernels
@pytest.mark.parametrize(("function", "reduction"), in_turn([ONE, LISTS], ["mean", "none"]))
def test_a_compiled_graph(function: Any, reduction: str) -> None:
    """A single graph gives the bits of eager mode. torch's own loss is wrong for lists in a graph."""
    torch.compiler.reset()
    scores, target = drawn(function, 3, 5)
    leaf = scores.requires_grad_()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    both = []
    for f in (compiled, function):
        value = f(leaf, target, reduction=reduction)
        both.append((value.detach(), *torch.autograd.grad(value.sum(), leaf)))
    for a, b in zip(*both, strict=True):
        assert same_bits(a, b)


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
@pytest.mark.parametrize("function", [ONE, LISTS], ids=lambda f: f.__name__)
def test_cupy(function: Any) -> None:
    operands = [x.cpu() for x in drawn(function, 3, 5)]
    right = exact(function, operands)
    with stand_in.cupy() as cupy:
        arrays = [cupy.asarray(x.numpy()) for x in operands]
        value, found = cupylosses.value_and_grad(function, *arrays)
        numpy.testing.assert_allclose(numpy.asarray(value), right[0].numpy(), rtol=1e-13)
        numpy.testing.assert_allclose(numpy.asarray(found), right[1].numpy() / 0.5, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("function", [ONE, LISTS], ids=lambda f: f.__name__)
def test_numpy(function: Any) -> None:
    operands = [x.cpu() for x in drawn(function, 3, 5)]
    value, slope = cupylosses.value_and_grad(function, *(x.numpy() for x in operands))
    right = exact(function, operands)
    numpy.testing.assert_allclose(value, right[0].numpy(), rtol=1e-14)
    numpy.testing.assert_allclose(slope, right[1].numpy() / 0.5, rtol=1e-12)


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_of_nothing(reduction: str) -> None:
    """Covers no rows, and lists without places. A mean of nothing is NaN with gradients of 0."""
    for function, labels in ((ONE, torch.ones(0).long()), (LISTS, torch.ones(0, 3).long())):
        found = gradients(function, (torch.ones(0, 3, device=KERNELS), labels.to(KERNELS)), reduction=reduction)
        assert found[0].shape == ((0,) if reduction == "none" else ()) and found[1].shape == (0, 3)
        assert reduction == "none" or bool(found[0].isnan()) == (reduction == "mean")
    empty = torch.ones(2, 0, device=KERNELS).long()
    for x in gradients(LISTS, (torch.ones(2, 3, device=KERNELS), empty), reduction=reduction):
        assert not x.count_nonzero()
    ignored = torch.full((2,), -100, device=KERNELS)
    value, slope = gradients(ONE, (torch.ones(2, 3, device=KERNELS), ignored), reduction=reduction)
    assert bool(value.isnan().any()) == (reduction == "mean") and not slope.count_nonzero()


# ----------------------------------------------------------------------------------------------------------------------
# Arguments

S, Y = torch.ones(2, 3), torch.zeros(2).long()


@pytest.mark.parametrize(
    ("function", "operands", "options", "kind", "message"),
    [
        (ONE, (torch.ones(()), Y), {}, ValueError, "`input` needs a class dimension"),
        (ONE, (torch.ones(2, 0), Y), {}, ValueError, "`input` must have at least one class"),
        (ONE, (S, torch.zeros(3).long()), {}, ValueError, "`target` must have the shape of `input` without"),
        (ONE, (torch.ones(2, 3, 4), torch.zeros(2, 3).long()), {}, ValueError, "If the classes are in dimension -1"),
        (ONE, (S, Y), {"class_dim": 2}, ValueError, "`class_dim` must be within"),
        (ONE, (S, Y), {"weight": torch.ones(2)}, ValueError, "`weight` must have one number per class"),
        (ONE, (S, Y), {"weight": torch.ones(3, requires_grad=True)}, ValueError, "`weight` has no gradient"),
        (ONE, (S, Y), {"mask": torch.ones(3) > 0}, ValueError, "`mask` must broadcast"),
        (ONE, (S, Y), {"margin": nan}, ValueError, "`margin` must be"),
        (ONE, (S, Y), {"p": 3}, TypeError, "`p` must be 1 or 2"),
        (ONE, (S, Y), {"mask": torch.ones(2)}, TypeError, "`mask` must be bool"),
        (ONE, (S, Y), {"check_targets": "never"}, ValueError, "`check_targets` must be one of"),
        (ONE, (Y, S), {}, TypeError, "Are `input` and `target` swapped"),
        (ONE, (S, torch.zeros(2)), {}, TypeError, "`target` must have one of the dtypes"),
        (LISTS, (S, Y), {}, ValueError, "`target` must have the shape of `input` except for"),
        (LISTS, (S, torch.zeros(3, 3).long()), {}, ValueError, "`target` must have the shape of `input` except for"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_arguments(function: Any, operands: Any, options: Mapping[str, Any], kind: Any, message: str) -> None:
    with pytest.raises(kind, match=f"^{function.__name__}: .*{message}"):
        function(*operands, **options)


def test_the_twins_of_torch() -> None:
    """Modules give torch's values where these are right."""
    weight = torch.rand(6, dtype=f64)
    for name, function, options in (
        ("MultiMarginLoss", ONE, {"p": 2, "margin": 0.5, "weight": weight}),
        ("MultiLabelMarginLoss", LISTS, {"reduction": "sum"}),
    ):
        scores, target = (x.cpu() for x in drawn(function, 4, 6))
        target = target.clamp(0) if function is ONE else target
        target = target.clamp(-1, 5)
        for given in ({}, options):
            ours, theirs = (getattr(x, name)(**given)(scores, target) for x in (nn, torch.nn))
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.kernels
def test_torchs_functions_are_served() -> None:
    """Within `patch_torch`, kernels serve torch's functions unless the value would have another shape or dtype."""
    with cupylosses.patch_torch() as report:
        for function, module in ((ONE, "MultiMarginLoss"), (LISTS, "MultiLabelMarginLoss")):
            scores, target = drawn(function, 6, 5, f32)
            target = target.clamp(0 if function is ONE else -1, 4)
            expected = function(scores, target)
            assert same_bits(getattr(torch.nn.functional, function.__name__)(scores, target), expected)
            assert same_bits(getattr(torch.nn, module)()(scores, target), expected)
        assert report.served == {("multi_margin_loss", "float32"): 2, ("multilabel_margin_loss", "float32"): 2}
        assert not report.passed_on
        single = torch.nn.functional.multi_margin_loss(scores[0], target[0, :1].clamp(0), reduction="none")
        assert single.shape == (1,) and len(report.passed_on) == 1
