"""Launch geometry of the softmax engine: pure functions of integers, checked against the kernels' preconditions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cupylosses.checks import FLOATING
from cupylosses.engines.device import COUNTERS
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.engines.softmax.layout import (
    BLOCK_THREADS,
    COLUMN_THREADS,
    FEW_CLASSES,
    LANE_CLASSES,
    LANE_EDGES,
    LANE_ROWS,
    MANY_ROWS,
    MAX_CHUNKS,
    MAX_CLUSTER,
    ODD_CLUSTER,
    PACKED_CLASSES,
    PACKED_CLASSES_HEAVY,
    PACKED_CLASSES_NARROW,
    PACKED_CLASSES_WHOLE,
    PACKED_THREADS,
    PART_BYTES,
    ROWS_PER_THREAD,
    SHARED_BYTES,
    STREAMED_FEW_ROWS,
    STREAMED_ROWS,
    THREAD_PER_ROW_THREADS_MIN,
    THREADS,
    WARP,
    WARP_CHUNKS,
    WARP_VECTORS,
    RowLayout,
    RowStrides,
)
from cupylosses.engines.softmax.plan import rows_of
from cupylosses.engines.strides import dense_strides, merge
from cupylosses.interop import ITEMSIZE
from cupylosses.jit.gpu import DECLARED_BYTES, Chip

#: Class counts around the capacity of each layout.
CLASSES = sorted(
    {1, 2, 3, 10}
    | {vec_size * k + d for vec_size in (2, 4, 8) for k in (1, 2) for d in (-1, 0, 1)}
    | {WARP * WARP_VECTORS * vec_size + d for vec_size in (1, 2, 4, 8) for d in (-1, 0, 1)}
    | {n * PART_BYTES // size + d for n in (1, 2, 8) for size in (2, 4, 8) for d in (-1, 0, 1)}
    | {FEW_CLASSES, FEW_CLASSES + 1}
    | {SHARED_BYTES // (n * size) + d for n in (64, 128, 256) for size in (2, 4, 8) for d in (0, 1)}
    | {1000, 32000, 50257, 128256, 262144}
)


#: A GPU with clusters and the most shared memory, one without clusters, and what every GPU has.
CHIPS = (Chip(227 << 10, clusters=True), Chip(163 << 10), Chip())

#: Distance between the rows of a target, in rows, and the element at which its first row begins.
PLACES = ((1, 0), (1, 1), (2, 0), (3, 4))

#: Shape, class dimension, dtype, strides and address modulo 16.
Logits = tuple[tuple[int, ...], int, str, tuple[int, ...], int]


def fits_columns(classes: int, size: int) -> bool:
    """True if strided rows of this many classes, each of ``size`` bytes, become columns; others are copied first."""
    return classes * size * THREAD_PER_ROW_THREADS_MIN <= SHARED_BYTES


def without(x: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*x[:dim], *x[dim + 1 :])


def of(
    shape: Sequence[int],
    class_dim: int,
    dtype: str = "float32",
    strides: Sequence[int] | None = None,
    address: int = 0,
    chip: Chip = CHIPS[0],
    heavy: bool = False,
) -> RowLayout:
    """Returns the layout of logits whose gradients have no gaps, as plans request it."""
    strides = dense_strides(shape, (0,) * len(shape)) if strides is None else strides
    dense = dense_strides(shape, strides)
    rows, size = without(shape, class_dim), ITEMSIZE[dtype]
    # Gradients of contiguous classes have the misalignment of the logits.
    beside = address % 16 if strides[class_dim] == 1 else 0
    logits, gradients = (
        RowStrides(without(s, class_dim), s[class_dim], size, at)
        for s, at in ((strides, address % 16), (dense, beside))
    )
    others = dense_strides(rows, (0,) * len(rows))
    return softmax_layout.row_layout(rows, shape[class_dim], logits, gradients, [others] * 3, chip, heavy=heavy)


@st.composite
def logits(draw: st.DrawFn) -> Logits:
    """Draws the geometry of logits with the strides of views."""
    classes = draw(st.one_of(st.sampled_from(CLASSES), st.integers(1, 1 << 18)))
    rows = draw(st.lists(st.sampled_from([1, 1, 2, 3, 5, 8, 16, 64]), max_size=4))
    class_dim = draw(st.integers(0, len(rows)))
    shape = (*rows[:class_dim], classes, *rows[class_dim:])
    strides, step = [0] * len(shape), 1
    for d in draw(st.permutations(range(len(shape)))):
        if draw(st.integers(0, 7)) == 0:
            continue  # Expanded.
        strides[d] = step * draw(st.sampled_from([1, 1, 1, 2]))
        step = strides[d] * shape[d] + draw(st.sampled_from([0, 0, 1, 8]))
    dtype = draw(st.sampled_from(FLOATING))
    together = strides[class_dim] == dense_strides(shape, strides)[class_dim] == 1
    assume(together or fits_columns(classes, ITEMSIZE[dtype]))
    address = draw(st.sampled_from([0, 0, 0, ITEMSIZE[dtype], 8])) % 16
    return shape, class_dim, dtype, tuple(strides), address - address % ITEMSIZE[dtype]


# ----------------------------------------------------------------------------------------------------------------------
# Invariants of every layout


@given(logits(), st.sampled_from(CHIPS))
def test_a_row_fits_into_its_unit(x: Logits, chip: Chip) -> None:
    """Shared memory has a place for each class, and a thread for each edge element."""
    shape, class_dim, dtype, strides, address = x
    layout = of(shape, class_dim, dtype, strides, address, chip)
    assert layout.vec_size * ITEMSIZE[dtype] <= 16
    fits(layout, shape[class_dim], ITEMSIZE[dtype], chip, True)


def fits(layout: RowLayout, classes: int, size: int, chip: Chip, alone: bool = False) -> None:
    """Asserts that classes of ``size`` bytes fit into the layout: of logits ``alone``, or also of dense targets."""
    vector = layout.vec_size * size
    assert layout.vec_size in (1, 2, 4, 8)
    assert layout.threads % WARP == 0
    assert layout.warps > 1 or layout.threads & (layout.threads - 1) == 0
    large = layout.warps > 1 or layout.kind in ("block", "two_pass", "windowed")
    assert layout.threads <= (chip.threads if large else THREADS)
    assert layout.chunks >= 1 and (layout.chunks <= MAX_CHUNKS or layout.kind == "column_slices")
    assert layout.cluster in (1, 2, 4, ODD_CLUSTER, 8) if chip.clusters else layout.cluster == 1
    assert layout.cluster == 1 or layout.kind in ("block", "two_pass", "windowed", "column_tiles")
    unit = {"subwarp": layout.width}.get(layout.kind, layout.threads) * layout.cluster
    if layout.kind in ("subwarp", "block"):
        # Every thread has places for as many vectors as the busiest one. If warps share a shifted row, each warp has
        # one more place whenever each of its threads has one.
        more = layout.threads // WARP if alone and layout.kind == "block" and layout.shifted > layout.gathered else 0
        places, rest = divmod(layout.shared, (layout.threads + more) * vector)
        assert rest == 0 and unit * places * layout.vec_size >= classes - classes % layout.vec_size
        assert layout.shared <= chip.shared - DECLARED_BYTES
    if layout.kind in ("subwarp", "block", "two_pass", "windowed"):
        # Each edge element has a thread, which may process several of them in rows with class indices.
        each = max(1, layout.edges)
        assert each * unit >= 2 * (layout.vec_size - 1) or classes % layout.vec_size == 0
        assert each <= LANE_EDGES and unit & (unit - 1) == 0
    if layout.kind == "subwarp":
        assert unit <= WARP and WARP % unit == 0
    if layout.kind == "thread_per_row":
        assert classes * layout.vec_size * size * layout.threads == layout.shared <= SHARED_BYTES
    if layout.kind == "interleaved_rows":
        of_warp = WARP * layout.vec_size * size + 4 * (size == 2)
        assert classes * of_warp * (layout.threads // WARP) == layout.shared <= SHARED_BYTES
    if layout.kind == "thread_per_row_packed":
        assert (classes | 1) * vector * layout.threads == layout.shared <= SHARED_BYTES
    if layout.kind == "two_pass":
        assert layout.shared == 0
    if layout.kind == "windowed":
        window = layout.per_thread
        assert window >= 2 and window & (window - 1) == 0 and layout.threads == layout.warps * WARP
        assert window * layout.threads * vector == layout.shared <= chip.shared - DECLARED_BYTES
    written = ("label_only_rows", "label_only_tiles", "label_only_few")
    if layout.kind in ("packed_rows", *written) or (layout.kind == "columns" and alone):
        assert layout.per_thread > 0
    elif layout.kind not in ("thread_per_row", "interleaved_rows", "windowed"):
        assert layout.per_thread == 0
    if layout.kind == "packed_rows":
        assert WARP <= layout.threads <= PACKED_THREADS and layout.per_thread == classes
        assert layout.threads * classes * size <= layout.shared <= SHARED_BYTES
    if layout.kind == "columns" and layout.warps > 1:
        # The rows of a second block fit, too.
        assert classes * size * WARP == layout.shared and 2 * layout.shared <= chip.shared - DECLARED_BYTES
        assert layout.threads == layout.warps * WARP <= layout.resident
    elif layout.kind == "columns" and not alone:
        assert classes * size * layout.threads == layout.shared <= SHARED_BYTES
    elif layout.kind == "columns":
        assert layout.per_thread == classes and layout.threads == COLUMN_THREADS
    if layout.kind == "column_tiles":
        # In all classes of a warp, vectors begin at the same rows.
        assert not layout.staggered or layout.warps * layout.cluster % layout.vec_size == 0
        # A warp evaluates one row of a vector.
        assert layout.threads == layout.warps * WARP and layout.vec_size <= layout.warps
        assert layout.shared * layout.cluster >= classes * WARP * vector and layout.shared < chip.shared
    if layout.kind == "column_slices":
        # A thread evaluates at most one row of a tile, and each tile of several slices has a counter.
        assert layout.threads == layout.warps * WARP and layout.lanes * layout.vec_size <= layout.threads
        assert layout.slices == layout.chunks or layout.chunks <= COUNTERS
        assert layout.chunks <= layout.slices == layout.width
    together = ("block", "two_pass", "column_tiles", "column_slices", *["subwarp"] * alone)
    assert layout.per_block == (1 if layout.kind in together or layout.warps > 1 else layout.threads // WARP)


@given(logits(), st.sampled_from(FLOATING), st.sampled_from(PLACES), st.sampled_from(CHIPS))
def test_rows_with_a_target_per_class(x: Logits, dtype: str, place: tuple[int, int], chip: Chip) -> None:
    """Every class of both operands fits. Where a thread moves neighbouring classes, a row has the same misalignment in
    both operands and their gradients; if operands are shifted, only in the gradients.
    """
    shape, class_dim, first, strides, address = x
    dense = dense_strides(shape, (0,) * len(shape))
    pitch, offset = place
    apart = tuple(n * pitch if d < len(shape) - 1 else n for d, n in enumerate(dense))
    tensors = [
        (strides, first, address),
        (dense_strides(shape, strides), first, 0),
        (apart, dtype, offset * ITEMSIZE[dtype] % 16),
        (dense_strides(shape, apart), dtype, 0),
    ]
    rows = without(shape, class_dim)
    operands = [RowStrides(without(s, class_dim), s[class_dim], ITEMSIZE[d], at) for s, d, at in tensors]
    size = ITEMSIZE[first] + ITEMSIZE[dtype]
    shared = softmax_layout.dense_in_columns(shape[class_dim], size, chip)
    assume(all(x.class_stride == 1 for x in operands) or shared or fits_columns(shape[class_dim], size))
    others = dense_strides(rows, (0,) * len(rows))
    layout = softmax_layout.dense_layout(rows, shape[class_dim], operands, [others] * 2, chip)
    fits(layout, shape[class_dim], ITEMSIZE[first] + ITEMSIZE[dtype], chip)
    assert layout.vec_size * max(ITEMSIZE[first], ITEMSIZE[dtype]) <= 16
    if layout.vec_size == 1:
        return
    if layout.kind == "columns":
        assert layout.vec_size * min(ITEMSIZE[first], ITEMSIZE[dtype]) >= 4 and prod(rows) % layout.vec_size == 0
        return
    assert all(y.class_stride == 1 for y in operands)
    at = numpy.indices(rows).reshape(len(rows), prod(rows))
    alike = operands[1::2] if layout.shifted else operands
    places = [y.misalignment // y.itemsize + numpy.array(y.strides, dtype=numpy.int64) @ at for y in alike]
    assert all(((y - places[0]) % layout.vec_size == 0).all() for y in places)


@given(logits())
def test_vectors_are_aligned_in_logits_and_gradients(x: Logits) -> None:
    """If a thread moves neighbouring classes, a row has the same misalignment in logits and gradients. If it
    moves neighbouring rows, both are aligned and vectors divide the number of rows.
    """
    shape, class_dim, dtype, strides, address = x
    layout, size = of(shape, class_dim, dtype, strides, address), ITEMSIZE[dtype]
    rows, word = without(shape, class_dim), layout.vec_size * size
    at = numpy.indices(rows).reshape(len(rows), prod(rows))
    dense = dense_strides(shape, strides)
    places = [
        start + size * (numpy.array(without(s, class_dim), dtype=numpy.int64) @ at)
        for start, s in ((address, strides), (address if strides[class_dim] == 1 else 0, dense))
    ]
    if layout.kind == "packed_rows" and layout.step:
        # In memory order, rows of logits have a constant pitch, and gradients have no gaps.
        order = numpy.argsort(places[0])
        pitch = {*numpy.diff(places[0][order])}
        assert len(pitch) == 1 and (places[0] % word == 0).all() and strides[class_dim] == layout.step
        assert {*numpy.diff(places[1][order])} == {size * shape[class_dim]}
        assert not layout.padded or (pitch.pop() % 32 == 0 and word == 16)
        return
    if layout.kind == "packed_rows":
        assert strides == dense and address % word == 0 and word % size == 0
        return
    if layout.shifted:
        assert strides[class_dim] >= dense[class_dim] == 1 and layout.kind in ("subwarp", "block")
        return
    if layout.kind == "interleaved_rows":
        return
    if "thread_per_row" not in layout.kind and layout.kind not in ("columns", "column_tiles", "column_slices"):
        assert layout.vec_size == 1 or (shape[class_dim] == 1 or strides[class_dim] == dense[class_dim] == 1)
        assert ((places[0] - places[1]) % word == 0).all()
        return
    assert prod(rows) % layout.vec_size == 0
    assert layout.vec_size == 1 or not (strides[class_dim] * size % word or dense[class_dim] * size % word)
    # The kernel numbers rows along the innermost dimension of all streams first.
    sizes, merged = merge(rows, [without(strides, class_dim), without(dense, class_dim)])
    for start, stream in zip((address, 0), merged, strict=True):
        assert layout.vec_size == 1 or (stream[0] == 1 and sizes[0] % layout.vec_size == 0)
        assert layout.vec_size == 1 or (start % word == 0 and all(s % layout.vec_size == 0 for s in stream[1:]))


@given(logits(), st.integers(1, 1000))
def test_a_grid_has_work_for_every_block(x: Logits, processors: int) -> None:
    shape, class_dim, dtype, strides, address = x
    layout = of(shape, class_dim, dtype, strides, address)
    blocks = softmax_layout.blocks(layout, layout.chunks, processors)
    teams = blocks // layout.cluster * layout.per_block
    assert blocks >= layout.cluster and blocks % layout.cluster == 0
    assert teams - layout.per_block < layout.chunks
    assert blocks == layout.cluster or blocks * layout.threads <= 2048 * processors


# ----------------------------------------------------------------------------------------------------------------------
# Choice of the layout


@pytest.mark.parametrize(
    ("classes", "dtype", "kind", "cluster"),
    [
        (33, "float32", "subwarp", 1),
        (1024, "float32", "subwarp", 1),
        (1025, "float32", "subwarp", 1),
        (1031, "float32", "block", 1),
        (32768, "float32", "block", 2),
        (33300, "float32", "block", 4),
        (266000, "float32", "block", 8),
        (500000, "float32", "two_pass", 1),
        (2048, "bfloat16", "subwarp", 1),
        (2049, "float16", "subwarp", 1),
        (2057, "float16", "block", 1),
        (65536, "bfloat16", "block", 2),
        (128256, "bfloat16", "block", 4),
        (262144, "bfloat16", "block", 8),
        (512, "float64", "subwarp", 1),
        (513, "float64", "subwarp", 1),
        (515, "float64", "block", 1),
    ],
)
def test_neighbouring_classes(classes: int, dtype: str, kind: str, cluster: int) -> None:
    """A row stays on chip if it fits into a warp, a block or a cluster. Contiguous rows always have 16-byte vectors."""
    layout = of((4096, classes), 1, dtype)
    assert (layout.kind, layout.cluster, layout.vec_size) == (kind, cluster, 16 // ITEMSIZE[dtype])


def test_without_clusters_long_rows_are_read_twice() -> None:
    assert [of((4096, 128256), 1, "bfloat16", chip=x).kind for x in CHIPS] == ["block", "two_pass", "two_pass"]
    assert [of((4096, 32000), 1, "bfloat16", chip=x).kind for x in CHIPS] == ["block", "block", "two_pass"]


def test_short_rows_are_prefetched_for_few_blocks() -> None:
    short, longer = of((32768, 4096), 1), of((16384, 8192), 1)
    assert (short.prefetch, longer.prefetch) == (True, False)
    at_once = [softmax_layout.blocks(short, short.chunks, 100, gradient) for gradient in (True, False)]
    assert at_once == [400, 800] and softmax_layout.blocks(longer, longer.chunks, 100) == 400
    assert not of((32768, 4096), 1, heavy=True).prefetch


@pytest.mark.parametrize(
    ("shape", "dtype", "threads", "vectors"),
    [
        ((8192, 32000), "bfloat16", 128, 8),
        ((8192, 128256), "bfloat16", 128, 8),
        ((STREAMED_ROWS, 32000), "bfloat16", 256, 8),
        ((STREAMED_ROWS - 1, 32000), "bfloat16", 0, 0),
        ((STREAMED_ROWS - 1, 128256), "bfloat16", 256, 8),
        ((STREAMED_FEW_ROWS, 151936), "float32", 512, 16),
        ((STREAMED_FEW_ROWS - 1, 151936), "float32", 0, 0),
        ((2048, 256000), "float32", 128, 16),
        ((2048, 300000), "float32", 0, 0),
        ((32768, 4096), "float32", 0, 0),
        ((65536, 1024), "float32", 0, 0),
    ],
)
def test_values_alone_of_many_long_rows_are_found_in_parts(
    shape: tuple[int, int], dtype: str, threads: int, vectors: int
) -> None:
    x = of(shape, 1, dtype)
    assert (x.streamed, x.streamed_vectors) == (threads, vectors)


@pytest.mark.parametrize(
    ("shape", "dtype", "turns"),
    [
        ((65536, 1024), "float32", 4),
        ((65536, 1024), "bfloat16", 0),
        ((131072, 1024), "float32", 8),
        ((1 << 20, 1024), "float32", 0),
        ((32768, 4096), "float32", 2),
        ((16384, 8192), "float32", 0),
        ((16384, 16384), "float32", 0),
        ((65536, 1001), "float32", 0),
        ((4096, 1024), "float32", 0),
        ((65536, 1024), "float64", 0),
    ],
)
def test_values_alone_of_many_short_rows_are_found_in_registers(shape: tuple[int, int], dtype: str, turns: int) -> None:
    assert of(shape, 1, dtype).turns == turns
    assert of(shape, 1, dtype, heavy=True).turns == 0


def test_few_rows_take_many_blocks() -> None:
    assert of((1, 128256), 1, "bfloat16").cluster == MAX_CLUSTER
    assert (of((16, 1 << 20), 1).kind, of((16, 1 << 20), 1).cluster) == ("two_pass", MAX_CLUSTER)
    assert of((64, 4096), 1).threads > of((4096, 4096), 1).threads
    assert [of((rows, 128), 1, "bfloat16").width for rows in (187, 8192, 1 << 17)] == [8, 4, 2]


def test_labels_of_an_image_are_one_dimension() -> None:
    """The logits have two dimensions, since the other classes are stored between one class of two images."""
    shape, labels, nothing = (8, 64, 64), (4096, 64, 1), (0, 0, 0)
    assert of((8, 19, 64, 64), 1).rank == 2
    assert softmax_layout.label_words(shape, 19, labels, nothing)[0] == 1
    assert softmax_layout.label_words(shape, 19, labels, (0, 64, 1))[0] > 1


@pytest.mark.parametrize(
    ("rows", "classes", "kind"),
    [
        (LANE_ROWS, 1, "thread_per_row"),
        (LANE_ROWS, 2, "thread_per_row_packed"),
        (LANE_ROWS, LANE_CLASSES, "thread_per_row_packed"),
        (LANE_ROWS, LANE_CLASSES + 1, "subwarp"),
        (LANE_ROWS + 1, FEW_CLASSES, "thread_per_row_packed"),
        (LANE_ROWS + 1, FEW_CLASSES + 1, "subwarp"),
    ],
)
def test_few_neighbouring_classes_are_one_threads(rows: int, classes: int, kind: str) -> None:
    assert of((rows, classes), 1).kind == kind


@pytest.mark.parametrize(
    ("classes", "dtype", "kind", "vec_size", "threads"),
    [
        (2, "float32", "thread_per_row", 4, 128),
        (19, "float32", "thread_per_row", 4, 128),
        (21, "float32", "thread_per_row", 4, 128),
        (150, "float32", "column_tiles", 1, 256),
        (19, "bfloat16", "thread_per_row", 4, 128),
        (384, "bfloat16", "column_tiles", 2, 256),
        (96, "float64", "column_tiles", 1, 256),
    ],
)
def test_classes_that_lie_apart(classes: int, dtype: str, kind: str, vec_size: int, threads: int) -> None:
    layout = of((4, classes, 32, 32), 1, dtype)
    assert (layout.kind, layout.vec_size, layout.threads) == (kind, vec_size, threads)


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        ((MANY_ROWS, 10), "float32", "packed_rows"),
        ((MANY_ROWS - 1, 10), "float32", "thread_per_row_packed"),
        ((MANY_ROWS, PACKED_CLASSES - 1), "float32", "packed_rows"),
        ((MANY_ROWS, PACKED_CLASSES_WHOLE), "bfloat16", "packed_rows"),
        # Rows of whole vectors.
        ((MANY_ROWS, PACKED_CLASSES_WHOLE + 8), "bfloat16", "subwarp"),
        ((MANY_ROWS, 2048), "float32", "subwarp"),
        ((MANY_ROWS, 2050), "float32", "block"),
        ((MANY_ROWS, PACKED_CLASSES + 1), "float32", "subwarp"),
        ((MANY_ROWS, PACKED_CLASSES_NARROW - 1), "bfloat16", "packed_rows"),
        ((MANY_ROWS, PACKED_CLASSES_NARROW + 1), "bfloat16", "subwarp"),
        ((4, 8, 64, 64), "float32", "columns"),
        ((4, 9, 64, 64), "float32", "thread_per_row"),
        ((3, 8, 64, 64), "float32", "thread_per_row"),
        ((1, 47, 32, 32), "float32", "thread_per_row"),
        ((1, 48, 32, 32), "float32", "column_tiles"),
        ((1, 95, 32, 32), "bfloat16", "thread_per_row"),
        ((1, 96, 32, 32), "bfloat16", "column_tiles"),
        ((1, 48, 32, 31), "float32", "thread_per_row"),
        ((1, 64, 256, 256), "float32", "thread_per_row"),
        ((1, 96, 256, 256), "float32", "column_tiles"),
        ((1, 127, 256, 256), "bfloat16", "thread_per_row"),
        ((1, 128, 256, 256), "bfloat16", "column_tiles"),
        ((1, 95, 257, 257), "bfloat16", "interleaved_rows"),
        ((1, 96, 257, 257), "bfloat16", "column_tiles"),
        ((1, 95, 257, 257), "float32", "interleaved_rows"),
        ((4, 32000, 32, 32), "float32", "column_slices"),
    ],
    ids=str,
)
def test_many_rows_go_to_registers(shape: tuple[int, ...], dtype: str, kind: str) -> None:
    assert of(shape, 1, dtype).kind == kind


@pytest.mark.parametrize(
    ("classes", "strides", "dtype", "address", "found"),
    [
        (10, (13, 1), "bfloat16", 0, (1, 1, False)),
        (10, (13, 1), "float64", 8, (1, 1, False)),
        (10, (12, 1), "float32", 8, (2, 1, False)),
        (10, (16, 1), "bfloat16", 0, (8, 1, True)),
        # Rows that do not begin at a multiple of 16 bytes are padded as long as they end within their pitch.
        (10, (16, 1), "bfloat16", 2, (1, 1, True)),
        (15, (16, 1), "bfloat16", 4, (2, 1, False)),
        (15, (30, 2), "float32", 0, (2, 2, False)),
        (15, (61, 4), "bfloat16", 0, (1, 4, False)),
        (100, (103, 1), "bfloat16", 6, (1, 1, False)),
        (100, (200, 2), "bfloat16", 0, (8, 2, False)),
        (50, (100, 2), "float32", 0, (4, 2, False)),
        # Large gaps, large class strides, rows of too many bytes, and overlapping rows.
        (10, (21, 1), "bfloat16", 0, None),
        (10, (50, 5), "bfloat16", 0, None),
        (100, (400, 4), "bfloat16", 0, None),
        (10, (8, 1), "bfloat16", 0, None),
        # Lanes that share rows are as fast with 4-byte elements, and with vectors that need no shift.
        (100, (103, 1), "float32", 0, None),
        (100, (104, 1), "bfloat16", 0, None),
    ],
    ids=str,
)
def test_rows_with_small_gaps_go_to_registers(
    classes: int, strides: tuple[int, int], dtype: str, address: int, found: tuple[int, int, bool] | None
) -> None:
    """``found`` has the elements of a word, the class stride, and True if rows are padded in shared memory."""
    # Gradients start at an aligned address, as vectors require.
    operands = [RowStrides(x[:1], x[1], ITEMSIZE[dtype], at) for x, at in ((strides, address), ((classes, 1), 0))]
    layout = softmax_layout.row_layout((MANY_ROWS,), classes, *operands, [(1,)] * 3, CHIPS[0])
    assert (layout.kind == "packed_rows") == (found is not None)
    assert found is None or (layout.vec_size, layout.step, layout.padded) == found
    assert layout.shared <= SHARED_BYTES
    # `row_layout` and `copied` agree: packed rows are not copied.
    assert found is None or not softmax_layout.copied((MANY_ROWS,), classes, operands, 1, True)
    few = softmax_layout.row_layout((MANY_ROWS - 1,), classes, *operands, [(1,)] * 3, CHIPS[0])
    assert not few.step
    heavy = softmax_layout.row_layout((MANY_ROWS,), classes, *operands, [(1,)] * 3, CHIPS[0], heavy=True)
    assert heavy.step == (layout.step if classes <= PACKED_CLASSES_HEAVY else 0)


def test_rows_with_small_gaps_in_several_dimensions() -> None:
    """Only rows at a constant distance are copied together; strides of labels and other streams do not matter."""

    def step(strides: tuple[int, ...], labels: tuple[int, int] = (512, 1)) -> int:
        tensors = [RowStrides(x, 1, 2, 0) for x in (strides, (5120, 10))]
        found = softmax_layout.row_layout((32, 512), 10, *tensors, [labels] * 3, CHIPS[0]).step
        assert not found or not softmax_layout.copied((32, 512), 10, tensors, 1, True)
        return found

    assert step((6656, 13)) == step((6656, 13), (1, 32)) == 1
    assert step((6669, 13)) == step((0, 13)) == 0


@pytest.mark.parametrize(("step", "kind"), [(2, "columns"), (3, "columns"), (5, "thread_per_row")])
def test_every_few_elements_of_few_classes_go_to_registers(step: int, kind: str) -> None:
    strides = (3 * 4096 * step, 4096 * step, 64 * step, step)
    assert of((4, 3, 64, 64), 1, strides=strides).kind == kind


@pytest.mark.parametrize("class_dim", range(4))
def test_class_dimension_may_be_anywhere(class_dim: int) -> None:
    shape = [2, 3, 8, 64]
    assert ("thread_per_row" in of(shape, class_dim).kind) == (class_dim != 3)


def test_channels_last_has_neighbouring_classes() -> None:
    n, c, h, w = 2, 64, 4, 5
    layout = of((n, c, h, w), 1, strides=(c * h * w, 1, w * c, c))
    assert (layout.kind, layout.vec_size, layout.rank) == ("subwarp", 4, 1)
    assert layout.words[:2] == [n * h * w, c]


def test_transposed_rows_have_neighbouring_rows() -> None:
    assert of((64, 12), 1, strides=(1, 64)).kind == "thread_per_row"
    assert of((64, 12), 1, strides=(1, 64)).vec_size > 1
    assert of((63, 12), 1, strides=(1, 63)).vec_size == 1


def test_one_row_and_no_dimensions() -> None:
    layout = of((100,), 0)
    assert (layout.kind, layout.chunks, layout.rank) == ("subwarp", 1, 1)
    assert layout.words[:2] == [1, 100]


@pytest.mark.parametrize(("dtype", "address"), [(d, a) for d in FLOATING for a in range(0, 16, ITEMSIZE[d])])
def test_misaligned_logits(dtype: str, address: int) -> None:
    """Rows of many classes keep their vectors, since their gradients have the same misalignment."""
    most = 16 // ITEMSIZE[dtype]
    assert of((4, 64), 1, dtype, address=address).vec_size == most
    # 8-byte elements are read one by one, others are shifted.
    found = of((4, 64), 1, dtype, strides=(65, 1), address=address)
    assert (found.vec_size, found.shifted) == ((1, False) if most == 2 else (most, True))
    apart = of((4, 5, 64), 1, dtype, address=address).vec_size * ITEMSIZE[dtype]
    widest = min(16, ROWS_PER_THREAD * ITEMSIZE[dtype])
    assert address % apart == 0 and (apart == widest or address % (2 * apart))


@pytest.mark.parametrize("step", [64, 68, 66, 65])
def test_rows_of_a_larger_matrix(step: int) -> None:
    found = of((8, 64), 1, strides=(step, 1))
    assert (found.vec_size, found.shifted) == (4, step % 4 > 0)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("classes", [35, 1001, 50257])
def test_odd_rows_keep_their_vectors(dtype: str, classes: int) -> None:
    """Rows differ in misalignment, but a row's gradients have that of its logits."""
    assert of((8, classes), 1, dtype).vec_size == 16 // ITEMSIZE[dtype]


