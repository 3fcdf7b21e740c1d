"""The softmax engine in every row layout: values, gradients, bitwise reproducibility, labels out of range.

Options belong to the formula, which ``test_rows.py`` tests. Here each option runs in some layout, and in every layout
with ``--thorough``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from devices import GPU, HOST, KERNELS
from grids import in_turn, short_or_full, thorough
from torch import Tensor

import cupylosses.functional
from cupylosses.backends.torch import device as torch_device
from cupylosses.engines import execute
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.jit.gpu import Chip
from cupylosses.testing import host
from cupylosses.testing.host.execution import SMALL, HostDevice
from cupylosses.testing.softmax.properties import (
    BAD_LABELS,
    BAD_ROWS,
    LAYOUTS,
    PLACES,
    SOFTMAX_LAYOUTS,
    Drawn,
    agrees_with_truth,
    blocks,
    draw,
    few_lanes_share_rows,
    few_rows_are_many,
    few_rows_have_threads,
    few_slices,
    gradient,
    is_the_same_with_and_without_gradient,
    keeps_edges,
    keeps_its_bits,
    leaves_rows_out,
    noted_layouts,
    of_layout,
    parts,
    pipelined,
    placed,
    some_rows_are_many,
    survives_labels_out_of_range,
    upstream,
    value_agrees_with_truth,
    writes_one_gradient_in_one_pass_or_two,
)
from cupylosses.testing.tolerance import same_bits

pytestmark = pytest.mark.kernels

#: Untyped, because reductions come from parametrization as strings.
F: Any = cupylosses.functional

in_each_layout = pytest.mark.parametrize("layout", LAYOUTS)
in_each_layout_of_logits = pytest.mark.parametrize("layout", SOFTMAX_LAYOUTS)
REDUCTIONS = ("mean", "none")


@pytest.fixture(autouse=True)
def small_chip(monkeypatch: pytest.MonkeyPatch, fresh_plans: Callable[[], None]) -> Iterator[None]:
    """Plans for the small chip that LAYOUTS and SIZES assume, even on a larger GPU; fewer rows count as many."""
    if GPU:
        F.cross_entropy(torch.zeros(1, 2, device=KERNELS), torch.zeros(1, dtype=torch.int64, device=KERNELS))
        device = torch_device.devices[torch.cuda.current_device()]
        monkeypatch.setattr(device, "chip", dataclasses.replace(SMALL, clusters=device.chip.clusters))
        fresh_plans()
    with some_rows_are_many():
        yield


def drawn(layout: str, **how: Any) -> Drawn:
    """Draws operands for a layout, on the device of the kernels."""
    return of_layout(layout, device=KERNELS, **how)


@in_each_layout
def test_layouts_are_what_they_are_called(layout: str, fresh_plans: Callable[[], None]) -> None:
    given = drawn(layout)
    with noted_layouts() as found:
        given.function(**given.arguments)
    assert {(x.kind, x.cluster > 1) for x in found} == {
        (layout.partition(",")[0], layout in ("block, cluster", "two_pass"))
    }


# ----------------------------------------------------------------------------------------------------------------------
# Sizes and places

#: Layouts of many rows.
OF_MANY_ROWS = ("packed_rows", "packed_rows, with gaps", "columns", "column_tiles", "interleaved_rows")

#: Dtype, class dimension and shapes for each kernel. Class counts are around the capacity of a vector, and of a warp,
#: a block and a cluster that share a row. Row counts are around the size of a warp, and around the limit of few rows.
SIZES: Mapping[str, tuple[str, int, Sequence[tuple[int, ...]]]] = {
    "subwarp": (
        "float32",
        1,
        [
            *((31, 33), (32, 64), (33, 35), (7, 127), (300, 128), (1, 129), (2, 255), (2, 256)),
            *((65, 300), (66, 511), (67, 513), (65, 1023), (70, 1025)),
        ],
    ),
    "subwarp of halves": ("bfloat16", 1, [(33, 37), (31, 64), (3, 255), (2, 511), (65, 1025), (66, 2048)]),
    "subwarp of float16": ("float16", 1, [(5, 47), (33, 100), (70, 1025)]),
    "subwarp of doubles": ("float64", 1, [(1, 35), (33, 63), (2, 65), (3, 127), (66, 511), (65, 512)]),
    "block": ("float32", 1, [(1, 1025), (3, 1502), (2, 2047), (70, 1031), (66, 2048)]),
    "block of halves": ("bfloat16", 1, [(1, 513), (3, 3077), (65, 2049), (66, 4095)]),
    "block of doubles": ("float64", 1, [(1, 129), (3, 517), (65, 513), (66, 1023)]),
    "block, cluster": ("float32", 1, [(1, 5000), (3, 4501), (66, 2100), (2, 16384)]),
    "block, cluster of halves": ("bfloat16", 1, [(1, 9001), (2, 32765)]),
    "two_pass": ("float32", 1, [(1, 16389), (2, 16391), (1, 32771)]),
    "two_pass of halves": ("bfloat16", 1, [(1, 32777), (2, 32783)]),
    "thread_per_row_packed": ("float32", 1, [(1, 2), (2, 2), (31, 3), (33, 5), (300, 7), (1, 8), (65, 32)]),
    "thread_per_row_packed of halves": ("bfloat16", 1, [(1, 2), (33, 7), (65, 31)]),
    "thread_per_row_packed of doubles": ("float64", 1, [(3, 2), (33, 10), (65, 31)]),
    "thread_per_row, one class": ("float32", 1, [(1, 1), (70, 1)]),
    "thread_per_row": ("float32", 1, [(1, 2, 4), (3, 5, 4, 8), (2, 19, 132), (2, 24, 4)]),
    "thread_per_row, odd": ("float32", 1, [(1, 2, 3), (2, 7, 5, 31), (2, 48, 3), (1, 80, 1, 3)]),
    "thread_per_row of halves": ("bfloat16", 1, [(1, 2, 8), (3, 19, 40)]),
    "thread_per_row of doubles": ("float64", 0, [(2, 2), (19, 64), (24, 10)]),
    "packed_rows": ("float32", 1, [(1, 2), (300, 3), (33, 5), (31, 8), (65, 32), (129, 33), (40, 99)]),
    "packed_rows of halves": ("bfloat16", 1, [(33, 2), (300, 3), (31, 16), (65, 64), (129, 10)]),
    "packed_rows of doubles": ("float64", 1, [(3, 2), (300, 3), (33, 55)]),
    "columns": ("float32", 1, [(1, 2, 4), (3, 5, 4, 8), (2, 8, 132)]),
    "columns, odd": ("float64", 1, [(2, 3, 5, 31), (2, 3, 3)]),
    "columns, staggered": ("float32", 1, [(2, 3, 643)]),
    "columns, staggered of halves": ("float16", 1, [(3, 5, 531)]),
    "columns of halves": ("bfloat16", 1, [(1, 2, 8), (3, 6, 40)]),
    "columns of doubles": ("float64", 0, [(2, 2), (8, 64)]),
    "interleaved_rows": ("float32", 1, [(2, 9, 521), (3, 19, 515)]),
    "interleaved_rows of halves": ("bfloat16", 1, [(1, 33, 1027)]),
    "column_tiles": ("float32", 1, [(1, 53, 3), (2, 61, 3, 33), (1, 300, 35)]),
    "column_tiles of halves": ("float16", 1, [(1, 101, 34), (2, 599, 6, 7)]),
    "column_tiles of doubles": ("float64", 0, [(27, 33), (31, 2)]),
    "column_tiles, staggered": ("float32", 1, [(1, 53, 119), (2, 61, 3, 59), (3, 50, 57)]),
    "column_tiles, staggered of halves": ("bfloat16", 1, [(2, 101, 119), (1, 99, 239)]),
    "column_slices": ("float32", 1, [(1, 2001, 34), (2, 1300, 10), (1, 1024, 130)]),
    "column_slices of halves": ("bfloat16", 1, [(1, 3001, 34), (2, 1024, 3, 6), (1, 1100, 126)]),
    "column_slices, odd": ("float32", 1, [(1, 1100, 127), (2, 1024, 5, 7)]),
    "column_slices of doubles": ("float64", 0, [(1025, 4), (1300, 66)]),
    "subwarp, copied": ("float32", 1, [(1, 193, 2), (2, 300, 3, 33)]),
    "subwarp, copied halves": ("float16", 0, [(385, 3), (400, 35)]),
}


#: One entry per kernel; the other entries use it with another dtype.
FEW_SIZES = list({x.partition(" of ")[0]: x for x in reversed(SIZES)}.values())[::-1]


@pytest.mark.parametrize(
    ("what", "reduction"),
    [
        pytest.param(*x, marks=[pytest.mark.addresses] * (x[0] in FEW_SIZES))
        for x in in_turn(short_or_full(FEW_SIZES, list(SIZES)), REDUCTIONS)
    ],
)
def test_sizes(what: str, reduction: str, fresh_plans: Callable[[], None]) -> None:
    dtype, dim, shapes = SIZES[what]
    with (
        few_rows_have_threads(),
        few_rows_are_many() if what.startswith(OF_MANY_ROWS) else nullcontext(),
        noted_layouts() as found,
    ):
        for seed, shape in enumerate(shapes):
            agrees_with_truth(draw(shape, dim, dtype, KERNELS, seed=seed), reduction)
    assert {x.kind for x in found} == {what.partition(",")[0].partition(" of ")[0]}
    assert {x.staggered for x in found} == {"staggered" in what}
    assert len({x.vec_size for x in found}) == 1, "one kernel for all of these sizes"
    assert all(
        (x.cluster > 1) == ("cluster" in what or "two_pass" in what) for x in found if x.kind in ("block", "two_pass")
    )


@pytest.mark.parametrize(
    ("dtype", "shape", "place", "edges"),
    [
        ("bfloat16", (65, 37), "contiguous", 4),
        ("bfloat16", (33, 265), "contiguous", 2),
        ("float16", (33, 203), "sliced", 4),
        ("float32", (65, 35), "contiguous", 3),
    ],
)
def test_lanes_with_several_elements_at_the_ends_of_rows(
    dtype: str, shape: tuple[int, int], place: str, edges: int, fresh_plans: Callable[[], None]
) -> None:
    given = draw(shape, 1, dtype, KERNELS, place=place)
    with few_lanes_share_rows(), noted_layouts() as found:
        agrees_with_truth(given, "mean")
        agrees_with_truth(given, "none")
        agrees_with_truth(given, "sum", label_smoothing=0.1)
    assert {(x.kind, x.edges) for x in found} == {("subwarp", edges)}


@pytest.mark.addresses
@pytest.mark.parametrize(
    ("shape", "dtype", "place", "rows"),
    [
        ((3, 16, 521), "bfloat16", "misaligned", 4),
        ((2, 17, 522), "bfloat16", "misaligned", 4),
        ((2, 16, 515), "bfloat16", "apart", 4),
        ((2, 100, 515), "float16", "contiguous", 2),
    ],
)
def test_pairs_of_rows_that_no_vector_divides(
    shape: tuple[int, ...],
    dtype: str,
    place: str,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
    fresh_plans: Callable[[], None],
) -> None:
    """Tiles begin or end in the middle of a word. In some of them no row counts, in others a few do. Gradients begin in
    the same half of a word as logits, in the other half, or in either.
    """
    given = draw(shape, 1, dtype, KERNELS, place=place)
    labels = given.target.clone()
    labels[0, 100:300] = -100
    labels[1, ::3] = -100
    monkeypatch.setattr(softmax_layout, "TILE_ROW_BYTES", 1 << 10)
    monkeypatch.setattr(softmax_layout, "MANY_INTERLEAVED", 1)
    with few_rows_are_many(), noted_layouts() as found:
        agrees_with_truth(given._replace(target=labels), "none")
        options = {"label_smoothing": 0.1} if rows == 2 else {}
        agrees_with_truth(given._replace(target=labels), "sum", **options)
    expected = ("interleaved_rows", rows, place == "misaligned", place == "apart")
    # If gradients begin elsewhere, a layout with gradients that begin as the logits do was tried first.
    assert expected in {(x.kind, x.vec_size, x.shifted, x.gathered) for x in found}


@pytest.mark.addresses
@pytest.mark.parametrize(
    ("shape", "dtype", "place", "widths"),
    [
        ((2, 26, 7, 17), "float32", "misaligned", {2}),
        ((3, 33, 239), "bfloat16", "contiguous", {2, 4}),
    ],
)
def test_staggered_tiles(
    shape: tuple[int, ...],
    dtype: str,
    place: str,
    widths: set[int],
    monkeypatch: pytest.MonkeyPatch,
    fresh_plans: Callable[[], None],
) -> None:
    """Each class begins at another place of a vector, and rows that are left out reach no other rows, whatever their
    logits. With more options, less shared memory is left for wide vectors.
    """
    monkeypatch.setattr(softmax_layout, "TILE_ROW_BYTES", 64)
    given = draw(shape, 1, dtype, KERNELS, place=place)
    some = given.target.clone()
    some[..., ::3] = -100
    given = given._replace(target=some)
    infinite = given.input.masked_fill((some == -100).unsqueeze(1), float("inf"))
    with few_rows_are_many(), noted_layouts() as found:
        agrees_with_truth(given, "none", label_smoothing=0.1, weight=weights(shape[1]), softcap=3.0)
        agrees_with_truth(given, "mean")
        leaves = [placed(x, place).requires_grad_() for x in (given.input, infinite)]
        values = [F.cross_entropy(x, some) for x in leaves]
        # The kernel that overwrites the logits takes single rows.
        leaf = given.input.contiguous().requires_grad_()
        over, beside = (F.cross_entropy(leaf + 0, some, inplace_backward=x) for x in (True, False))
    assert {(x.kind, x.staggered) for x in found} == {("column_tiles", True)}
    assert GPU or {x.vec_size for x in found} == widths
    assert same_bits(*values) and same_bits(*map(gradient, values, leaves))
    assert torch.allclose(gradient(over, leaf), gradient(beside, leaf), rtol=0.01, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "classes", "many", "kind"),
    [
        ("cross_entropy", 7, True, "packed_rows"),
        ("cross_entropy", 7, False, "thread_per_row_packed"),
        ("nll_loss", 7, True, "label_only_rows"),
        ("nll_loss", 163, True, "label_only_tiles"),
    ],
)
def test_rows_without_gaps_whose_labels_lie_otherwise(
    loss: str, classes: int, many: bool, kind: str, fresh_plans: Callable[[], None]
) -> None:
    given = draw((13, 9, classes), 2, "float32", KERNELS, loss=loss)
    given = given._replace(target=given.target.t().contiguous().t())
    with few_rows_are_many() if many else few_rows_have_threads(), noted_layouts() as found:
        agrees_with_truth(given, "mean")
        agrees_with_truth(given, "none")
    assert {(x.kind, x.rank) for x in found} == {(kind, 2)}


@pytest.mark.parametrize(
    ("shape", "dtype"), in_turn([(1, 1031), (37, 2053), (5, 4507)], ["float32", "bfloat16"]), ids=str
)
def test_values_alone(shape: tuple[int, int], dtype: str, fresh_plans: Callable[[], None]) -> None:
    given = draw(shape, 1, dtype, KERNELS)
    value_agrees_with_truth(given)
    fresh_plans()
    with parts(), noted_layouts() as found:
        value_agrees_with_truth(given)
        value_agrees_with_truth(given, label_smoothing=0.1)
    assert found and all(x.streamed for x in found)


@pytest.mark.plain
@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
@pytest.mark.parametrize("lanes", [0, 1 << 16])
def test_values_alone_of_rows_that_a_cluster_could_barely_hold(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads have up to 16 vectors in flight, in blocks of 128 or 512; the bits are those of rows in shared memory."""
    monkeypatch.setattr(softmax_layout, "STREAMED_LANES", lanes)
    given = draw((2, 131089), 1, "float32", "cpu")
    with host.execution() as device, noted_layouts() as found:
        device.chip = Chip(227 << 10, clusters=True)
        beside = given.call().detach()
        with parts():
            value_agrees_with_truth(given)
            assert same_bits(given.call(), beside)
    assert {(x.streamed, x.streamed_vectors) for x in found} >= {(512 if lanes else 128, 16)}


