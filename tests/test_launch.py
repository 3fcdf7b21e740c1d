"""Launch geometry: pure functions of integers, checked against brute force.

Python replays the kernels' index arithmetic from the 64-bit words that a kernel receives: every element must be visited
once, at the address that NumPy's strides give, in all streams at once.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupylosses.definition.base import MAX_OPERANDS
from cupylosses.definition.kernel_sources import kernel_directory
from cupylosses.engines.pointwise import layout as pointwise_layout
from cupylosses.engines.pointwise.layout import LINEAR, TILED
from cupylosses.engines.strides import MAX_RANK, broadcast_strides, dense_strides, dimension_words, merge, multiplier
from cupylosses.jit import gpu

ITEMSIZES = (1, 2, 4, 8)


@st.composite
def strided(draw: st.DrawFn, shape: Sequence[int], signed: bool = True) -> tuple[int, ...]:
    """Strides such as views have: dimensions in any order, padded, expanded, with steps, or reversed."""
    strides, step = [0] * len(shape), 1
    for d in draw(st.permutations(range(len(shape)))):
        if draw(st.integers(0, 4)) == 0:
            continue
        sign = draw(st.sampled_from([1, 1, 1, -1])) if signed else 1
        strides[d] = sign * step * draw(st.sampled_from([1, 1, 1, 2]))
        step = abs(strides[d]) * shape[d] + draw(st.sampled_from([0, 0, 1, 8]))
    return tuple(strides)


@st.composite
def index_spaces(draw: st.DrawFn, signed: bool = True) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """A shape, and the strides of one to four streams; several streams often have the same strides."""
    sizes = st.sampled_from([1, 2, 3, 4, 5, 8, 16])
    shape = draw(st.lists(sizes, max_size=6).filter(lambda s: prod(s) <= 4096).map(tuple))
    first = draw(strided(shape, signed))
    others = draw(st.lists(st.one_of(st.just(first), strided(shape, signed)), max_size=3))
    return shape, [first, *others]


@st.composite
def stream_spaces(draw: st.DrawFn) -> tuple[tuple[int, ...], list[pointwise_layout.Stream]]:
    """An index space with element sizes and addresses; an address is a multiple of its element's size."""
    shape, strides = draw(index_spaces())
    streams = []
    for s in strides:
        itemsize = draw(st.sampled_from(ITEMSIZES))
        misalignment = draw(st.sampled_from([0, 0, 0, itemsize, 8])) % 16
        streams.append(pointwise_layout.Stream(s, itemsize, misalignment - misalignment % itemsize))
    return shape, streams


def addresses(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> Counter[tuple[int, ...]]:
    """Counts the tuples of offsets of all elements; a tuple has one offset per stream."""
    return Counter(
        tuple(sum(i * s for i, s in zip(index, stride, strict=True)) for stride in strides)
        for index in itertools.product(*map(range, shape))
    )


def test_brute_force_agrees_with_numpy() -> None:
    memory = numpy.arange(1000)
    view = memory[5:].reshape(5, 199)[1:4, ::3].T
    strides = [s // memory.itemsize for s in view.strides]
    expected = Counter((x - view.flat[0],) for x in view.ravel().tolist())
    assert addresses(view.shape, [strides]) == expected


# ----------------------------------------------------------------------------------------------------------------------
# Strides of new and of broadcast tensors


@given(index_spaces(signed=False))
def test_dense_strides_are_dense(space: tuple[tuple[int, ...], list[tuple[int, ...]]]) -> None:
    shape, (strides, *_) = space
    found = addresses(shape, [dense_strides(shape, strides)])
    assert found == Counter((i,) for i in range(prod(shape)))


@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4), st.tuples(*[st.booleans()] * 4))
def test_dense_strides_keep_a_dense_tensors_order(order: list[int], sizes: list[int], turned: Sequence[bool]) -> None:
    """The order is kept even if dimensions are reversed."""
    view = numpy.empty(sizes, numpy.int8).transpose(order)
    signed = [-s if t else s for s, t in zip(view.strides, turned, strict=True)]
    found = dense_strides(view.shape, signed)
    # The stride of a dimension of size 1 is never used.
    assert [s for s, n in zip(found, view.shape, strict=True) if n > 1] == [
        s for s, n in zip(view.strides, view.shape, strict=True) if n > 1
    ]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_dense_strides_of_degenerate_shapes(shape: tuple[int, ...]) -> None:
    assert len(dense_strides(shape, (0,) * len(shape))) == len(shape)