def test_few_threads_take_a_short_row() -> None:
    """A warp then processes several short rows at once, and a long row has as many threads as it has work for."""
    widths = {c: of((1 << 16, c), 1).width for c in (33, 64, 128, 129, 512, 1024)}
    assert all(a <= b for a, b in zip(list(widths.values()), list(widths.values())[1:], strict=False))
    assert widths[33] < WARP == widths[1024]
    assert of((4096, 4096), 1).threads < of((4096, 32000), 1).threads == BLOCK_THREADS


def test_groups_are_bounded() -> None:
    assert of((1 << 20, 1000), 1).chunks == MAX_CHUNKS
    # Few warps, with many registers each.
    assert of((1 << 21, 64), 1).chunks == WARP_CHUNKS
    assert of((1 << 20, 10), 1).chunks == WARP_CHUNKS and of((1 << 21, 10), 1).chunks == MAX_CHUNKS
    assert of((1 << 20, 10), 1, "float64").chunks == MAX_CHUNKS
    # The next tile is in flight while a warp evaluates one.
    assert of((1 << 23, 4), 1).chunks == WARP_CHUNKS
    assert of((7, 32000), 1).chunks == 7


@pytest.mark.parametrize(
    ("shape", "dtype", "strides", "address", "vec_size", "tiles"),
    [
        ((4, 150, 257, 257), "float32", None, 0, 2, 4 * 1101),
        ((4, 150, 257, 257), "bfloat16", None, 0, 4, 4 * 551),
        ((4, 150, 257, 257), "float64", None, 0, 1, 0),
        # Rows of pixels with gaps, of which a tile may have 120.
        ((4, 150, 257, 119), "bfloat16", (150 * 257 * 128, 257 * 128, 128, 1), 0, 1, 0),
        ((4, 150, 256, 256), "float32", None, 4, 1, 0),
        ((8191, 1000), "bfloat16", (1, 8191), 0, 2, 137),
        # Too few rows of pixels, and gradients that begin at other places.
        ((40, 150, 1, 67), "float32", None, 0, 1, 0),
        ((4, 150, 129, 129), "float32", (151 * 129 * 129, 129 * 129, 129, 1), 0, 1, 0),
    ],
    ids=str,
)
def test_vectors_of_rows_that_begin_anywhere(
    shape: tuple[int, ...],
    dtype: str,
    strides: tuple[int, ...] | None,
    address: int,
    vec_size: int,
    tiles: int,
) -> None:
    """Tiles are staggered where no vector divides the rows. Their gradients begin at the same place in each class."""
    layout = of(shape, 1, dtype, strides=strides, address=address)
    assert (layout.vec_size, layout.staggered) == (vec_size, vec_size > 1)
    assert not layout.staggered or layout.chunks == tiles