@pytest.mark.parametrize(("count", "ahead"), [(1, 16), (5, 16), (5, 2)])
def test_slices_of_several_tiles_and_whole_ones(count: int, ahead: int, fresh_plans: Callable[[], None]) -> None:
    """Two tiles, with a slice each or five in all: gradients in one pass and in two, and values without gradients."""
    with few_slices(count, ahead), noted_layouts() as found:
        given = draw((2, 1025, 40), 1, device=KERNELS)
        for reduction in ("mean", "none"):
            agrees_with_truth(given, reduction)
        value_agrees_with_truth(given)
        writes_one_gradient_in_one_pass_or_two(given)
    assert {(x.kind, x.chunks, x.slices) for x in found} == {("column_slices", 2, max(2, count))}


@pytest.mark.parametrize("shape", [(70, 128), (133, 264), (21, 1104)], ids=str)
def test_values_alone_of_short_rows(shape: tuple[int, int], fresh_plans: Callable[[], None]) -> None:
    """Short rows stay in registers. A warp processes several of them, in up to 10 chunks or in up to 5."""
    given = draw(shape, 1, device=KERNELS)
    labels = given.target.clone()
    labels[3 : shape[0] // 2] = -100
    few = given._replace(target=labels)
    chosen: list[dict[str, Any]] = [{}, {"weight": weights(shape[1]), "mask": mask(labels.shape)}]
    for chunks in (10, 5):
        fresh_plans()
        with pipelined(chunks), noted_layouts() as found:
            value_agrees_with_truth(given)
            for options in chosen:
                is_the_same_with_and_without_gradient(few, **options)
        assert found and all(x.turns for x in found)


@pytest.mark.parametrize("classes", [136, 1104])
def test_values_alone_of_short_rows_do_not_depend_on_the_grid(classes: int, fresh_plans: Callable[[], None]) -> None:
    given = draw((300 if classes < 1000 else 40, classes), 1, device=KERNELS)
    found = []
    for processors in (1, 7):
        execution = host.execution(processors=processors, seed=processors) if not GPU else nullcontext()
        with execution, pipelined():
            fresh_plans()
            found += [given.function(**given.arguments, reduction=x) for x in ("mean", "sum")]
    assert all(same_bits(a, b) for a, b in zip(found[:2], found[2:], strict=True))


@pytest.mark.parametrize("classes", [128, 1104])
def test_short_rows_without_a_loss_in_registers(classes: int, fresh_plans: Callable[[], None]) -> None:
    given = draw((21, classes), 1, device=KERNELS)
    with pipelined(), noted_layouts() as found:
        survives_labels_out_of_range(given)
        leaves_rows_out(given)
        keeps_edges((21, classes), 1, KERNELS)
    assert found and all(x.turns for x in found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "label_smoothing"),
    [
        (*x, label_smoothing)
        for x, label_smoothing in in_turn(
            [
                ((300, 1024), "float32"),
                ((300, 4096), "float32"),
                ((300, 32000), "bfloat16"),
                ((300, 32000), "float32"),
                ((300, 50257), "bfloat16"),
                ((300, 128256), "bfloat16"),
                ((150, 262144), "bfloat16"),
                ((130, 140001), "float32"),
                ((3, 1048577), "float32"),
                ((70, 600001), "float32"),
                ((3, 128256), "float16"),
            ],
            [0.0, 0.1],
        )
    ],
    ids=str,
)
def test_a_whole_chip(
    shape: tuple[int, ...], dtype: str, label_smoothing: float, fresh_plans: Callable[[], None]
) -> None:
    """Uses all the shared memory of the GPU."""
    device = torch_device.devices[torch.cuda.current_device()]
    device.chip = dataclasses.replace(device.chip, shared=torch_device.TorchDevice(device.index).chip.shared)
    fresh_plans()
    given = draw(shape, 1, dtype, KERNELS)
    agrees_with_truth(given, label_smoothing=label_smoothing)
    value_agrees_with_truth(given, label_smoothing=label_smoothing)