@pytest.mark.parametrize(
    ("shape", "to"),
    [((), (2, 3)), ((1,), (2, 3)), ((3,), (2, 3)), ((2, 1), (2, 3)), ((2, 3), (2, 3)), ((1, 1, 4), (5, 6, 4))],
)
def test_broadcast_strides_are_numpys(shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    x = numpy.zeros(shape, numpy.int8)
    assert broadcast_strides(shape, x.strides, to) == numpy.broadcast_to(x, to).strides


# ----------------------------------------------------------------------------------------------------------------------
# Merging


@given(index_spaces())
def test_merge_keeps_every_element(space: tuple[tuple[int, ...], list[tuple[int, ...]]]) -> None:
    shape, strides = space
    sizes, merged = merge(shape, strides)
    assert addresses(sizes, merged) == addresses(shape, strides)


@given(index_spaces())
def test_merge_leaves_nothing_to_merge(space: tuple[tuple[int, ...], list[tuple[int, ...]]]) -> None:
    sizes, merged = merge(*space)
    assert 1 not in sizes or sizes == (1,)
    for d in range(len(sizes) - 1):
        assert any(s[d + 1] != s[d] * sizes[d] for s in merged)


@given(st.permutations(range(5)), st.lists(st.integers(1, 5), min_size=5, max_size=5), st.integers(1, 3))
def test_dense_tensors_of_one_order_become_one_dimension(order: list[int], sizes: list[int], count: int) -> None:
    view = numpy.empty(sizes, numpy.int8).transpose(order)
    assert merge(view.shape, [view.strides] * count)[0] == (prod(sizes),)


def test_merge_puts_the_unit_stride_innermost() -> None:
    sizes, strides = merge((64, 32), [(1, 100), (1, 64)])
    assert sizes == (64, 32)
    assert strides == ((1, 100), (1, 64))


# ----------------------------------------------------------------------------------------------------------------------
# Layouts: index arithmetic of the kernels


def quotient(index: int, multiplier: int, size: int) -> int:
    """``quotient`` of ``kernels/core/layout.cuh``."""
    shift = 63 - (64 - (size - 1).bit_length())
    return (index * (multiplier % (1 << 64)) >> 64) >> shift


@given(st.integers(2, 1 << 40), st.integers(0, 1 << 63), st.integers(-1, 1))
def test_multipliers_divide_exactly(size: int, index: int, beside: int) -> None:
    for x in (index, index // size * size + beside, (1 << 63) - 1):
        x = min(max(x, 0), (1 << 63) - 1)
        assert quotient(x, multiplier(size), size) == x // size


class StridedLayout:
    """``StridedLayout`` of ``kernels/core/layout.cuh``, read from the words that the kernel receives."""

    def __init__(self, words: Sequence[int], streams: int, rank: int) -> None:
        fields = iter(words)
        self.rows, self.vectors_per_row, self.row_step, self.column_step, self.fronts = (next(fields) for _ in range(5))
        self.inner_stride = [next(fields) for _ in range(streams)]
        self.rank = next(fields)
        self.size = [next(fields) for _ in range(rank)]
        self.multiplier = [next(fields) for _ in range(rank)]
        self.stride = [[next(fields) for _ in range(rank)] for _ in range(streams)]
        assert next(fields, None) is None
        self.single = rank == 1

    def vectors(self) -> int:
        return self.rows * self.vectors_per_row

    def base(self, row: int) -> list[int]:
        if self.single:
            return [row * s[0] for s in self.stride]
        offsets = [0] * len(self.stride)
        for d in range(self.rank):
            rest = quotient(row, self.multiplier[d], self.size[d]) if d + 1 < self.rank else 0
            for k, s in enumerate(self.stride):
                offsets[k] += (row - rest * self.size[d]) * s[d]
            row = rest
        return offsets

    def at(self, vector: int) -> tuple[int, int]:
        return divmod(vector, self.vectors_per_row)

    def advance(self, cursor: tuple[int, int]) -> tuple[int, int]:
        row, column = cursor[0] + self.row_step, cursor[1] + self.column_step
        return (row + 1, column - self.vectors_per_row) if column >= self.vectors_per_row else (row, column)


class TiledLayout(StridedLayout):
    """``TiledLayout`` of ``kernels/core/layout.cuh``."""

    def __init__(self, words: Sequence[int], streams: int, rank: int, tile: pointwise_layout.Tile) -> None:
        self.tile = tile
        self.size_a, self.size_b, self.tiles_a, self.per_plane, self.planes = words[:5]
        self.stride_a, self.stride_b = words[5 : 5 + streams], words[5 + streams : 5 + 2 * streams]
        super().__init__([0] * (5 + streams) + list(words[5 + 2 * streams :]), streams, rank)

    def vectors(self) -> int:
        return self.planes * self.per_plane * gpu.WARP * self.tile.steps_a * self.tile.steps_b

    def place(self, vector: int) -> tuple[int, int, int]:
        """The plane, and the two coordinates of the micro-tile."""
        tile, (side_a, side_b) = self.tile, self.tile.sides
        index, within = divmod(vector, gpu.WARP * tile.steps_a * tile.steps_b)
        plane, rest = divmod(index, self.per_plane)
        step, lane = divmod(within, gpu.WARP)
        step_a, step_b = divmod(step, tile.steps_b)
        tile_a = (rest % self.tiles_a + rest // self.tiles_a) % self.tiles_a
        a = tile_a * side_a + (step_a * tile.lanes_a + lane % tile.lanes_a) * tile.a
        lanes_b = gpu.WARP // tile.lanes_a
        return plane, a, rest // self.tiles_a * side_b + (step_b * lanes_b + lane // tile.lanes_a) * tile.b


def visited_in_tiles(layout: pointwise_layout.Layout) -> Iterator[tuple[int, list[int]]]:
    """Yields the same as `visited`, for tiles. A vector's first element is also the first in at least one stream."""
    rank = 1 if layout.kind == "tiles" else MAX_RANK
    tiles = TiledLayout(layout.words(), len(layout.strides), rank, layout.tile)
    assert tiles.vectors() == layout.vectors
    for vector in range(tiles.vectors()):
        plane, a, b = tiles.place(vector)
        if a < tiles.size_a and b < tiles.size_b:
            assert a + layout.tile.a <= tiles.size_a and b + layout.tile.b <= tiles.size_b
            for i in range(layout.vec_size):
                here = zip(tiles.base(plane), tiles.stride_a, tiles.stride_b, strict=True)
                at_a, at_b = a + i % layout.tile.a, b + i // layout.tile.a
                yield i, [x + at_a * y + at_b * z for x, y, z in here]


def visited(layout: pointwise_layout.Layout) -> Iterator[tuple[int, list[int]]]:
    """Yields each element that a lane visits: its position in the vector, and its offset in every stream."""
    streams = len(layout.strides)
    if layout.kind == "flat":
        for element in range(layout.elements):
            yield element % layout.vec_size, [0 if a == "splat" else element for a in layout.access]
        return
    if layout.kind in TILED:
        yield from visited_in_tiles(layout)
        return
    if layout.kind == LINEAR:
        elements, *strides = layout.words()
        for element in range(elements):
            yield 0, [element * s for s in strides]
        return
    rows = StridedLayout(layout.words(), streams, pointwise_layout.outer_rank(layout.kind, streams // 2))
    assert rows.vectors() == layout.vectors
    for vector in range(rows.vectors()):
        row, column = rows.at(vector)
        base = rows.base(row)
        for i in range(layout.vec_size):
            inside = [column * layout.vec_size * (1 if layout.vec_size > 1 else s) + i for s in rows.inner_stride]
            yield i, [b + (0 if a == "splat" else x) for a, b, x in zip(layout.access, base, inside, strict=True)]


@given(stream_spaces())
def test_layout_visits_every_element_where_it_is(space: tuple[tuple[int, ...], list[pointwise_layout.Stream]]) -> None:
    shape, streams = space
    layout = pointwise_layout.layout(shape, streams)
    assert layout.elements == prod(shape)
    found = Counter(tuple(offsets) for _, offsets in visited(layout))
    assert found == addresses(shape, [s.strides for s in streams])


@pytest.mark.parametrize(
    ("shape", "strides", "kind"),
    [
        ((35, 50), ((50, 1), (1, 35), (0, 1), (1, 0), (0, 0)), "tiles"),
        ((16, 16), ((16, 1), (1, 16)), "tiles"),
        ((3, 17, 33), ((561, 33, 1), (561, 1, 17)), "tiles"),
        ((2, 3, 17, 33), ((2000, 561, 33, 1), (3000, 600, 1, 17)), "tiles_of_planes"),
        ((36, 24), ((24, 1), (1, 36), (0, 1), (1, 0), (0, 0), (48, 2)), "tiles"),
        ((40, 70), ((70, 1), (1, 40)), "tiles"),
        ((1, 3, 8, 100), ((0, 1000, 100, 1), (0, 1000, 1, 8)), "tiles"),
        # A side is shorter than a tile.
        ((35, 15), ((15, 1), (1, 35)), "matrix"),
        ((36, 4), ((4, 1), (1, 36)), "matrix"),
        # Three streams, three innermost dimensions.
        ((16, 16, 16), ((256, 16, 1), (256, 1, 16), (1, 16, 256)), "planes"),
    ],
)
def test_streams_that_disagree_are_visited_in_tiles(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], kind: str
) -> None:
    layout = pointwise_layout.layout(shape, [pointwise_layout.Stream(s, 4) for s in strides])
    assert layout.kind == kind and layout.elements == prod(shape)
    assert Counter(tuple(offsets) for _, offsets in visited(layout)) == addresses(shape, strides)


@pytest.mark.parametrize(
    ("shape", "order", "fronts"),
    [
        ((8, 139810, 15), (1, 0, 2), 8),  # rows of 60 bytes
        ((8, 139810, 16), (1, 0, 2), 1),  # whole sectors
        ((8, 13981, 15), (1, 0, 2), 1),  # L2 keeps all
        ((5, 700000, 3), (0, 2, 1), 1),  # neighbours of one stream are near in the others
    ],
)
def test_stretches_whose_elements_share_sectors_are_visited_at_once(
    shape: tuple[int, ...], order: tuple[int, ...], fronts: int
) -> None:
    other = dense_strides(shape, [3 - order.index(d) for d in range(3)])
    streams = [stream(shape, 4), pointwise_layout.Stream(other, 4)] * 2
    found = pointwise_layout.layout(shape, streams)
    assert found.fronts == fronts
    if fronts > 1:
        assert pointwise_layout.gathered(found, streams).fronts == fronts


@given(stream_spaces())
def test_vector_loads_are_aligned(space: tuple[tuple[int, ...], list[pointwise_layout.Stream]]) -> None:
    shape, streams = space
    layout = pointwise_layout.layout(shape, streams)
    for lane, offsets in visited(layout):
        for stream, offset, access in zip(streams, offsets, layout.access, strict=True):
            elements = {"along_a": layout.tile.a, "along_b": layout.tile.b, "elements": 1}.get(access, layout.vec_size)
            word = min(16, elements * stream.itemsize)
            if lane == 0 and access not in ("splat", "elements"):
                assert (stream.misalignment + offset * stream.itemsize) % (word if layout.vec_size > 1 else 1) == 0


@given(stream_spaces())
def test_advance_is_a_warp_of_vectors(space: tuple[tuple[int, ...], list[pointwise_layout.Stream]]) -> None:
    layout = pointwise_layout.layout(*space)
    if layout.kind in ("flat", LINEAR, *TILED):
        return
    streams = len(layout.strides)
    rows = StridedLayout(layout.words(), streams, pointwise_layout.outer_rank(layout.kind, streams // 2))
    for vector in range(0, rows.vectors(), 7):
        assert rows.advance(rows.at(vector)) == rows.at(vector + gpu.WARP)


def stream(shape: Sequence[int], itemsize: int, misalignment: int = 0) -> pointwise_layout.Stream:
    """A contiguous tensor."""
    strides = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    return pointwise_layout.Stream(strides, itemsize, misalignment)


def test_batches_are_whole_where_elements_fill_them() -> None:
    """A lane has four vectors of 16 bytes in a batch, or one where few elements are spread over more lanes."""
    for elements in (1, 127, 128, 511, 512, 513, 640, 1024):
        found = pointwise_layout.layout((elements,), [stream((elements,), 4)] * 3)
        assert found.whole_batches == (elements % 512 == 0)
        assert pointwise_layout.in_short_batches(found, False).whole_batches == (elements % 128 == 0)
    shifted = pointwise_layout.layout((1024,), [stream((1024,), 4), pointwise_layout.Stream((1,), 4, 4, read=True)])
    assert shifted.access == ("stream", "shifted")
    rows = pointwise_layout.layout((64, 512), [pointwise_layout.Stream((1024, 1), 4)])
    assert not shifted.whole_batches and not rows.whole_batches


@pytest.mark.parametrize(
    ("shape", "streams", "kind", "vec_size"),
    [
        # One dimension, whole 16-byte words.
        ((1000,), [stream((1000,), 4)] * 2, "flat", 4),
        ((1000,), [stream((1000,), 2)] * 2, "flat", 8),
        ((1000,), [stream((1000,), 8)] * 2, "flat", 2),
        # Dense tensors merge into one dimension in any dimension order.
        ((8, 6, 4), [pointwise_layout.Stream((1, 8, 48), 4)] * 2, "flat", 4),
        # An address aligned to half a 16-byte word, and one aligned to a single element.
        ((1000,), [stream((1000,), 4), stream((1000,), 4, 8)], "flat", 2),
        ((1000,), [stream((1000,), 4), stream((1000,), 4, 4)], "flat", 1),
        # A scalar operand beside a tensor keeps the layout flat.
        ((8, 6), [stream((8, 6), 4), pointwise_layout.Stream((0, 0), 4)], "flat", 4),
        # The hinge of a matrix with one label per column, and with one per row.
        ((64, 64), [stream((64, 64), 4), pointwise_layout.Stream((0, 1), 4)], "matrix", 4),
        ((64, 64), [stream((64, 64), 4), pointwise_layout.Stream((1, 0), 4)], "matrix", 4),
        # Rows that are not whole 16-byte vectors.
        ((64, 6), [stream((64, 6), 4), pointwise_layout.Stream((0, 1), 4)], "matrix", 2),
        ((64, 63), [stream((64, 63), 4), pointwise_layout.Stream((0, 1), 4)], "matrix", 1),
        # A slice whose rows start at odd offsets.
        ((64, 32), [pointwise_layout.Stream((33, 1), 4)], "matrix", 1),
        # Transposed and not transposed: no innermost dimension suits both.
        ((64, 32), [pointwise_layout.Stream((32, 1), 4), pointwise_layout.Stream((1, 64), 4)], "tiles", 4),
        # Larger sizes, odd sizes, and 16-bit elements, also transposed.
        ((512, 1024), [pointwise_layout.Stream((1024, 1), 4), pointwise_layout.Stream((1, 512), 4)], "tiles", 16),
        ((63, 32), [pointwise_layout.Stream((32, 1), 4), pointwise_layout.Stream((1, 63), 4)], "tiles", 2),
        ((63, 31), [pointwise_layout.Stream((31, 1), 4), pointwise_layout.Stream((1, 63), 4)], "tiles", 1),
        ((4096, 512), [pointwise_layout.Stream((512, 1), 2), pointwise_layout.Stream((1, 4096), 2)], "tiles", 32),
        ((4, 5, 6), [pointwise_layout.Stream((100, 12, 1), 4)], "planes", 2),
        ((3, 4, 5, 6), [pointwise_layout.Stream((1000, 100, 12, 1), 4)], "rows", 2),
    ],
)
def test_layouts_that_matter(
    shape: tuple[int, ...], streams: list[pointwise_layout.Stream], kind: str, vec_size: int
) -> None:
    found = pointwise_layout.layout(shape, streams)
    assert (found.kind, found.vec_size) == (kind, vec_size)


@pytest.mark.parametrize(
    ("side", "of_a_lane", "chunks"),
    [(128, 4, 128), (512, 4, 2048), (1024, 16, 2048), (4096, 64, pointwise_layout.MAX_CHUNKS)],
)
def test_few_elements_are_spread_over_lanes(side: int, of_a_lane: int, chunks: int) -> None:
    """Tiles get fewer elements per lane, and other layouts shorter batches."""
    turned = pointwise_layout.layout((side, side), [stream((side, side), 4), pointwise_layout.Stream((1, side), 4)])
    assert (turned.vec_size * turned.batch, pointwise_layout.chunks_of(turned)) == (of_a_lane, chunks)
    flat = pointwise_layout.layout((side, side), [stream((side, side), 4)] * 2)
    assert pointwise_layout.in_short_batches(flat, True).batch == (1 if side <= 512 else flat.batch)
    assert pointwise_layout.in_short_batches(turned, True) is turned


@pytest.mark.parametrize(
    ("elements", "behind", "heavy", "batch"),
    [(1 << 20, 0, False, 4), (1 << 20, 2, False, 1), (1 << 22, 2, False, 1), (1 << 23, 2, False, 4)]
    + [(1 << 23, 2, True, 1), (1 << 23, 0, True, 4)],
)
def test_shifted_vectors_are_spread_over_lanes(elements: int, behind: int, heavy: bool, batch: int) -> None:
    """One operand starts ``behind`` bytes past an aligned address.

    A heavy loss spreads shifted vectors over lanes at any size.
    """
    streams = [stream((elements,), 2), pointwise_layout.Stream((1,), 2, behind, read=True)]
    found = pointwise_layout.in_short_batches(pointwise_layout.layout((elements,), streams), False, heavy)
    assert (found.vec_size, found.batch) == (8, batch)


def test_a_reduced_loss_of_one_block_stays_there() -> None:
    for elements, reduced, batch in ((1024, True, 4), (1025, True, 1), (1024, False, 1)):
        flat = pointwise_layout.layout((elements,), [stream((elements,), 4)] * 2)
        assert pointwise_layout.in_short_batches(flat, reduced).batch == batch


def test_too_many_dimensions_are_an_error_with_a_remedy() -> None:
    rank = MAX_RANK + 2
    strides = tuple(3 ** (rank - d) for d in range(rank))
    with pytest.raises(ValueError, match=rf"at most {MAX_RANK + 1} dimensions .*\.contiguous\(\)"):
        pointwise_layout.layout((2,) * rank, [pointwise_layout.Stream(strides, 4)])
    pointwise_layout.layout((2,) * (rank - 1), [pointwise_layout.Stream(strides[1:], 4)])


# ----------------------------------------------------------------------------------------------------------------------
# Cutting into chunks, and grids

VECTORS = st.one_of(st.integers(1, 10_000), st.integers(1, 1 << 42))
LANES = st.sampled_from(sorted(pointwise_layout.UNROLL))


def constant(file: str, name: str) -> int:
    """Value of a constant in a kernel file."""
    text = (kernel_directory() / file).read_text(encoding="utf-8")
    return int(re.search(rf"constexpr int {name} = (\d+);", text).group(1))


def swept(vectors: int, vec_size: int, processors: int) -> Counter[int]:
    """The vectors that ``sweep`` of ``kernels/pointwise/pointwise.cuh`` visits, replayed in Python."""
    chunks = pointwise_layout.chunks(vectors, vec_size)
    threads = pointwise_layout.threads(chunks)
    warps = pointwise_layout.grid(chunks, threads, processors) * (threads // gpu.WARP)
    batch = pointwise_layout.UNROLL[vec_size] * gpu.WARP
    seen: Counter[int] = Counter()
    for warp in range(warps):
        for group in range(warp, chunks, warps):
            for first in range(group * batch, vectors, chunks * batch):
                seen.update(range(first, min(first + batch, vectors)))
    return seen


@given(st.integers(1, 40_000), LANES, st.integers(1, 200))
@settings(max_examples=30)
def test_every_vector_is_visited_once(vectors: int, vec_size: int, processors: int) -> None:
    assert swept(vectors, vec_size, processors) == Counter(range(vectors))


def test_more_batches_than_groups_are_visited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise_layout, "MAX_CHUNKS", 7)
    assert swept(10_001, 4, 3) == Counter(range(10_001))


@given(VECTORS, LANES)
def test_no_group_is_empty(vectors: int, vec_size: int) -> None:
    chunks = pointwise_layout.chunks(vectors, vec_size)
    assert 1 <= chunks <= pointwise_layout.MAX_CHUNKS
    assert (chunks - 1) * pointwise_layout.UNROLL[vec_size] * gpu.WARP < vectors


@pytest.mark.parametrize("vec_size", pointwise_layout.UNROLL)
def test_lanes_add_short_runs(vec_size: int) -> None:
    """A lane adds up whole batches of at most kMaxRun terms in the arithmetic type.

    The accuracy of every sum depends on this number.
    """
    batch = pointwise_layout.UNROLL[vec_size] * vec_size
    assert constant("pointwise/pointwise.cuh", "kMaxRun") // batch * batch >= 40
    assert constant("pointwise/pointwise.cuh", "kMaxRun") <= 64


@given(st.integers(1, pointwise_layout.MAX_CHUNKS))
def test_blocks_are_whole_warps(chunks: int) -> None:
    threads = pointwise_layout.threads(chunks)
    assert threads % gpu.WARP == 0
    assert gpu.WARP <= threads <= pointwise_layout.MAX_THREADS


def test_order_of_additions_knows_no_device() -> None:
    """The order follows from sizes and layouts: the functions that decide it receive no facts of the device."""
    assert list(inspect.signature(pointwise_layout.chunks).parameters) == ["vectors", "vec_size", "unroll"]
    assert list(inspect.signature(pointwise_layout.threads).parameters) == ["chunks"]
    of_layout = ["shape", "streams", "micro_tile", "widest", "stages_16_bits"]
    assert list(inspect.signature(pointwise_layout.layout).parameters) == of_layout
    assert list(inspect.signature(pointwise_layout.staged_threads).parameters) == ["space", "streams"]
    assert list(inspect.signature(pointwise_layout.sum_layout).parameters) == ["shape", "streams", "result"]


@given(st.integers(1, pointwise_layout.MAX_CHUNKS), st.integers(1, 200))
def test_grid_is_neither_empty_nor_idle(chunks: int, processors: int) -> None:
    threads = pointwise_layout.threads(chunks)
    blocks = pointwise_layout.grid(chunks, threads, processors)
    assert 1 <= blocks <= -(-chunks * gpu.WARP // threads)
    assert blocks <= processors * pointwise_layout.BLOCKS_PER_SM * (pointwise_layout.MAX_THREADS // threads)


def test_python_and_kernels_agree_on_their_limits() -> None:
    assert constant("core/layout.cuh", "kMaxRank") == MAX_RANK
    assert constant("core/layout.cuh", "kWarp") == gpu.WARP
    assert constant("core/dual.cuh", "kMaxOperands") == 2 * MAX_OPERANDS


# ----------------------------------------------------------------------------------------------------------------------
# Sums over the dimensions along which an operand was broadcast


@st.composite
def broadcasts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, ...]], tuple[int, ...]]:
    """A shape, the strides of the streams that are read, and those of the dense gradient of a broadcast operand."""
    shape, strides = draw(index_spaces())
    keep = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    small = tuple(n if k else 1 for n, k in zip(shape, keep, strict=True))
    dense = dense_strides(small, draw(strided(small, signed=False)))
    return shape, strides, broadcast_strides(small, dense, shape)


@given(broadcasts())
def test_sum_layout_reads_every_term_of_every_output_once(
    case: tuple[tuple[int, ...], list[tuple[int, ...]], tuple[int, ...]],
) -> None:
    shape, strides, result = case
    x = pointwise_layout.sum_layout(shape, strides, result)
    kept, reduced = addresses(x.kept, x.kept_strides), addresses(x.reduced, x.reduced_strides)
    found: Counter[tuple[int, ...]] = Counter()
    for (a, n), (b, m) in itertools.product(kept.items(), reduced.items()):
        found[tuple(i + j for i, j in zip(a, b, strict=True))] += n * m
    assert found == addresses(shape, [*strides, result])
    assert all(s == 0 for s in x.reduced_strides[-1])


@given(broadcasts())
def test_sum_layout_writes_each_output_once(
    case: tuple[tuple[int, ...], list[tuple[int, ...]], tuple[int, ...]],
) -> None:
    x = pointwise_layout.sum_layout(*case)
    written = addresses(x.kept, [x.kept_strides[-1]])
    assert sum(written.values()) == x.outputs
    assert set(written.values()) == {1}
    assert set(written) == {(i,) for i in range(x.outputs)}


@pytest.mark.parametrize("rows", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize("columns", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize("kept", [(True, False), (False, True), (False, False)])
def test_slices_partition_the_sum(rows: int, columns: int, kept: tuple[bool, bool]) -> None:
    small = tuple(n if k else 1 for n, k in zip((rows, columns), kept, strict=True))
    result = broadcast_strides(small, dense_strides(small, (0, 0)), (rows, columns))
    x = pointwise_layout.sum_layout((rows, columns), [(columns, 1), result], result)
    assert x.outputs * x.length == rows * columns
    assert (x.slices - 1) * x.slice_length < x.length <= x.slices * x.slice_length
    assert x.slices == 1 or x.slices * x.outputs <= pointwise_layout.MAX_PARTIALS


def test_one_label_per_column_puts_neighbouring_columns_in_neighbouring_lanes() -> None:
    assert pointwise_layout.sum_layout((4096, 4096), [(4096, 1), (0, 1)], (0, 1)).columns


@pytest.mark.parametrize("rows", [64, 4096, 1 << 20])
def test_one_label_per_row_spreads_the_row_over_the_lanes(rows: int) -> None:
    """The strides of the matrix must decide, not the unit stride of the labels: the sum reads the matrix."""
    assert not pointwise_layout.sum_layout((rows, 4096), [(4096, 1), (1, 0)], (1, 0)).columns


def test_one_number_for_all_spreads_over_the_lanes() -> None:
    assert not pointwise_layout.sum_layout((4096, 4096), [(4096, 1), (0, 0)], (0, 0)).columns


def test_lanes_do_not_leave_a_short_run_for_elements_far_away() -> None:
    """If 2240 x 1000 x 3 is summed to 1000, only runs of three terms are contiguous.

    The next of the 2240 runs of an output is far away, but neighbouring outputs are near: lanes take these instead.
    """
    dense = (3000, 3, 1)
    assert pointwise_layout.sum_layout((2240, 1000, 3), [dense, (0, 1, 0)], (0, 1, 0)).columns
    assert not pointwise_layout.sum_layout((2240, 1000, 3), [dense, (1000, 1, 0)], (1000, 1, 0)).columns


@pytest.mark.parametrize(
    ("outputs", "length", "apart", "slices", "warps"),
    [(4, 15780, True, 61, 1), (4, 8192, True, 32, 1), (4, 4096, True, 1, 8), (4, 1 << 15, False, 32, 1)]
    + [(64, 4096, False, 1, 8), (64, 1024, False, 1, 1), (1 << 11, 1 << 13, True, 1, 1)],
)
def test_sums_to_few_outputs_are_shared_by_warps_or_cut_into_slices(
    outputs: int, length: int, apart: bool, slices: int, warps: int
) -> None:
    """Sums are shared or cut if a lane would otherwise take many rounds of terms.

    Terms are loaded one by one if another operand is transposed (``apart``), otherwise in vectors.
    """
    shape, result = (outputs, length), (1, 0)
    streams = [stream(shape, 4), pointwise_layout.Stream((1, outputs), 4) if apart else stream(shape, 4)]
    found = pointwise_layout.sum_layout(shape, [x.strides for x in streams], result)
    found = pointwise_layout.sum_in_vectors(found, streams, pointwise_layout.Stream(result, 4))
    assert not found.columns and (found.slices, found.warps) == (slices, warps)
    assert (found.slices - 1) * found.slice_length < length <= found.slices * found.slice_length


def test_terms_that_are_not_aligned_leave_the_others_their_vectors() -> None:
    shape, result = (64, 4096), (1, 0)
    streams = [pointwise_layout.Stream((4097, 1), 2), stream(shape, 2), pointwise_layout.Stream((0, 0), 2)]
    sums = pointwise_layout.sum_layout(shape, [x.strides for x in streams], result)
    to = pointwise_layout.Stream(result, 2)
    found = pointwise_layout.sum_in_vectors(sums, streams, to, unaligned=True)
    assert (found.vec_size, found.access) == (8, ("singles", "stream", "splat"))
    assert pointwise_layout.sum_in_vectors(sums, streams, to).vec_size == 1


@pytest.mark.parametrize(
    ("shape", "small", "columns", "vec_size", "lanes"),
    [
        ((61, 33), (1, 33), True, 8, 6),  # five vectors per row, for six lanes each
        ((61, 7), (61, 1), False, 8, 1),
        ((5, 3, 131), (5, 1, 131), True, 8, 1),
        ((3, 19, 35), (1, 19, 1), False, 8, 2),
        ((61, 3), (1, 3), True, 4, 32),
    ],
)
def test_sums_in_vectors_of_rows_that_none_divides_take_every_element_once(
    shape: tuple[int, ...],
    small: tuple[int, ...],
    columns: bool,
    vec_size: int,
    lanes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pointwise_layout, "RAGGED_ELEMENTS", 1)
    dense = dense_strides(shape, (0,) * len(shape))
    result = broadcast_strides(small, dense_strides(small, (0,) * len(small)), shape)
    streams = [pointwise_layout.Stream(s, 2) for s in (dense, result)]
    sums = pointwise_layout.sum_layout(shape, [dense, result], result)
    x = pointwise_layout.sum_in_vectors(sums, streams, pointwise_layout.Stream(result, 2), unaligned=True)
    assert (x.columns, x.vec_size, x.lanes, x.row) == (columns, vec_size, lanes, shape[-1])
    kept, reduced = addresses(x.kept, x.kept_strides), addresses(x.reduced, x.reduced_strides)
    found: Counter[tuple[int, ...]] = Counter()
    for a, b in itertools.product(kept, reduced):
        of_full, of_small, place, of_result = (i + j for i, j in zip(a, b, strict=True))
        for v in range(min(x.vec_size, x.row - place)):
            found[of_full + v, of_small + v * columns, of_result + v * columns] += 1
    assert found == addresses(shape, [dense, result, result])
    # Places include those past the end of a row, which hold no output.
    assert x.places == (len(kept) * x.vec_size if columns else prod(small))


@pytest.mark.parametrize(("rows", "columns", "blocks"), [(1000003, 33, 256), (5793, 5793, 253), (911, 37003, 435)])
def test_sums_of_odd_columns_fill_rounds_of_blocks(rows: int, columns: int, blocks: int) -> None:
    """A round has 256 blocks, as far as columns allow: 37003 columns take three slices of 145 blocks, not two."""
    dense, result = (columns, 1), (0, 1)
    streams = [pointwise_layout.Stream(s, 2) for s in (dense, result)]
    sums = pointwise_layout.sum_layout((rows, columns), [dense, result], result)
    x = pointwise_layout.sum_in_vectors(sums, streams, pointwise_layout.Stream(result, 2), unaligned=True)
    assert (x.warps, x.tasks) == (pointwise_layout.MAX_THREADS // gpu.WARP, blocks)


def test_sums_of_heavy_losses_have_no_vectors_of_which_much_is_absent() -> None:
    dense, result = (5, 1), (1, 0)
    for heavy, row in ((0, 5), (1, 0)):
        streams = [pointwise_layout.Stream(s, 2) for s in (dense, result)]
        sums = pointwise_layout.sum_layout((1 << 14, 5), [dense, result], result)
        to = pointwise_layout.Stream(result, 2)
        assert pointwise_layout.sum_in_vectors(sums, streams, to, unaligned=True, heavy=heavy).row == row


@pytest.mark.parametrize(
    ("shape", "small", "heavy", "row"),
    [
        ((1 << 14, 9), (1 << 14, 1), 0, 9),
        ((1 << 14, 9), (1 << 14, 1), 1, 0),
        ((1 << 14, 7), (1 << 14, 1), 0, 0),
        ((1 << 14, 9), (1, 9), 0, 0),
        ((5, 1 << 10, 129), (1, 1 << 10, 1), 0, 129),
        ((5, 1 << 10, 127), (1, 1 << 10, 1), 0, 0),
    ],
)
def test_sums_of_odd_rows_of_32_bits_in_vectors(
    shape: tuple[int, ...], small: tuple[int, ...], heavy: int, row: int
) -> None:
    """Sums along rows use vectors, but sums along columns, of short rows, or of heavy losses do not."""
    dense = dense_strides(shape, (0,) * len(shape))
    result = broadcast_strides(small, dense_strides(small, (0,) * len(small)), shape)
    streams = [pointwise_layout.Stream(s, 4) for s in (dense, result)]
    sums = pointwise_layout.sum_layout(shape, [dense, result], result)
    to = pointwise_layout.Stream(result, 4)
    found = pointwise_layout.sum_in_vectors(sums, streams, to, unaligned=True, heavy=heavy)
    assert (found.row, found.vec_size) == (row, 4 if row else 1)


def test_sums_of_many_dimensions_have_no_stream_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """With such a stream, kernels of six operands would have more than 4 KiB of parameters."""
    monkeypatch.setattr(pointwise_layout, "RAGGED_ELEMENTS", 1)
    for dims in (5, 6):
        shape = (5,) * dims
        full, small = (dense_strides(x, (0,) * dims) for x in (shape, tuple([5, 1] * 3)[:dims]))
        result = tuple(s * (d % 2 == 0) for d, s in enumerate(small))
        streams = [pointwise_layout.Stream(full, 2), pointwise_layout.Stream(result, 2)]
        sums = pointwise_layout.sum_layout(shape, [full, result], result)
        found = pointwise_layout.sum_in_vectors(sums, streams, pointwise_layout.Stream(result, 2), unaligned=True)
        assert (found.row > 0) == (min(len(found.kept), len(found.reduced)) < 3)


def test_dimension_words_are_padded_to_the_kernels_rank() -> None:
    words = dimension_words((5, 7), [(1, 5), (0, 1)], rank=4)
    assert words == [2, 5, 7, 1, 1, multiplier(5), multiplier(7), 0, 0, 1, 5, 0, 0, 0, 1, 0, 0]