def test_clusters_of_seven_where_those_of_eight_take_turns() -> None:
    """Clusters of eight blocks process the 64 tiles in three rounds, clusters of seven in two."""
    layout = of((4096, 4096), 1, "bfloat16", strides=(1, 4096))
    assert layout.cluster == ODD_CLUSTER
    assert softmax_layout.blocks(layout, layout.chunks, 132) == 32 * ODD_CLUSTER


def test_rows_too_long_or_too_few_for_tiles_are_sliced() -> None:
    """There are as many slices as blocks run at once, each with some classes per thread. If slices are few, a thread
    has fewer vectors in flight. If there are more tiles, each tile is one slice and needs no counter.
    """
    for rows, classes, tiles, slices, ahead in (
        (1024, 32000, 16, 264, 16),
        (16, 32000, 1, 125, 8),
        (16, 4096, 1, 64, 2),
        (1 << 15, 32000, 512, 512, 16),
    ):
        layout = of((rows, classes), 1, "bfloat16", strides=(1, rows))
        assert (layout.kind, layout.chunks, layout.slices) == ("column_slices", tiles, slices)
        assert layout.per_thread == ahead
        assert softmax_layout.blocks(layout, layout.chunks, 132) == min(slices, 2 * 132)
    assert of((16, 100000), 1, "float64", strides=(1, 16)).per_thread == 2
    # Tiles have fewer rows if rows are few and fit into a cache, but a tile has whole sectors.
    for rows, classes, tiles, lanes in ((64, 32000, 4, 8), (64, 16000, 1, 32), (64, 300000, 1, 32), (32, 32768, 2, 8)):
        layout = of((rows, classes), 1, "bfloat16", strides=(1, rows))
        assert (layout.vec_size, layout.chunks, layout.lanes) == (2, tiles, lanes)
    # Several warps read a class of a tile if classes begin within sectors, unless some warps would have no rows.
    for rows, vec_size, tiles, lanes in ((1000, 2, 8, 64), (999, 1, 8, 128), (33, 1, 1, 64), (130, 2, 3, 32)):
        layout = of((rows, 1000001), 1, "bfloat16", strides=(1, rows))
        assert (layout.vec_size, layout.chunks, layout.lanes) == (vec_size, tiles, lanes)
    # Rows that are read again are sliced however few elements they have; for others, a copy takes less time.
    for rows, classes, copied, again in (
        (8, 1 << 17, False, False),
        (7, 1 << 18, True, False),
        (8, 1 << 16, True, False),
        (8, 1 << 16, False, True),
        (8, 1024, False, True),
        (1000, 1023, True, True),
    ):
        strides = RowStrides((1,), rows, 4, 0)
        assert softmax_layout.copied((rows,), classes, (strides, strides), 1, True, again=again) == copied