#: Shapes of many dimensions, and the class dimension.
PLACED = {
    "subwarp": ((3, 5, 6, 35), 3),
    "block": ((1, 2, 3, 1030), 3),
    "cluster": ((1, 2, 3, 5003), 3),
    "thread_per_row": ((3, 5, 6, 8), 1),
    "copied": ((3, 200, 2, 4), 1),
}


@pytest.mark.parametrize(("layout", "place", "reduction"), in_turn(list(PLACED), PLACES, REDUCTIONS, times=2))
def test_places(layout: str, place: str, reduction: str) -> None:
    """Rows begin at any address, with other data between them; their gradients have no gaps."""
    shape, class_dim = PLACED[layout]
    agrees_with_truth(draw(shape, class_dim, device=KERNELS, place=place), reduction)


@pytest.mark.parametrize("class_dim", range(4))
def test_class_dimensions(class_dim: int) -> None:
    agrees_with_truth(draw((3, 4, 5, 8), class_dim, device=KERNELS))


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_orders_in_memory(order: tuple[int, ...]) -> None:
    """Channels last and other permutations: the gradient has the logits' order of dimensions."""
    shape = (3, 5, 4, 8)
    given = draw(shape, 1, device=KERNELS)
    inverse = sorted(range(4), key=order.__getitem__)
    x = given.input.permute(order).contiguous().permute(inverse)
    given = given._replace(input=x)
    agrees_with_truth(given)
    agrees_with_truth(given, "none")
    leaf = x.detach().requires_grad_()
    assert gradient(F.cross_entropy(**{**given.arguments, "input": leaf}), leaf).stride() == x.stride()


def test_expanded_logits_and_labels() -> None:
    given = draw((6, 10), 1, device=KERNELS)
    agrees_with_truth(given._replace(input=given.input[:1].expand(6, 10), target=given.target[1:2].expand(6)))
    agrees_with_truth(given._replace(input=given.input[:, :1].expand(6, 10)))


def test_one_row_without_other_dimensions() -> None:
    for reduction in ("mean", "none"):
        agrees_with_truth(draw((11,), 0, device=KERNELS), reduction)


@pytest.mark.thorough
@pytest.mark.parametrize("labels", ["uint8", "int8", "int16", "int32", "int64", "bool"])
def test_labels_of_every_dtype(labels: str) -> None:
    classes = 2 if labels == "bool" else 11
    agrees_with_truth(draw((37, classes), 1, device=KERNELS, labels=labels))


def test_labels_beyond_the_sign_of_a_byte() -> None:
    agrees_with_truth(draw((37, 256), 1, device=KERNELS, labels="uint8"))


# ----------------------------------------------------------------------------------------------------------------------
# Options


def weights(classes: int, dtype: str = "float32") -> Tensor:
    """Class weights that are not contiguous, some of them 0."""
    w = torch.rand(2 * classes, generator=torch.Generator().manual_seed(2)) + 0.25
    w[::6] = 0.0
    return w.to(getattr(torch, dtype)).to(KERNELS)[::2]