@pytest.mark.parametrize(
    ("images", "classes", "rows", "threads"),
    [(8, 16, 4, 128), (8, 47, 4, 128), (8, 48, 4, 64), (8, 95, 2, 64), (7, 47, 2, 128)],
)
def test_interleaved_halves_lie_in_pairs(images: int, classes: int, rows: int, threads: int) -> None:
    """Per class, a warp has a word for each pair of rows and one more. Many classes or few rows mean fewer of these."""
    layout = of((images, classes, 129, 131), 1, "bfloat16")
    assert (layout.kind, layout.vec_size, layout.threads) == ("interleaved_rows", rows, threads)
    assert layout.shared == threads // WARP * classes * (16 * rows + 1) * 4


def test_interleaved_halves_by_the_halves_of_words_that_they_begin_in() -> None:
    """Every class or every second one begins in the same half of a word; gradients in that, the other, or either."""
    for pixels, planes, shifted, step in (
        (1027, 36, False, 2),
        (1027, 38, False, 2),
        (1027, 36, True, 2),
        (1026, 36, True, 1),
    ):
        strides = planes * pixels, pixels, 1
        layout = of((20, 36, pixels), 1, "bfloat16", strides=strides, address=2 * shifted)
        assert (layout.kind, layout.shifted, layout.gathered, layout.step) == ("interleaved_rows", shifted, False, step)
    for strides, step in (((37 * 1027, 1027, 1), 2), ((36 * 1028, 1028, 1), 1)):
        layout = of((20, 36, 1027), 1, "bfloat16", strides=strides)
        assert (layout.kind, layout.shifted, layout.gathered, layout.step) == ("interleaved_rows", False, True, step)
    for strides in ((36 * 1027, -1027, 1), (36 * 1027, 0, 1)):
        assert of((20, 36, 1027), 1, "bfloat16", strides=strides).kind != "interleaved_rows"