def mask(shape: Any) -> Tensor:
    """A mask of about two rows in three, broadcast along the first dimension."""
    chosen = torch.rand(tuple(shape[1:]) or (1,), generator=torch.Generator().manual_seed(3)) < 0.67
    return chosen.to(KERNELS)


@pytest.mark.parametrize(
    "layout",
    short_or_full(
        ("subwarp", "block, cluster", "thread_per_row_packed", "label_only_rows", "label_only_columns"), tuple(LAYOUTS)
    ),
)
def test_weights_smoothing_and_mask(layout: str) -> None:
    given = drawn(layout)
    chosen: dict[str, Any] = {"weight": weights(given.input.shape[1]), "mask": mask(given.target.shape)}
    if layout in SOFTMAX_LAYOUTS:
        chosen["label_smoothing"] = 0.2
    agrees_with_truth(given, **chosen)
    agrees_with_truth(given, normalizer=torch.tensor(7.0, device=KERNELS), **chosen)


@pytest.mark.parametrize(
    ("layout", "reduction"),
    in_turn(short_or_full(("subwarp", "block", "two_pass", "thread_per_row"), SOFTMAX_LAYOUTS), REDUCTIONS[::-1]),
)
def test_parameters_of_logits_and_rows(layout: str, reduction: str) -> None:
    chosen: dict[str, Any] = {"softcap": 4.0, "logit_scale": 0.7, "gamma": 2.0, "poly": 1.0, "z_loss": 0.01}
    agrees_with_truth(drawn(layout), reduction, **chosen)


@pytest.mark.parametrize("shape", [(70, 83), (3, 43, 5, 3)], ids=str)
def test_gradients_that_are_zeros_before(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of few log-probabilities are cleared before the kernel runs, as if they were large."""
    for name in ("SPARSE_BYTES", "SPARSE_APART_BYTES", "SPARSE_ROW_BYTES", "SPARSE_APART_ROW_BYTES"):
        monkeypatch.setattr(softmax_layout, name, 0)
    for reduction in REDUCTIONS:
        with noted_layouts() as found:
            agrees_with_truth(draw(shape, 1, device=KERNELS, loss="nll_loss"), reduction)
        assert {x.kind for x in found} == {"label_only_sparse"}
    leaves_rows_out(draw(shape, 1, device=KERNELS, loss="nll_loss"))


@pytest.mark.parametrize("shape", [(40, 128), (40, 130), (5, 2048)])
def test_capped_halves_of_as_many_vectors_as_threads(shape: tuple[int, int]) -> None:
    """A kernel keeps twice the bytes of each capped logit, so the launch must request that much shared memory."""
    agrees_with_truth(draw(shape, 1, dtype="float16", device=KERNELS), softcap=4.0)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_weights_of_another_dtype(dtype: str) -> None:
    given = drawn("subwarp")
    agrees_with_truth(given, weight=weights(given.input.shape[1], dtype))


@pytest.mark.parametrize("reduction", ["sum", "batchmean"])
def test_divisors_that_are_known(reduction: str) -> None:
    agrees_with_truth(drawn("subwarp"), reduction)


def test_normalizers() -> None:
    for normalizer in (7.0, torch.tensor(3.0, device=KERNELS), torch.tensor(3, device=KERNELS)):
        agrees_with_truth(drawn("subwarp"), normalizer=normalizer)


def test_mean_of_no_rows() -> None:
    """The value is NaN, as in torch, and the gradient is 0."""
    given = drawn("subwarp")
    x = given.input.detach().requires_grad_()
    value = F.cross_entropy(x, torch.full_like(given.target, -100))
    assert value.isnan() and bool((gradient(value, x, retain_graph=True) == 0).all())
    assert bool((gradient(value, x, -3.0) == 0).all())


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "reduction"),
    [(*x, y) for x, y in in_turn([("bfloat16", "float32"), ("float32", "float64")], REDUCTIONS)],
)
def test_results_of_another_dtype(dtype: str, out_dtype: str, reduction: str) -> None:
    given = drawn("subwarp", dtype=dtype)
    value = F.cross_entropy(**given.arguments, reduction=reduction, out_dtype=out_dtype)
    exact = F.cross_entropy(**{**given.arguments, "input": given.input.double()}, reduction=reduction)
    assert value.dtype == getattr(torch, out_dtype)
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=0)
    x = given.input.detach().requires_grad_()
    value = F.cross_entropy(**{**given.arguments, "input": x}, reduction=reduction, out_dtype=out_dtype)
    assert gradient(value, x, upstream(value)).dtype == x.dtype


@pytest.mark.parametrize(
    "layout", short_or_full(("subwarp", "block", "thread_per_row", "label_only_columns"), tuple(LAYOUTS))
)
def test_upstream_gradients_of_any_strides(layout: str) -> None:
    given = drawn(layout)
    x = given.input.detach().requires_grad_()
    value = given.function(**{**given.arguments, "input": x}, reduction="none")
    g = upstream(value.detach())
    expected = gradient(value, x, g, retain_graph=True)
    wide = torch.zeros(*g.shape, 2, device=KERNELS)
    wide[..., 0] = g
    turned = g.permute(*reversed(range(g.dim()))).contiguous().permute(*reversed(range(g.dim())))
    for other in (wide[..., 0], turned, torch._neg_view(-g)):
        assert same_bits(gradient(value, x, other, retain_graph=True), expected)
    everywhere = gradient(value, x, 2.0, retain_graph=True)
    assert same_bits(gradient(value, x, torch.tensor(2.0, device=KERNELS).expand(g.shape)), everywhere)


@in_each_layout_of_logits
def test_lse_and_accuracy(layout: str) -> None:
    given = drawn(layout)
    plain = F.cross_entropy(**given.arguments)
    value, lse, accuracy = F.cross_entropy(**given.arguments, return_lse=True, return_accuracy=True)
    assert same_bits(value, plain)
    z = given.input.cpu().double().movedim(1, -1)
    counts, right = given.target.cpu() != -100, z.argmax(-1) == given.target.cpu()
    torch.testing.assert_close(lse.cpu().double(), torch.where(counts, z.logsumexp(-1), 0.0), rtol=1e-6, atol=1e-6)
    assert accuracy.item() == pytest.approx((right & counts).sum().item() / counts.sum().item())


# ----------------------------------------------------------------------------------------------------------------------
# One pass


@in_each_layout
def test_one_pass_or_two(layout: str) -> None:
    writes_one_gradient_in_one_pass_or_two(drawn(layout))


@in_each_layout
def test_value_does_not_depend_on_the_gradient(layout: str) -> None:
    is_the_same_with_and_without_gradient(drawn(layout))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_saved_tensors_that_come_back_elsewhere(reduction: str) -> None:
    """Saved tensors may come back without their gaps and at another address, as after offloading."""

    def elsewhere(x: Tensor) -> Tensor:
        return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)

    given = draw((3, 6, 11), 2, device=KERNELS, place="sliced")
    labels = torch.stack([given.target] * 2, -1)[..., 0]
    chosen = {"weight": weights(11), "mask": mask(labels.shape).expand(labels.shape), "reduction": reduction}
    x = given.input.detach().requires_grad_()

    def found() -> Tensor:
        value = F.cross_entropy(x, labels, class_dim=2, **chosen)
        return gradient(value, x, upstream(value))

    expected = found()
    for pack in (elsewhere, torch.Tensor.contiguous):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, pack):
            torch.testing.assert_close(found(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("classes", "reduction"), [(43, "mean"), (43, "none"), (1031, "mean")])
def test_gradients_of_misaligned_logits_lie_as_these(classes: int, reduction: str) -> None:
    """The gradient has the misalignment of the logits, so that a row has the same vectors in both, and it is no view.
    If saved logits come back aligned, the gradient is aligned, too.
    """
    given = draw((5, classes), 1, device=KERNELS, place="misaligned")
    x = given.input.detach().requires_grad_()

    def found(pack: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, pack):
            value = F.cross_entropy(x, given.target, reduction=reduction)
            g = gradient(value, x, upstream(value))
        assert g._base is None and g.is_contiguous()
        return g

    here, elsewhere = found(lambda x: x), found(torch.clone)
    assert (here.data_ptr() % 16, elsewhere.data_ptr() % 16) == (4, 0)
    torch.testing.assert_close(elsewhere, here, rtol=1e-6, atol=1e-7)


def test_gradients_of_operators_are_aligned() -> None:
    """Graph compilers assume that results of operators are aligned."""
    given = draw((5, 43), 1, device=KERNELS, place="misaligned")
    x = given.input.detach().requires_grad_()
    (g,) = torch.func.grad(lambda x: F.cross_entropy(x, given.target), argnums=(0,))(x)
    assert g.data_ptr() % 16 == 0
    torch.testing.assert_close(g, gradient(F.cross_entropy(x, given.target), x), rtol=1e-6, atol=1e-7)


def test_retained_graph_and_accumulation() -> None:
    given = drawn("subwarp")
    x = given.input.detach().requires_grad_()
    value = F.cross_entropy(x, given.target)
    expected = gradient(value, x, retain_graph=True).clone()
    value.backward(retain_graph=True)
    value.backward()
    assert same_bits(x.grad, expected + expected)
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_edited_logits_are_torchs_error() -> None:
    given = drawn("subwarp")
    x = given.input.detach().requires_grad_()
    y = x * 1.0
    value = F.cross_entropy(y, given.target)
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize(("layout", "reduction"), in_turn(SOFTMAX_LAYOUTS, REDUCTIONS))
def test_gradient_over_the_logits(layout: str, reduction: str) -> None:
    given = drawn(layout)
    x = given.input.detach().requires_grad_()
    value = F.cross_entropy(**{**given.arguments, "input": x}, reduction=reduction)
    expected = gradient(value, x, upstream(value))

    leaf = given.input.clone().requires_grad_()
    logits = leaf * 1.0
    over = F.cross_entropy(**{**given.arguments, "input": logits}, reduction=reduction, inplace_backward=True)
    assert same_bits(over.detach(), value.detach())
    found = torch.autograd.grad(over, logits, upstream(over), retain_graph=True)[0]
    assert found.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    with pytest.raises(RuntimeError, match=r"second backward.*inplace_backward"):
        torch.autograd.grad(over, logits, upstream(over))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_gradient_over_logits_that_another_node_saved_is_torchs_error(reduction: str) -> None:
    given = drawn("subwarp")
    leaf = given.input.detach().requires_grad_()
    value = F.cross_entropy(torch.tanh(leaf), given.target, reduction=reduction, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


def test_gradient_over_logits_with_gaps_is_a_new_one() -> None:
    given = drawn("subwarp", place="sliced")
    x = given.input.detach().requires_grad_()
    expected = gradient(F.cross_entropy(x, given.target), x)
    found = gradient(F.cross_entropy(x, given.target, inplace_backward=True), x)
    assert found.data_ptr() != x.data_ptr()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


#: Layouts that allocate more memory of the size of the logits: a copy, and four coefficients per row of four classes.
MORE_LARGE_MEMORY = ("subwarp, copied", "thread_per_row_packed")


@pytest.mark.parametrize(
    ("layout", "chosen", "full"),
    [
        *((x, {"reduction": y}, 1) for x, y in in_turn([x for x in LAYOUTS if x not in MORE_LARGE_MEMORY], REDUCTIONS)),
        *(
            (x, {"inplace_backward": True}, 0)
            for x in short_or_full(("subwarp", "block, cluster", "thread_per_row"), SOFTMAX_LAYOUTS)
            if x not in MORE_LARGE_MEMORY
        ),
    ],
    ids=str,
)
def test_no_memory_of_the_size_of_the_logits_but_the_gradient(
    layout: str, chosen: dict[str, Any], full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    kind = torch_device.TorchDevice if GPU else HostDevice
    empty = kind.empty

    def counted(self: Any, shape: Any, strides: Any, dtype: str) -> Tensor:
        sizes.append(prod(shape))
        return empty(self, shape, strides, dtype)

    monkeypatch.setattr(kind, "empty", counted)
    given = drawn(layout)
    x = given.input.detach().requires_grad_() * 1.0
    value = given.function(**{**given.arguments, "input": x}, **chosen)
    torch.autograd.grad(value, x, upstream(value))
    assert sum(n >= x.numel() for n in sizes) == full
    assert sum(n for n in sizes if n < x.numel()) <= 5 * given.target.numel() + 1024 + 8 * 1024


# ----------------------------------------------------------------------------------------------------------------------
# Bitwise reproducibility


#: Layouts of long rows. They are slow on the host, where threads take turns at each memory access.
SLOW = ("block, cluster", "two_pass")


@in_each_layout
def test_bits_do_not_depend_on_grid_and_order(layout: str, fresh_plans: Callable[[], None]) -> None:
    executions: dict[str, Callable[[], Any]] = {f"{n} blocks": partial(blocks, n, KERNELS) for n in (1, 3, 50)}
    if not GPU:
        executions |= {f"order {n}": partial(host.execution, seed=n) for n in (1, 2)}
        executions |= {f"{n} processors": partial(host.execution, processors=n, seed=n) for n in (1, 7)}
    if not thorough():  # Some of them in turn, in another thread order than the results they are compared with.
        first = list(LAYOUTS).index(layout)
        chosen = [list(executions)[(first + i) % len(executions)] for i in ((0,) if layout in SLOW else (0, 3))]
        executions = {name: executions[name] for name in chosen}

    def fresh(execution: Callable[[], Any]) -> Any:
        fresh_plans()
        return execution()

    keeps_its_bits(drawn(layout), {name: partial(fresh, x) for name, x in executions.items()})


# ----------------------------------------------------------------------------------------------------------------------
# The divisor of a mean


def means(given: Drawn, **chosen: Any) -> list[Tensor]:
    """The value, and its gradients for the expected grad_output, for another one, in two passes, and in a graph."""
    x = given.input.detach().requires_grad_()
    call = partial(given.function, **{**given.arguments, "input": x, "reduction": "mean", **chosen})
    with torch.no_grad():
        found = [call()]
    found += [gradient(call(), x), gradient(call(), x, -3.0)]
    with cupylosses.set_one_pass(False):
        found.append(gradient(call(), x))
    return [*found, torch.autograd.grad(call(), x, create_graph=True)[0].detach()]


#: Layouts whose kernels may count labels, or tally: slices never count, and few log-probabilities always do.
#: COUNTING has a layout whose lanes share rows, one for clusters, one with a thread per row, and one without a softmax.
FEW_ROWS = [x for x in LAYOUTS if x not in (*OF_MANY_ROWS, "column_slices", "label_only_few")]
COUNTING = ["subwarp", "block, cluster", "thread_per_row", "label_only_columns"]


@pytest.mark.parametrize(("layout", "masked"), in_turn(short_or_full(COUNTING, FEW_ROWS), [False, True]))
def test_few_labels_are_counted_without_a_launch(
    layout: str, masked: bool, fresh_plans: Callable[[], None], ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels count the labels, or tally the inactive rows, and get the bits that a separate launch gets."""
    given = drawn(layout)
    mask = torch.arange(given.target.numel(), device=KERNELS).reshape(given.target.shape) % 3 != 0
    chosen = {"mask": mask} if masked else {}
    own = means(given, **chosen)
    # Backward through a gradient needs the divisor itself.
    assert ran.count("denominator") == 1
    monkeypatch.setattr(softmax_layout, "SELF_COUNTING_ROWS", 0)
    fresh_plans()
    ran.clear()
    with monkeypatch.context() as counted:
        counted.setattr(execute, "tallied", lambda *_: None)
        before = means(given, **chosen)
    assert ran.count("denominator") == 5
    assert all(map(same_bits, own, before))
    ran.clear()
    forget_assumptions(monkeypatch)
    tallied = means(given, **chosen)
    # If not all rows count, the assumption of the first gradient is wrong, and the second gradient is not tallied,
    # unless it is launched before the GPU has reported that.
    every_row_counts = not masked and bool((given.target != -100).all())
    found, expected = ran.count("denominator"), 2 if every_row_counts else 3
    assert found == expected or (KERNELS == "cuda" and found == 2)
    assert all(map(same_bits, own, tallied))


def forget_assumptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all gradients assume that every row counts, even where that assumption was wrong before."""
    for device in torch_device.devices.values():
        monkeypatch.setattr(device, "_missed", None)


@pytest.mark.parametrize("rows", [1025, 1300])
def test_assumptions_that_are_wrong(
    rows: int, fresh_plans: Callable[[], None], ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wrong assumption, every backward of the graph writes gradients again, and later calls count first."""
    forget_assumptions(monkeypatch)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 4, generator=generator).to(KERNELS).requires_grad_()
    labels, some = torch.randint(4, (rows,), generator=generator).to(KERNELS), rows // 3
    (expected,) = torch.autograd.grad(F.cross_entropy(x, labels), x)
    labels[some:] = -100
    for launches in (["value_and_gradient"] * 2, ["denominator", "value_and_gradient"]):
        fresh_plans()  # `ran` misses known launches, which request no launcher.
        ran.clear()
        value = F.cross_entropy(x, labels)
        found = torch.autograd.grad(value, x, retain_graph=True)[0]
        wait()
        assert ran[:2] == launches
        again = torch.autograd.grad(value, x)[0]
        assert same_bits(found, again) and not found[some:].any()
        torch.testing.assert_close(found[:some], expected[:some] * (rows / some), rtol=1e-6, atol=0)
    with torch.no_grad():
        ran.clear()
        assert same_bits(F.cross_entropy(x, labels), value.detach()) and ran == ["value"]