def test_columns_of_many_odd_rows_leave_registers_for_more_threads() -> None:
    """Lanes of few classes leave registers for more threads; many rows then have as many partial sums as warps."""
    for shape, dtype, resident, chunks in (
        ((4000, 5, 401), "float32", 768, 3168),
        ((4000, 6, 401), "float32", 512, 2048),
        ((4000, 15, 401), "bfloat16", 768, 3168),
        ((2000, 3, 401), "float32", 768, 2048),
        # Lanes of long dimensions take four rows each.
        ((2, 5, 801, 803), "float32", 512, 2048),
        ((2, 15, 801, 803), "bfloat16", 512, 2048),
        ((2, 3, 800, 804), "float32", 512, 2048),
    ):
        layout = of(shape, 1, dtype)
        assert (layout.kind, layout.resident, layout.chunks) == ("columns", resident, chunks)


@pytest.mark.parametrize(
    ("shape", "class_dim", "dtype", "kind", "rows"),
    [
        ((MANY_ROWS, 2), 1, "bfloat16", "packed_rows", 4),
        ((MANY_ROWS, 16), 1, "float32", "packed_rows", 1),
        ((8, 19, 64, 64), 1, "bfloat16", "columns", 2),
        ((8, 19, 64, 64), 1, "float32", "columns", 1),
        ((8, 19, 63, 65), 1, "bfloat16", "columns", 1),
    ],
)
def test_affine_terms_of_few_classes_in_registers(
    shape: tuple[int, ...], class_dim: int, dtype: str, kind: str, rows: int
) -> None:
    """``rows`` is the number per lane: several tiles fit if classes are contiguous, else a lane loads 4-byte words."""
    operand = rows_of(dense_strides(shape, (0,) * len(shape)), class_dim, ITEMSIZE[dtype], 0)
    given, classes = without(shape, class_dim), shape[class_dim]
    others = dense_strides(given, (0,) * len(given))
    layouts = [
        softmax_layout.dense_layout(given, classes, [operand] * 4, [others] * 2, CHIPS[0], affine, capped)
        for affine, capped in ((True, False), (False, False), (True, True))
    ]
    assert layouts[0].kind == kind and layouts[0].per_thread == classes
    if kind == "columns":
        assert (layouts[0].vec_size, layouts[0].shared) == (rows, 0)
    else:
        assert layouts[0].shared == 2 * rows * layouts[1].shared
    assert layouts[1] == layouts[2] != layouts[0]