@pytest.mark.parametrize(("rows", "counts"), [(1, 0), (257, 0), (1024, 0), (1025, 0)])
def test_labels_that_are_counted(rows: int, counts: int, ran: list[str]) -> None:
    """A value needs no separate launch to count labels."""
    given = draw((rows, 4), 1, device=KERNELS)
    value_agrees_with_truth(given)
    assert ran.count("denominator") == counts


def test_weights_are_summed_by_a_launch_before(ran: list[str]) -> None:
    """The launch adds weights in its own order, which a kernel keeps only if one warp adds them all."""
    weight = torch.arange(4.0, device=KERNELS)
    for rows, kernels in ((256, ["value"]), (257, ["denominator", "value"])):
        given = draw((rows, 4), 1, device=KERNELS)
        ran.clear()
        given.function(**given.arguments, weight=weight)
        assert ran == kernels


# ----------------------------------------------------------------------------------------------------------------------
# Rows that do not count, labels out of range, edges of the domain


@pytest.mark.parametrize(("layout", "reduction", "bad"), in_turn(list(LAYOUTS), REDUCTIONS, BAD_ROWS))
def test_rows_that_do_not_count(layout: str, reduction: str, bad: float) -> None:
    leaves_rows_out(drawn(layout), (reduction,), (bad,))


@pytest.mark.parametrize(("layout", "label"), in_turn(list(LAYOUTS), list(BAD_LABELS)), ids=str)
def test_labels_out_of_range(layout: str, label: str) -> None:
    survives_labels_out_of_range(drawn(layout), (label,))


@in_each_layout_of_logits
def test_edges(layout: str, fresh_plans: Callable[[], None]) -> None:
    x, few, sliced = LAYOUTS[layout], layout in OF_MANY_ROWS, layout == "column_slices"
    most = 7 if layout == "interleaved_rows" else 8
    many = few_rows_are_many() if few else some_rows_are_many() if sliced else nullcontext()
    shape = x.fewer if sliced and x.fewer else x.shape
    with many, noted_layouts() as found:
        keeps_edges((21, shape[1], *[min(n, most) if few else n for n in shape[2:]]), x.class_dim, KERNELS)
    assert {x.kind for x in found} == {layout.partition(",")[0]}


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


@pytest.mark.parametrize("layout", ["subwarp", "thread_per_row"])
def test_labels_are_checked(layout: str, fresh_plans: Callable[[], None]) -> None:
    given = drawn(layout)
    target = given.target.clone()
    at = (1,) * target.dim()
    target[at] = 99
    position = ", ".join("1" for _ in at)
    text = rf"cross_entropy: `target\[{position}\]` must be a class index, 0 to {given.input.shape[1] - 1}.*got 99"
    wrong = partial(F.cross_entropy, **{**given.arguments, "target": target})
    right = partial(F.cross_entropy, **given.arguments)
    expected = right()

    with pytest.raises(IndexError, match=text):
        wrong(check_targets="sync")
    assert same_bits(right(), expected), "an error is raised once"

    with pytest.raises(IndexError, match=text):
        assert wrong(check_targets="lazy").isnan()
        wait()
        right()
    assert same_bits(right(), expected)

    assert wrong(check_targets="off").isnan()
    wait()
    assert same_bits(right(), expected)


def test_ignored_label_of_ones_own() -> None:
    """``ignore_index`` may be a class, or a number that is no class."""
    given = drawn("subwarp")
    for ignored in (3, 255, -1, 1 << 40):
        target = torch.where(given.target == -100, torch.tensor(ignored, device=KERNELS), given.target)
        agrees_with_truth(given._replace(target=target), ignore_index=ignored, check_targets="sync")


# ----------------------------------------------------------------------------------------------------------------------
# Sums by torch


@pytest.mark.parametrize("layout", ["subwarp", "thread_per_row", "packed_rows", "label_only_rows"])
def test_one_grad_output_for_all_rows_is_not_written_out(layout: str, ran: list[str]) -> None:
    """A kernel that reads a single grad_output for all rows gives the bits of one number per row."""
    given = drawn(layout)
    x = given.input.detach().requires_grad_()
    values = given.function(**{**given.arguments, "input": x}, reduction="none")
    (expected,) = torch.autograd.grad(values, x, torch.full_like(values, -2.5), retain_graph=True)
    ran.clear()
    with torch.no_grad():
        upstream = torch.tensor(-2.5, dtype=values.dtype, device=values.device).expand(values.shape)
    (found,) = torch.autograd.grad(values, x, upstream)
    assert same_bits(found, expected)
    assert ran in (["from_residual"], ["value_and_gradient"])