def contiguous_or_apart(rows: int, classes: int, itemsize: int, apart: bool) -> RowStrides:
    """Rows with contiguous classes, or with a class stride of ``rows``."""
    return RowStrides((1,), rows, itemsize, 0) if apart else RowStrides((classes,), 1, itemsize, 0)


def test_lanes_share_rows_of_heavy_terms() -> None:
    """Lanes share rows of heavy terms if these are few in 32 bits, and always in 64 bits."""

    def kind(rows: int, itemsize: int, heavy_terms: bool, classes: int = 16) -> str:
        operand = contiguous_or_apart(rows, classes, itemsize, False)
        given = (rows,), classes, [operand] * 4, [(1,)] * 2, CHIPS[0], False
        return softmax_layout.dense_layout(*given, heavy_terms=heavy_terms).kind

    for itemsize in (4, 8):
        assert kind(MANY_ROWS // 2, itemsize, True) == "subwarp"
        assert kind(MANY_ROWS // 2, itemsize, False).startswith("thread_per_row")
    assert kind(MANY_ROWS // 2, 2, True).startswith("thread_per_row")
    assert kind(MANY_ROWS, 4, True) != "subwarp"
    assert kind(MANY_ROWS, 8, True) == "subwarp"
    assert kind(MANY_ROWS // 4, 2, True, 24).startswith("thread_per_row")
    assert kind(MANY_ROWS // 4, 2, True, 25) == "subwarp"
    assert kind(MANY_ROWS // 4, 2, False, 5) == "subwarp"


def test_few_lanes_share_whole_rows_with_a_target_per_class() -> None:
    """A row without edge elements needs no lanes for them. Its lanes read 128 bytes of an operand at once, unless each
    then has fewer than four vectors.
    """

    def width(classes: int, itemsize: int, misalignment: int = 0) -> int:
        operand = RowStrides((classes,), 1, itemsize, misalignment)
        found = softmax_layout.dense_layout((1 << 18,), classes, [operand] * 4, [(1,)] * 2, CHIPS[0])
        assert found.kind == "subwarp"
        return found.width

    assert [width(x, 2) for x in (128, 200, 256, 512, 1024, 2048)] == [4, 4, 8, 8, 16, 32]
    assert [width(x, 4) for x in (128, 256, 512, 1024)] == [8, 8, 16, 32]
    assert [width(x, 2, 2) for x in (256, 512)] == [16, 16]


def test_rows_between_powers_of_two_take_few_threads() -> None:
    """Each thread has enough vectors to pay for what a row costs it."""
    place = contiguous_or_apart(8192, 1 << 16, 2, False)

    def threads(classes: int, dense: bool) -> int:
        if dense:
            return softmax_layout.dense_layout((8192,), classes, [place] * 4, [(1,)] * 2, CHIPS[0]).threads
        return softmax_layout.row_layout((8192,), classes, place, place, [(1,)] * 3, CHIPS[0]).threads

    assert [threads(x, False) for x in (12288, 12296, 24576, 24584)] == [128, 256, 256, 512]
    assert [threads(x, True) for x in (10240, 10248, 20480, 20488)] == [128, 256, 128, 256]


def test_blocks_that_share_a_multiprocessor_take_rows_with_a_target_per_class() -> None:
    """Each block has a small part of a row, if two parts are enough: one block computes while another waits."""

    def blocks(classes: int, itemsize: int) -> tuple[int, int]:
        operand = contiguous_or_apart(4096, classes, itemsize, False)
        found = softmax_layout.dense_layout((4096,), classes, [operand] * 4, [(1,)] * 2, CHIPS[0], True)
        return found.threads, found.cluster

    assert blocks(32000, 2) == (256, 2) and blocks(16000, 4) == (256, 2) and blocks(8000, 8) == (256, 2)
    assert blocks(65536, 2) == (256, 4) and blocks(32000, 4) == (256, 4)


@pytest.mark.parametrize(
    ("rows", "classes", "itemsize", "affine", "expected"),
    [
        (4096, 50257, 2, True, ("windowed", 256, 2, 8)),
        (2048, 128256, 2, True, ("windowed", 256, 4, 8)),
        (1024, 256000, 2, True, ("windowed", 256, 8, 8)),
        (4096, 65536, 2, False, ("windowed", 256, 1, 8)),
        (2048, 128256, 2, False, ("windowed", 256, 2, 8)),
        (4096, 32000, 4, False, ("block", 256, 4, 0)),
        (300, 128256, 2, True, ("windowed", 256, 2, 8)),
        (256, 128256, 2, True, ("windowed", 512, 1, 4)),
        (64, 128256, 2, True, ("windowed", 512, 2, 4)),
        (16, 128256, 2, True, ("block", 512, 8, 0)),
    ],
)
def test_long_rows_with_a_target_per_class_keep_a_window(
    rows: int, classes: int, itemsize: int, affine: bool, expected: tuple[str, int, int, int]
) -> None:
    """An affine term is bound by memory, so that more blocks share a row; few rows take more threads."""
    operand = contiguous_or_apart(rows, classes, itemsize, False)
    found = softmax_layout.dense_layout((rows,), classes, [operand] * 4, [(1,)] * 2, CHIPS[0], affine)
    assert (found.kind, found.threads, found.cluster, found.per_thread) == expected


def test_windows_of_rows_fit_into_little_shared_memory() -> None:
    """Three blocks fit. Without clusters, a block has a row alone."""
    operand = contiguous_or_apart(4096, 128256, 2, False)
    found = [softmax_layout.dense_layout((4096,), 128256, [operand] * 4, [(1,)] * 2, x, True) for x in CHIPS]
    assert [(x.kind, x.cluster) for x in found] == [("windowed", 4), ("windowed", 1), ("windowed", 1)]
    assert all(3 * x.shared <= chip.shared for x, chip in zip(found, CHIPS, strict=True))


@pytest.mark.parametrize(("itemsize", "classes"), [(2, 48), (4, 80), (8, 80)])
def test_few_rows_of_some_classes_are_copied(itemsize: int, classes: int) -> None:
    """There are no asynchronous copies of single 16-bit elements, so a thread processes fewer such classes."""
    for count, copied in ((classes, False), (classes + 8, True)):
        logits = contiguous_or_apart(1000, count, itemsize, True)
        assert softmax_layout.copied((1000,), count, [logits] * 2, 1, True) == copied
