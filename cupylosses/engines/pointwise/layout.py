"""Launch geometry: how the index space of a loss is laid out, cut into chunks and distributed over a GPU.

Pure functions of integers that depend on no device, array library or loss. All of them are tested without a GPU. They
make three decisions:

    ``layout``
        which dimensions are merged, which one is innermost, and how many neighbours a lane processes at once;
    ``chunks`` and ``threads``
        how the elements are cut, which fixes the order of additions and never depends on the device;
    ``grid``
        how many blocks run, the only decision that depends on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import gcd, prod
from operator import mul

from cupylosses.definition.base import MAX_OPERANDS
from cupylosses.engines.strides import MAX_RANK, dimension_words, in_order, merge, multiplier, row_major
from cupylosses.jit.gpu import SECTOR_BYTES, WARP

#: Maximum number of outer dimensions of kernels with more than MAX_OPERANDS operands, which are derivatives along
#: tangents; other kernels have MAX_RANK. Kernel parameters, which include the strides of all tensors, are limited to 4
#: KiB before CUDA 12.1.
MAX_RANK_OF_MANY = 15

#: MAX_THREADS: maximum number of threads per block. BLOCKS_PER_SM: blocks per SM that grids are sized for. Kernels that
#: fit into the 80 registers per thread that this leaves are compiled for it, too (``_blocks_per_sm`` in
#: ``codegen.py``). The others would spill; they are compiled for BLOCKS_PER_SM_OTHERS, with 128 registers.
MAX_THREADS = 256
BLOCKS_PER_SM = 3
BLOCKS_PER_SM_OTHERS = 2

#: Number of vectors per lane in a batch, by elements per vector.
UNROLL = {1: 8, 2: 4, 4: 4, 6: 4, 8: 4, 10: 4, 12: 4, 14: 4, 16: 4, 20: 2, 24: 2, 28: 2, 32: 2}

#: Maximum number of chunks, and thus of partial sums of a reduced loss: one per warp of the largest GPUs (3 blocks of 8
#: warps on 128 SMs), and few enough for the last block to add at once.
MAX_CHUNKS = 3 << 10
#: Maximum number of chunks for which a lane has only one shifted vector in flight. Such a vector waits for two words,
#: and more warps hide that latency better than more vectors per lane.
SHIFTED_CHUNKS = 1 << 14

#: Number of blocks that a small loss is spread over: more SMs load faster, but every block has to take a ticket.
MIN_BLOCKS = 64

#: A launch without a reduction that has fewer chunks than FEW_CHUNKS is spread over more lanes: each lane processes one
#: vector of up to SPREAD_VECTOR elements, in blocks of SPREAD_THREADS threads. At that size a heavy loss takes longer
#: to compute than to load.
FEW_CHUNKS = 1 << 10
SPREAD_VECTOR = 4
SPREAD_THREADS = 64
#: Maximum number of threads per block if each warp processes a single batch, or a few small ones.
BATCH_THREADS = 128
#: If all batches have only SPREAD_VECTOR elements per lane, a warp processes up to SPREAD_BATCHES of them, but only
#: where that leaves SPREAD_WARPS warps busy: what a kernel computes from the parameters of a loss, before its first
#: element, takes as long as some of these batches.
SPREAD_BATCHES = 8
SPREAD_WARPS = 1 << 13

#: MAX_PARTIALS: maximum number of partial sums (doubles) of a broadcast operand's gradient. SLICE_TERMS: number of
#: terms per lane that make a slice worthwhile, for sums along columns, where a lane has terms of its own.
#: SLICE_TERMS_OF_ROWS: the same for sums along rows, where a lane has a share of its warp's terms and the sums take a
#: reduction over the warp. TARGET_WARPS: number of warps above which no more slices are cut.
MAX_PARTIALS = 1 << 19
SLICE_TERMS = 128
SLICE_TERMS_OF_ROWS = 256
TARGET_WARPS = 1 << 14

#: A round is a group of terms that a lane loads together. Sums to few outputs are cut into slices if a lane takes more
#: than MANY_ROUNDS rounds, where a warp has an output of its own, or MANY_SHARED_ROUNDS, where all warps of a block
#: share one: waiting for memory so often takes longer than a second launch. A slice has at least FEWEST_ROUNDS rounds.
MANY_ROUNDS = 8
MANY_SHARED_ROUNDS = 4
FEWEST_ROUNDS = 2

#: Number of warps that keep a GPU busy: with fewer, all warps of a block share the terms of their outputs.
ENOUGH_WARPS = 1 << 11

#: TERMS_IN_FLIGHT: maximum number of terms of an output that a lane has in flight (``kMostTerms`` of
#: ``kernels/pointwise/sum_over.cuh``). SUM_BLOCKS_PER_SM: maximum number of blocks per SM, over the whole launch of a
#: sum.
TERMS_IN_FLIGHT = 4
SUM_BLOCKS_PER_SM = 32

#: Sums whose vectors begin with each row, for rows that no vector divides. RAGGED_ELEMENTS: minimum number of elements.
#: RAGGED_BLOCKS: number of blocks that the largest GPUs run at once (2 on each of 128 SMs) in such sums of columns, if
#: the warps of a block share the outputs; a last round of few blocks takes as long as a full one. RAGGED_ROW: minimum
#: length of rows of 32-bit elements, in sums over one dimension and over several.
RAGGED_ELEMENTS = 1 << 14
RAGGED_BLOCKS = 2 << 7
RAGGED_ROW = (9, 128)
#: Minimum fraction of these vectors' elements that must exist for a heavy loss, which is computed for the others too.
WELL_FILLED = 0.8

#: Inverse of the largest fraction of the elements that a broadcast operand may have if its address is not to limit the
#: vectors.
SMALL_PART = 16

#: Minimum number of elements for gradients whose dimensions are in an order other than their operands', and for copies
#: of operands into another order.
ORDERED_ELEMENTS = 1 << 19
#: Minimum number of elements, of up to 4 bytes each, for copies of operands in another order that tiles would read one
#: or two elements at a time.
SINGLE_ELEMENTS = 1 << 22
#: A copy is faster than gathering an operand if gathering touches more than SCATTERED bytes of sectors per byte of the
#: operand, and elements that are neighbours in its memory are at least SCATTERED_APART elements apart in the index
#: space: caches do not keep the sectors until their other elements are gathered.
SCATTERED, SCATTERED_APART = 4, 1 << 14

#: COMPACTED_ELEMENTS: minimum number of elements for copies of small broadcast operands. COMPACTED_PART: inverse of the
#: largest fraction of the elements that such an operand may have if only the value is computed. COMPACTED_PART_WRITTEN:
#: the same if gradients are written, which take longer than such reads.
COMPACTED_ELEMENTS = 1 << 22
COMPACTED_PART, COMPACTED_PART_WRITTEN = 8, 16

#: SHARED_SECTORS: distance in bytes between neighbours up to which the sectors that they share justify an order of
#: batches that keeps these sectors in L2. KEPT_IN_L2: number of bytes of all streams that L2 certainly keeps, in
#: addition to what running warps have in flight.
SHARED_SECTORS = 512
KEPT_IN_L2 = 1 << 23

#: SPARSE: an array is sparse if it has more bytes of sectors than this per byte of its own. SPARSE_BYTES: number of
#: bytes of pairs of sectors that L2 keeps until they are read again.
SPARSE, SPARSE_BYTES = 3, 1 << 25

#: Number of elements whose sectors are counted, to tell whether an array is sparse, and in which direction lanes sum.
_SAMPLE = 256

#: Number of partial sums that a lane has in flight (``combine_sums``).
_COMBINED_AT_ONCE = 8

#: Number of tasks that strips are cut into, processed by one warp each: the number of warps that the largest GPUs run
#: if kernels take 128 registers (2 blocks of 8 warps on 128 SMs). With more tasks, a last round would have few of them,
#: and there would be more partial sums.
MAX_TASKS = 2 << 10

#: Layout of one dimension with any strides.
LINEAR = "linear"

#: Layout of rows with exactly two outer dimensions, a number that is a compile-time constant.
PLANES = "planes"

#: Layouts of rows, and layouts in which lanes may process one element at a time.
OF_ROWS = ("matrix", PLANES, "rows")
SCALAR = (*OF_ROWS, LINEAR)

#: Layouts in strips, with at most one dimension of planes and with more.
STRIPS = ("strips", "strips_of_planes")

#: Layouts of one dimension in which some streams are gathered at strides of their own, by the number of their
#: dimensions.
GATHERED = ("gathered1", "gathered2", "gathered3", "gathered4")

#: Number of elements per vector of dense streams beside gathered ones. With wider vectors, a warp touches more sectors
#: in each load or store of a gathered element. Vectors may be wider if they leave one chunk for each warp of the
#: largest GPUs, because computing offsets takes fewer instructions then; but not beside scattered gradients of four
#: bytes or more.
GATHERED_AT_ONCE = 2
#: Maximum number of elements per vector beside scattered gradients, if the elements have 16 bits.
SCATTERED_AT_ONCE = 4

#: Maximum size of all dimensions of gathered streams but the outermost: their coordinates are counted in 32 bits.
LONGEST_GATHERED = 1 << 30

#: Minimum number of vectors per row for reading gapless streams of less than four bytes in shifted vectors beside dense
#: ones. In shorter rows, most warps would include the end of a row, which is gathered. In float32, shifted vectors took
#: 1.1 to 1.2 times as long as single elements.
LONG_ROW = 64

#: Minimum number of elements for gathering. Below it, gathering would gain 0 to 4 us of 12 to 26. The limit also keeps
#: rows of single elements, which layouts of more dimensions need, within reach of small tests.
GATHERED_ELEMENTS = 1 << 14

#: Maximum number of partial sums (doubles) that strips may leave. Large operands may leave more: a 512th of the number
#: of elements, or one per output.
MAX_SUMS = 1 << 20

#: Maximum number of dimensions of a gradient, and of the partial sums that are combined into one of its elements.
COMBINED_RANK = 4

#: FEWEST_JOINED_ROWS: minimum number of joined rows. MOST_JOINED: number of multiples that are tried of the smallest
#: number of rows that vectors divide when joined.
FEWEST_JOINED_ROWS, MOST_JOINED = 64, 32

#: Minimum fraction of the lanes and steps of strips that must have elements, if there are more than SMALL elements.
FULL_STRIPS = 0.7
SMALL = 1 << 17

#: TILED: layouts of streams that disagree about the innermost dimension, with at most one outer dimension and with
#: more. TILE: minimum size of both dimensions of tiles if no vector fits. TILE_OF_VECTORS: minimum size if a vector
#: fits; a micro-tile spans a shorter dimension.
TILED = ("tiles", "tiles_of_planes")
TILE = 16
TILE_OF_VECTORS = 8

#: Tiles that are staged in shared memory. STAGED_LINES: number of their lines, which run along the second dimension.
#: STAGED_LINE: number of elements per line, and STAGED_ELEMENTS: minimum number of elements of the index space, both by
#: the bytes of the widest staged element. Lines of 4-byte elements have LONG_LINE elements if the index space has
#: LONG_LINE_ELEMENTS or more.
STAGED_LINES = 32
STAGED_LINE = {2: 64, 4: 32, 8: 32}
STAGED_ELEMENTS = {2: 5 << 22, 4: 1 << 22, 8: 1 << 22}
LONG_LINE, LONG_LINE_ELEMENTS = 64, 1 << 25
#: Maximum number of bytes of such tiles per block. Every GPU has as much shared memory.
STAGED_BYTES = 40 << 10
#: Accesses to streams whose tiles are staged: of unit stride along the first dimension, and along the second.
STAGED = "staged_a", "staged_b"

#: Maximum numbers of elements per lane in tiles of a small index space. The first one that leaves no warp of the
#: largest GPUs a second batch is chosen: in few lanes, heavy arithmetic takes longer than all loads.
FEW_OF_A_LANE = (4, 16)

#: WELL_USED: fraction of a tile's lanes with elements that is good enough. BETTER_USED: factor by which another tile
#: must use more lanes if this one already spans a dimension. MOST_STEPS: maximum number of steps that span a short
#: dimension. MAX_RUN: number of elements that a lane adds up in the arithmetic type (``kMaxRun`` of
#: ``kernels/pointwise/pointwise.cuh``); a batch has no more.
WELL_USED = 0.9
BETTER_USED = 1.1
MOST_STEPS = 4
MAX_RUN = 64


@dataclass(frozen=True)
class Tile:
    """Micro-tile size along both dimensions, lanes along the first one, and steps along both.

    Corresponds to ``TileShape`` of ``kernels/core/layout.cuh``.
    """

    a: int = 1
    b: int = 1
    lanes_a: int = 8
    steps_a: int = 2
    steps_b: int = 4

    @property
    def sides(self) -> tuple[int, int]:
        """Sizes along both dimensions of the tile that a warp visits in one batch."""
        return self.a * self.lanes_a * self.steps_a, self.b * (WARP // self.lanes_a) * self.steps_b


@dataclass(frozen=True)
class Stream:
    """One tensor as the layout sees it.

    Strides are in elements, ``itemsize`` is in bytes, ``misalignment`` is the address modulo 16, and ``read`` is True
    if kernels only read the tensor.
    """

    strides: tuple[int, ...]
    itemsize: int
    misalignment: int = 0
    read: bool = False


@dataclass(frozen=True)
class Layout:
    """A merged index space. ``sizes`` and each entry of ``strides`` run from the innermost dimension outwards."""

    kind: str
    vec_size: int
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    access: tuple[str, ...]
    tile: Tile = Tile()
    #: Strips: neighbouring vectors of a row that a warp processes in one step, steps along a row, and ranges that the
    #: rows of a plane are divided into.
    across: int = 0
    steps: int = 1
    ranges: int = 0
    #: Strips of rows that no vector divides: number of rows that are joined into one, or 1 if neighbouring rows share
    #: vectors. Otherwise 0.
    joined: int = 0
    #: Rows and gathered streams: number of stretches of the index space that are visited at once.
    fronts: int = 1
    #: Number of vectors per lane in a batch if it differs from UNROLL or from the steps of the tile, otherwise 0.
    unroll: int = 0

    @property
    def batch(self) -> int:
        """Number of vectors per lane in a batch."""
        return self.unroll or (self.tile.steps_a * self.tile.steps_b if self.kind in TILED else UNROLL[self.vec_size])

    @property
    def batches(self) -> int:
        """Number of batches, for all layouts but strips."""
        return -(-self.vectors // (WARP * self.batch))

    @property
    def whole_batches(self) -> bool:
        """True if the layout is flat, its elements fill whole batches, and no vector is shifted.

        A shifted vector is read together with words past it, so the last batch must not be read as a whole.
        """
        filled = self.elements % (WARP * self.batch * self.vec_size) == 0
        return self.kind == "flat" and filled and "shifted" not in self.access

    @property
    def long_rows(self) -> bool:
        """True if streams are gathered and a row, their innermost dimension, has at least one vector."""
        return self.kind in GATHERED[1:] and self.sizes[0] >= self.vec_size

    @property
    def columns(self) -> int:
        """Number of vectors per row of strips; if rows share vectors, the maximum number that one row touches."""
        if self.joined == 1:
            return -(-(self.sizes[0] + self.vec_size - 1) // self.vec_size)
        return max(self.joined, 1) * self.sizes[0] // self.vec_size

    @property
    def rows(self) -> int:
        """Number of rows per plane of strips, where joined rows count as one."""
        return -(-self.sizes[1] // max(self.joined, 1))

    @property
    def strips(self) -> int:
        """Number of strips."""
        return -(-self.columns // (self.across * self.steps))

    @property
    def tasks(self) -> int:
        """Number of tasks of strips: one for each strip of each range of rows of each plane."""
        return prod(self.sizes[2:]) * self.ranges * self.strips

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def staged(self) -> bool:
        """True if the tiles of some streams are staged in shared memory."""
        return STAGED[1] in self.access

    @property
    def vectors(self) -> int:
        """Number of vectors, including the partial last one of a flat layout and the absent ones of tiles."""
        if self.kind in TILED:
            whole = [-(-n // side) * side for n, side in zip(self.sizes[:2], self.tile.sides, strict=True)]
            return prod(whole) // self.vec_size * prod(self.sizes[2:])
        return -(-self.elements // self.vec_size)

    def words(self) -> list[int]:
        """Returns the kernel's layout as 64-bit words, in the order of its fields."""
        if self.kind in GATHERED:
            pairs = [list(zip(s, s[1:], self.sizes)) for s in self.strides]
            wraps = [[*(after - n * here for here, after, n in x), 0] for x in pairs]
            steps, quotient = [], WARP * self.vec_size
            for n in self.sizes[:-1]:
                steps.append(quotient % n)
                quotient //= n
            steps.append(quotient)
            offsets = [sum(map(mul, steps, s)) for s in self.strides]
            head = [self.elements, self.fronts, *self.sizes, *steps, *offsets]
            head += [multiplier(n) for n in self.sizes[:-1]] or [0]
            return head + [x for s in (*self.strides, *wraps) for x in s]
        if self.kind in TILED:
            across, down = (-(-n // side) for n, side in zip(self.sizes[:2], self.tile.sides, strict=True))
            strides = [s[d] for d in (0, 1) for s in self.strides]
            head = [*self.sizes[:2], across, across * down, prod(self.sizes[2:]), *strides]
            rank = outer_rank(self.kind, len(self.strides) // 2)
            return head + dimension_words(self.sizes[2:] or (1,), [s[2:] or (0,) for s in self.strides], rank)
        if self.kind in STRIPS:
            head = [self.columns, self.rows, prod(self.sizes[2:]), self.strips, self.ranges]
            head += [s[d] for d in (0, 1) for s in self.strides]
            if self.joined:
                length, period = self.joined * self.sizes[0], self.sizes[0] if self.joined > 1 else 0
                head = [length, self.elements, period, *head]
            rank = outer_rank(self.kind, len(self.strides) // 2)
            return head + dimension_words(self.sizes[2:] or (1,), [s[2:] or (0,) for s in self.strides], rank)
        if self.kind == LINEAR:
            return [self.elements, *[s[0] for s in self.strides]]
        rows, vectors_per_row = prod(self.sizes[1:]), self.sizes[0] // self.vec_size
        inner = [s[0] for s in self.strides]
        head = [rows, vectors_per_row, WARP // vectors_per_row, WARP % vectors_per_row, self.fronts, *inner]
        rank = outer_rank(self.kind, len(self.strides) // 2)
        return head + dimension_words(self.sizes[1:], [s[1:] for s in self.strides], rank)


def max_rank(operands: int) -> int:
    """Returns the maximum number of outer dimensions of a kernel with this number of operands."""
    return MAX_RANK if operands <= MAX_OPERANDS else MAX_RANK_OF_MANY


def sum_rank(dimensions: int, operands: int) -> int:
    """Returns the number of kept or of reduced dimensions that the kernel of a sum has room for.

    One and two are exact numbers, for which kernels have no loop over dimensions. Otherwise it is the maximum.
    """
    return max(dimensions, 1) if dimensions <= 2 else max_rank(operands)


def outer_rank(kind: str, operands: int) -> int:
    """Returns the number of outer dimensions that a kernel of this layout has room for.

    Splitting an index into coordinates takes no division for one dimension, and a single one for two.
    """
    return {"matrix": 1, PLANES: 2, TILED[0]: 1, STRIPS[0]: 1}.get(kind) or max_rank(operands)


def layout(
    shape: Sequence[int],
    streams: Sequence[Stream],
    micro_tile: int = 32,
    widest: int = 16,
    stages_16_bits: bool = True,
) -> Layout:
    """Returns the layout of a non-empty index space.

    Vectors are as wide as sizes, strides and addresses allow, up to ``widest`` elements. If streams disagree about the
    innermost dimension, a lane processes up to ``micro_tile`` elements at a time; tiles of 16-bit elements are staged
    in shared memory only with ``stages_16_bits``.
    """
    sizes, strides = merge(shape, [x.strides for x in streams])
    most = max_rank(len(streams) // 2)
    if len(sizes) - 1 > most:
        raise ValueError(
            f"cupylosses: at most {most + 1} dimensions that cannot be merged, got {len(sizes)}; "
            "make the tensors contiguous with `.contiguous()`."
        )
    flat = len(sizes) == 1 and all(s[0] in (0, 1) for s in strides)
    tiled = _tiles(sizes, strides, streams, micro_tile, stages_16_bits)
    if tiled:
        return tiled
    vec_size = 1
    if all(s[0] in (0, 1) for s in strides):
        vec_size = _widest(sizes, strides, streams, flat, widest)
    access = tuple(_access_of(x, s, sizes, vec_size, flat) for x, s in zip(streams, strides, strict=True))
    kind = "flat" if flat else LINEAR if len(sizes) == 1 else OF_ROWS[min(len(sizes) - 2, 2)]
    return Layout(kind, vec_size, sizes, strides, access, fronts=_fronts(sizes, strides, streams))


def in_short_batches(base: Layout, reduced: bool, one_by_one: bool = False) -> Layout:
    """Returns the layout with one vector per lane in a batch if there are few vectors.

    This spreads them over more lanes, and leaves no warp of the largest GPUs a second batch. If vectors are shifted, a
    few more batches are allowed; a loss that processes shifted vectors ``one_by_one`` does so for any number of
    elements. Tiles have been chosen this way already, and strips follow from their sums. A ``reduced`` loss that fits
    one block stays in one block: it takes no ticket. With four blocks it took 0.0066 ms instead of 0.0054.
    """
    shifted = "shifted" in base.access
    most = SHIFTED_CHUNKS if shifted else MAX_CHUNKS
    if base.kind in (*TILED, *STRIPS) or (base.vectors > most * WARP and not (shifted and one_by_one)):
        return base
    count = chunks_of(base)
    if reduced and count * WARP <= threads(count):
        return base
    return replace(base, unroll=1)


def in_light_batches(base: Layout, heavy: int) -> Layout:
    """Returns the layout with two vectors per lane in a batch, for a launch without a reduction.

    ``heavy`` arithmetic keeps its batches, so that later vectors are in flight while one is evaluated.
    """
    return replace(base, unroll=2) if not heavy and base.kind in ("flat", LINEAR) and base.batch > 2 else base


def spread(
    shape: Sequence[int], streams: Sequence[Stream], base: Layout, always: bool, micro_tile: int
) -> Layout | None:
    """Returns the layout of a launch without a reduction in batches of a few elements per lane, or None.

    Spreads if ``base`` leaves most lanes idle, or ``always``, but never tiles. ``micro_tile`` is that of
    :func:`layout`.
    """
    if base.kind in TILED or not (always or chunks_of(base) < FEW_CHUNKS):
        return None
    if base.kind in GATHERED:
        return replace(base, vec_size=min(base.vec_size, SPREAD_VECTOR), unroll=1)
    return replace(layout(shape, streams, micro_tile, SPREAD_VECTOR), unroll=1)


def spread_chunks(space: Layout) -> int:
    """Returns the number of warps that share the batches of a launch whose batches are all spread."""
    return max(min(space.batches, SPREAD_WARPS), -(-space.batches // SPREAD_BATCHES))


def _fronts(sizes: Sequence[int], strides: Sequence[Sequence[int]], streams: Sequence[Stream]) -> int:
    """Returns the number of stretches of the index space to visit at once (``BatchOrder``).

    Elements that share a sector of a stream are then visited before L2 evicts that sector.
    """
    width = sum([x.itemsize for x, s in zip(streams, strides, strict=True) if any(s)])
    dense = [prod(sizes[:d]) for d in range(len(sizes))]
    far = [
        dense[d]
        for x, s in zip(streams, strides, strict=True)
        if prod([n for n, step in zip(sizes, s, strict=True) if step]) * x.itemsize > KEPT_IN_L2
        for d in range(1, len(sizes))
        if 0 < abs(s[d]) * x.itemsize < SHARED_SECTORS
        and (abs(s[d]) * x.itemsize < SECTOR_BYTES or s[d] * x.itemsize % SECTOR_BYTES != 0)
        and dense[d] * width > KEPT_IN_L2
    ]
    return prod(sizes) // min(far) if far else 1


def gathered(base: Layout, streams: Sequence[Stream]) -> Layout | None:
    """Returns the layout of one dimension in which some streams are dense and the others are gathered, or None.

    It replaces layouts without vectors, and rows with narrower ones. Gathered streams are read and written element by
    element. Computing their offsets costs less here than in rows.
    """
    if base.kind not in SCALAR or len(base.sizes) > len(GATHERED):
        return None
    if max(base.sizes[:-1], default=0) > LONGEST_GATHERED:
        return None
    dense = tuple(prod(base.sizes[:d]) for d in range(len(base.sizes)))
    access = ["stream" if s == dense else "gather" if any(s) else "splat" for s in base.strides]
    whole = [i for i, x in enumerate(access) if x == "stream"]
    if not whole:
        return None
    flat = [streams[i] for i in whole]
    scattered = any(x == "gather" and not stream.read for x, stream in zip(access, streams, strict=True))
    vec_size = _widest((base.elements,), [(1,)] * len(flat), flat, True)
    if scattered:
        vec_size = min(vec_size, SCATTERED_AT_ONCE if max(x.itemsize for x in flat) <= 2 else GATHERED_AT_ONCE)
    while vec_size > GATHERED_AT_ONCE and base.elements < MAX_CHUNKS * WARP * UNROLL[vec_size] * vec_size:
        vec_size //= 2
    rows = all([s[0] == 0 for x, s in zip(access, base.strides, strict=True) if x == "gather"])
    least = base.vec_size if rows else 1
    if vec_size <= least or base.vec_size > least or base.elements < GATHERED_ELEMENTS:
        return None
    for i in whole:
        access[i] = "stream" if _aligned(streams[i], (1,), vec_size) else "shifted"
    for i, (s, stream) in enumerate(zip(base.strides, streams, strict=True)):
        if access[i] != "gather" or not stream.read or len(base.sizes) == 1:
            continue
        if s[0] == 0 and base.sizes[0] >= vec_size:
            access[i] = "gather_row"
        elif s[0] == 1 and base.sizes[0] >= LONG_ROW * vec_size and 4 <= vec_size * stream.itemsize < 4 * vec_size:
            access[i] = "gather_shifted"
    kind = GATHERED[len(base.sizes) - 1]
    return Layout(kind, vec_size, base.sizes, base.strides, tuple(access), fronts=base.fronts)


def _tiles(
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    streams: Sequence[Stream],
    most: int,
    stages_16_bits: bool,
) -> Layout | None:
    """Returns the layout in tiles if streams disagree about the innermost dimension, otherwise None.

    It is None, too, if no tile fits.
    """
    other = _other_fast_dimension(sizes, strides)
    for few in FEW_OF_A_LANE if most > 1 else ():
        tiled = _tiled(sizes, strides, streams, min(few, most), other, True)
        if tiled and tiled.vectors <= MAX_CHUNKS * WARP * tiled.batch:
            return tiled
    if other is not None and most > 1:
        turned = _turned(sizes, strides, other)
        tile = _micro_tiles(*turned, streams, most, False)
        if 1 in (tile.a, tile.b) and (staged := _staged(*turned, streams, stages_16_bits)):
            return staged
    return _tiled(sizes, strides, streams, most, other)


def _turned(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], second: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Returns sizes and strides with dimension ``second`` moved directly after the innermost one."""
    order = [0, second, *(d for d in range(1, len(sizes)) if d != second)]
    return tuple(sizes[d] for d in order), tuple(tuple(s[d] for d in order) for s in strides)


def _tiled(
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    streams: Sequence[Stream],
    most: int,
    other: int | None,
    few: bool = False,
) -> Layout | None:
    """Returns the layout in tiles, or None if no tile fits.

    A lane processes up to ``most`` elements in a step or, with ``few``, in all steps together.
    """
    long_tiled = None if other is None else _long_tiled(sizes, strides, streams, most, other, few)
    return long_tiled or _short_tiled(sizes, strides, streams, most, few)


def _long_tiled(
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    streams: Sequence[Stream],
    most: int,
    other: int,
    few: bool,
) -> Layout | None:
    """Returns the layout in tiles of the innermost dimension and ``other``, or None if one of them is short."""
    sizes, ordered = _turned(sizes, strides, other)
    tile = _micro_tiles(sizes, ordered, streams, most, few)
    if min(sizes[:2]) < (TILE if tile.a * tile.b == 1 else TILE_OF_VECTORS):
        return None
    access = ("stream",) * len(streams)
    if tile != Tile():
        access = tuple(_access_of_tiles(x, s, tile) for x, s in zip(streams, ordered, strict=True))
    return Layout(TILED[len(sizes) > 3], tile.a * tile.b, sizes, ordered, access, tile)


def _staged(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], streams: Sequence[Stream], stages_16_bits: bool
) -> Layout | None:
    """Returns the layout in tiles of single elements, some of which are staged in shared memory, or None.

    Streams of unit stride along the second dimension are staged. The second dimension is the one along which streams of
    fewer bytes per element have unit stride or, if they are equal, the shorter one. Operands of unit stride along the
    first dimension are staged too, except those of 16 bits, whose copy takes longer than it saves. None if there are
    too few elements, or too many lanes would be idle.
    """

    def along(d: int) -> list[int]:
        return [i for i, s in enumerate(strides) if s[d] == 1 and s[1 - d] and streams[i].itemsize in STAGED_LINE]

    first, second = ((sum([streams[i].itemsize for i in along(d)]), sizes[d]) for d in (0, 1))
    if second > first:
        order = [1, 0, *range(2, len(sizes))]
        return _staged([sizes[d] for d in order], [[s[d] for d in order] for s in strides], streams, stages_16_bits)
    if not along(1):
        return None
    count, widest = prod(sizes), max(streams[i].itemsize for i in along(1))
    line = LONG_LINE if widest == 4 and count >= LONG_LINE_ELEMENTS else STAGED_LINE[widest]
    tile = Tile(1, 1, STAGED_LINES, 1, line)
    used = _used(sizes[0], tile.sides[0]) * _used(sizes[1], tile.sides[1])
    if count < STAGED_ELEMENTS[widest] or used < FULL_STRIPS or (widest == 2 and not stages_16_bits):
        return None
    access = [_access_of_tiles(x, s, tile) for x, s in zip(streams, strides, strict=True)]
    for i in along(1):
        access[i] = STAGED[1]
    for i in along(0):
        if streams[i].read and streams[i].itemsize > 2:
            access[i] = STAGED[0]
    staged = Layout(TILED[len(sizes) > 3], 1, tuple(sizes), tuple([tuple(s) for s in strides]), tuple(access), tile)
    return staged if staged_threads(staged, streams) else None


def staged_threads(space: Layout, streams: Sequence[Stream]) -> int:
    """Returns the number of threads per block for which the tiles fit into shared memory.

    Without staged tiles it is MAX_THREADS; if not even one warp fits, it is 0. ``streams`` are the operands, as many
    gradients, and others. A gradient uses the tile of its operand if both are staged in the same direction.
    """
    count = len(streams) // 2
    warp_bytes = sum(
        [
            staged_bytes(x.itemsize, space.tile, access)
            for i, (x, access) in enumerate(zip(streams, space.access, strict=True))
            if access in STAGED and not (count <= i < 2 * count and space.access[i - count] == access)
        ]
    )
    warps = STAGED_BYTES // warp_bytes if warp_bytes else MAX_THREADS // WARP
    return min(MAX_THREADS, WARP << warps.bit_length() - 1) if warps else 0


def staged_bytes(itemsize: int, tile: Tile, access: str) -> int:
    """Returns the size in bytes of a tile in shared memory (``staged_pitch``), rounded up to whole vectors."""
    lines, length = tile.sides if access == STAGED[1] else tile.sides[::-1]
    return -(-lines * (length + (2 if itemsize == 2 else 1)) * itemsize // 16) * 16


def _short_tiled(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], streams: Sequence[Stream], most: int, few: bool
) -> Layout | None:
    """Returns the layout in tiles whose micro-tiles are as long as a short dimension, or None.

    The short dimension is innermost and without gaps in some streams; in others, another dimension is innermost.
    """
    rank, longest = len(sizes), max(x.itemsize for x in streams)
    # Registers per element of an operand, and of its gradient.
    words = max(4, longest) // 4
    room = 20 if most >= 32 and longest > 2 else most
    for short, long in permutations(range(rank), 2):
        n = sizes[short]
        packed = [i for i, s in enumerate(strides) if s[short] == 1 and s[long] == n]
        across = [i for i, s in enumerate(strides) if s[long] == 1 and s[short] != 0]
        others = [i for i, s in enumerate(strides) if s[short] and s[long] and i not in (*packed, *across)]
        if not 1 < n < TILE_OF_VECTORS or not packed or not across or others:
            continue
        gaps = [
            (1, *[x for d, x in enumerate(s) if d != long and not (d == short and i in packed)])
            for i, s in enumerate(strides)
        ]
        vec = 16 // longest
        while vec > 1 and (
            n * vec * words > room
            or sizes[long] % vec
            or not all(streams[i].read or _aligned(streams[i], gaps[i], vec) for i in (*packed, *across))
        ):
            vec //= 2
        tile = Tile(n, vec, 1, 1, most // (n * vec) if few else UNROLL.get(n * vec, 0))
        if vec == 1 or _used(sizes[long], tile.sides[1]) < FULL_STRIPS:
            continue
        access = ["elements" if any((s[short], s[long])) else "splat" for s in strides]
        for i, s in enumerate(strides):
            if (i in packed or s[long] == 1) and _aligned(streams[i], gaps[i], vec):
                access[i] = "packed" if i in packed else "along_b"
        order = [short, long, *(d for d in range(rank) if d not in (short, long))]
        ordered = tuple(tuple(s[d] for d in order) for s in strides)
        return Layout(TILED[rank > 3], n * vec, tuple(sizes[d] for d in order), ordered, tuple(access), tile)
    return None


def _other_fast_dimension(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> int | None:
    """Returns the dimension of unit stride in the streams that have another stride along the innermost one.

    None if no stream has unit stride along the innermost dimension, or if there is not exactly one such other
    dimension.
    """
    if not any(s[0] == 1 for s in strides):
        return None
    dimensions = {
        d
        for s in strides
        if s[0] not in (0, 1)
        for d in range(1, len(sizes))
        if s[d] == 1 and sizes[d] >= TILE_OF_VECTORS
    }
    return dimensions.pop() if len(dimensions) == 1 else None


def _micro_tiles(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], streams: Sequence[Stream], most: int, few: bool
) -> Tile:
    """Returns the tile with the widest vectors in both directions, of up to ``most`` elements together.

    Its lanes and steps leave few lanes outside of short dimensions.
    """
    fast = [[i for i, s in enumerate(strides) if s[d] == 1] for d in (0, 1)]
    largest = max(streams[i].itemsize for i in (*fast[0], *fast[1]))
    square = max(1, min(16 // largest, 4, int(most**0.5)))
    # With 16-bit elements, vectors of 16 bytes in both directions would take twice the registers.
    widths = [max(square, min(16 // largest, most // square)), square]
    for d in (0, 1):
        while widths[d] > 1 and (
            sizes[d] % widths[d] != 0
            or not all(
                _aligned(replace(streams[i], misalignment=0), (1, *strides[i][:d], *strides[i][d + 1 :]), widths[d])
                for i in fast[d]
            )
        ):
            widths[d] //= 2
    a, b = widths
    if a * b == 1 and not few:
        return Tile()
    # Lanes cover two sectors along the first dimension, and at least one along the other; of single elements, two along
    # the other if that leaves one along the first.
    lanes = min(16, max(4, 64 // (a * largest)))
    while lanes > 1:
        down = WARP // lanes * b * largest
        spare = lanes // 2 * a * largest >= SECTOR_BYTES and down < (2 * SECTOR_BYTES if b == 1 else SECTOR_BYTES)
        if not (spare or (lanes > 4 and down < SECTOR_BYTES)):
            break
        lanes //= 2
    while lanes < WARP and WARP // lanes * b >= 2 * sizes[1]:
        lanes *= 2
    while lanes > 1 and lanes * a >= 2 * sizes[0]:
        lanes //= 2
    steps, down = min(UNROLL[a * b], most // (a * b)) if few else UNROLL[a * b], 1
    while down < steps and WARP // lanes * b * down < sizes[1]:
        down *= 2
    tile = Tile(a, b, lanes, steps // down, down)
    return tile if few else _spanning(tile, sizes, largest)


def _spanning(tile: Tile, sizes: Sequence[int], itemsize: int) -> Tile:
    """Returns the tile or, if it leaves many lanes outside of a short dimension, one whose steps span that dimension.

    One warp then reads whole rows. Rows of whole sectors take several steps. Steps of other rows would share sectors,
    so these take as few steps as leave a sector along the other dimension.
    """

    def used(x: Tile) -> float:
        return _used(sizes[0], x.sides[0]) * _used(sizes[1], x.sides[1])

    def in_sectors(x: Tile) -> bool:
        across, down = x.lanes_a * x.a, WARP // x.lanes_a * x.b
        return all([y >= n or y * itemsize >= SECTOR_BYTES for y, n in zip((across, down), sizes, strict=False)])

    if used(tile) >= WELL_USED:
        return tile
    most = min(MOST_STEPS, MAX_RUN // (tile.a * tile.b))
    tiles = []
    for lanes in (4, 8, 16, 32):
        steps = -(-sizes[0] // (tile.a * lanes))
        tiles.append(replace(tile, lanes_a=lanes, steps_a=steps, steps_b=1 if steps > 1 else 2))
    for lanes in (8, 4, 2, 1):
        steps = -(-sizes[1] // (tile.b * (WARP // lanes)))
        tiles.append(replace(tile, lanes_a=lanes, steps_a=1, steps_b=steps))
    spans = any(side >= size for side, size in zip(tile.sides, sizes, strict=False))
    least = used(tile) * (BETTER_USED if spans else 1)
    fitting = [x for x in tiles if 1 < x.steps_a * x.steps_b <= most and used(x) >= least]
    fewest = -1 if sizes[0] * itemsize % SECTOR_BYTES == 0 else 1

    def order(x: Tile) -> tuple[float, bool, int]:
        return used(x), in_sectors(x), fewest * x.lanes_a

    best = max(fitting, key=order, default=tile)
    return best if in_sectors(best) or used(best) > BETTER_USED * used(tile) else tile


def _access_of_tiles(stream: Stream, strides: Sequence[int], tile: Tile) -> str:
    """Returns how tiles access a stream.

    A stream that is not aligned to its vectors is read element by element. Gradients are always aligned.
    """
    if strides[0] == 0 == strides[1]:
        return "splat"
    width = tile.a if strides[0] == 1 else tile.b if strides[1] == 1 else 0
    if not width or stream.misalignment % min(16, width * stream.itemsize):
        return "elements"
    return "along_a" if strides[0] == 1 else "along_b"


@dataclass(frozen=True)
class PartialSums:
    """The partial sums of the gradient of a broadcast operand.

    Corresponds to ``Combination`` of ``kernels/pointwise/pointwise.cuh``. ``kind`` is "all", "row" or "column".
    ``kept_strides`` are those of the partial sums and of the gradient, ``reduced_strides`` those of the partial sums.
    """

    kind: str
    count: int
    kept: tuple[int, ...]
    kept_strides: tuple[tuple[int, ...], tuple[int, ...]]
    reduced: tuple[int, ...]
    reduced_strides: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of dimensions that the kernel has room for."""
        return 1 if max(len(self.kept), len(self.reduced)) <= 1 else COMBINED_RANK

    @property
    def _shares(self) -> tuple[int, int]:
        """Lanes of a warp, and warps of a block, that share an output: few, so that each adds several terms."""
        outputs, terms, lanes, warps = prod(self.kept), prod(self.reduced), 1, 1
        if self.kind == "column":
            warps = MAX_THREADS // WARP if terms > 2 * _COMBINED_AT_ONCE else 1
            while lanes < WARP and terms > 2 * _COMBINED_AT_ONCE * lanes * warps and outputs * lanes < ENOUGH_WARPS:
                lanes *= 2
        else:
            while lanes < WARP and terms > _COMBINED_AT_ONCE * lanes:
                lanes *= 2
            warps = MAX_THREADS // WARP if terms > 2 * _COMBINED_AT_ONCE * lanes else 1
        return lanes, warps

    @property
    def tasks(self) -> int:
        """Number of warps that have terms to add."""
        lanes, warps = self._shares
        return -(-prod(self.kept) * lanes // WARP) * warps

    def words(self) -> list[int]:
        """Returns the kernel's ``Combination`` as 64-bit words."""
        return [
            prod(self.kept),
            prod(self.reduced),
            *self._shares,
            *dimension_words(self.kept or (1,), [s or (0,) for s in self.kept_strides], self.rank),
            *dimension_words(self.reduced or (1,), [self.reduced_strides or (0,)], self.rank),
        ]


def partial_sums(space: Layout, chunks: int, gradient: Sequence[int]) -> PartialSums | None:
    """Returns the partial sums that a launch leaves of a broadcast operand's gradient.

    None if the launch cannot add them up. ``gradient`` holds the gradient's strides in the dimensions of the layout.
    The operand's own strides would not do: they are also 0 where the operand was expanded.
    """
    if not any(gradient):
        count = space.tasks if space.kind in STRIPS else chunks
        return PartialSums("all", count, (), ((), ()), (count,), (1,))
    if space.kind not in STRIPS or (gradient[0] != 0 and gradient[1] != 0):
        return None
    if gradient[0] == 0:
        kind, sizes, strides = "row", (space.strips, *space.sizes[1:]), (0, *gradient[1:])
    elif space.joined:
        kind, sizes, strides = "column", (space.sizes[0], space.joined, space.ranges), (gradient[0], 0, 0)
    else:
        kind, sizes = "column", (space.sizes[0], space.ranges, *space.sizes[2:])
        strides = (gradient[0], 0, *gradient[2:])
    step = [prod(sizes[:d]) for d in range(len(sizes))]
    kept = [d for d, s in enumerate(strides) if s != 0]
    reduced = [d for d, s in enumerate(strides) if s == 0 and sizes[d] > 1]
    count, outputs = prod(sizes), prod([sizes[d] for d in kept])
    most = max(MAX_SUMS, space.elements >> 9, outputs if space.elements >= WARP * outputs else 0)
    if count > most or max(len(kept), len(reduced)) > COMBINED_RANK:
        return None
    return PartialSums(
        kind,
        count,
        tuple(sizes[d] for d in kept),
        (tuple(step[d] for d in kept), tuple(strides[d] for d in kept)),
        tuple(sizes[d] for d in reduced),
        tuple(step[d] for d in reduced),
    )


def in_strips(base: Layout, gradients: Sequence[int]) -> Layout | None:
    """Returns the layout in strips, which can add up the gradients of broadcast operands, or None.

    ``gradients`` are the streams to add up. None if there is nothing to add for them, or too many lanes would be idle.
    """
    strides = [base.strides[i] for i in gradients]
    if base.kind not in OF_ROWS or "shifted" in base.access or len(base.sizes) < 2:
        return None
    if not any(any(s) and (s[0] == 0 or s[1] == 0) for s in strides):
        return None
    return _in_strips(base, any(s[0] != 0 and s[1] == 0 for s in strides))


def in_ragged_strips(
    base: Layout, streams: Sequence[Stream], gradients: Sequence[int], heavy: int = 0
) -> Layout | None:
    """Returns the layout in strips of rows that no vector divides, or None.

    Some streams must be dense. The others must either all have one number per row, or all be the same in every row.
    None if vectors would not be wider than in ``base``, or if rows are short or few. None, too, for one number per row
    beside 16-bit elements, which a separate pass adds up as fast, unless that pass would compute a ``heavy`` loss a
    second time.
    """
    if base.kind not in OF_ROWS or len(base.sizes) < 2 or base.elements < GATHERED_ELEMENTS:
        return None
    dense = tuple(prod(base.sizes[:d]) for d in range(len(base.sizes)))
    whole = [x for x, s in zip(streams, base.strides, strict=True) if s == dense]
    others = [s for s in base.strides if any(s) and s != dense]
    if not whole or not any(any(base.strides[i]) for i in gradients):
        return None
    widest = 32 // max([x.itemsize for x, s in zip(streams, base.strides, strict=True) if any(s)])
    vec_size = _widest((base.elements,), [(1,)] * len(whole), whole, True, widest)
    if vec_size <= base.vec_size or not all(_aligned(x, (1,), vec_size) for x in whole):
        return None
    by_row = all(s[0] == 0 for s in others)
    if not by_row and (len(base.sizes) > 2 or base.sizes[0] > LONGEST_GATHERED or any(s[1] for s in others)):
        return None
    joined = 1 if by_row else _joined(base.sizes[0], vec_size)
    access = ["stream" if s == dense else "splat" if by_row or not any(s) else "periodic" for s in base.strides]
    ragged = replace(base, vec_size=vec_size, access=tuple(access), joined=joined)
    if by_row:
        if not heavy and max(x.itemsize for x in whole) == 2:
            return None
        # In short rows, most vectors are at the ends.
        strips = _in_strips(ragged, False)
        return strips if strips and strips.steps > 1 else None
    return _in_strips(ragged, True) if ragged.rows >= FEWEST_JOINED_ROWS else None


def _joined(length: int, vec_size: int) -> int:
    """Returns the number of rows to join: vectors divide the joined row, which fills strips well."""
    fewest = vec_size // gcd(length, vec_size)
    numbers = [n * fewest for n in range(1, MOST_JOINED + 1)]
    return max(numbers, key=lambda n: (min(_used(n * length // vec_size, WARP), WELL_USED), -n))


def _in_strips(candidate: Layout, by_column: bool) -> Layout | None:
    """Returns the layout in strips, or None if too many lanes would be idle.

    With ``by_column``, columns are added up, otherwise only rows.
    """
    columns, rows, planes = candidate.columns, candidate.rows, prod(candidate.sizes[2:])
    kind, steps = STRIPS[len(candidate.sizes) > 3], UNROLL[candidate.vec_size]
    if not by_column and _used(columns, WARP * steps) >= FULL_STRIPS:
        candidate = replace(candidate, kind=kind, across=WARP, steps=steps)
        return replace(candidate, ranges=max(1, min(rows, MAX_TASKS // (candidate.strips * planes))))
    # Prefer whole sectors, with few lanes and steps past the end of a row or plane.
    used = {
        w: _used(columns, w) * _used(rows, steps * (WARP // w)) for w in (32, 16, 8, 4, 2, 1) if w >= min(8, columns)
    }
    across = max(used, key=lambda w: (used[w] - {32: 0.0, 16: 0.05}.get(w, 0.1), w))
    if used[across] < FULL_STRIPS and candidate.elements > SMALL:
        return None
    group = steps * (WARP // across)
    candidate = replace(candidate, kind=kind, across=across)
    return replace(candidate, ranges=max(1, min(-(-rows // group), MAX_TASKS // (candidate.strips * planes))))


def _used(count: int, size: int) -> float:
    """Returns the used fraction of the groups of ``size`` items that ``count`` items fill."""
    return count / (-(-count // size) * size)


def _widest(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], streams: Sequence[Stream], flat: bool, most: int = 16
) -> int:
    # Streams of single bytes (labels, masks) decide only if there are no others, and streams of one number per vector
    # not at all.
    read = [x.itemsize for x, stride in zip(streams, strides, strict=True) if stride[0] == 1]
    items = [x for x in read if x > 1] or read or [max(x.itemsize for x in streams)]
    vec_size = max(1, min(16 // min(items), 32 // max(items), most))
    while vec_size > 1:
        fits = flat or sizes[0] % vec_size == 0
        for stream, stride in zip(streams, strides, strict=True):
            if stride[0] == 1:
                fits = fits and (
                    _aligned(stream, stride, vec_size)
                    or _shiftable(stream, stride, sizes, vec_size)
                    or _is_small(stream, stride, sizes)
                )
        if fits:
            break
        vec_size //= 2
    return vec_size


def _aligned(stream: Stream, strides: Sequence[int], vec_size: int) -> bool:
    """True if every vector of a stream starts at a multiple of its size, or of 16 bytes if it is larger."""
    word = min(16, vec_size * stream.itemsize)
    return stream.misalignment % word == 0 and all(s % vec_size == 0 for s in strides[1:])


def _shiftable(stream: Stream, strides: Sequence[int], sizes: Sequence[int], vec_size: int) -> bool:
    """True if vectors of a stream may be shifted within registers.

    This also reads the words after a vector, which must belong to the tensor. They do for all vectors but the last one
    of the index space, provided that the elements of the last one are the last in memory.
    """
    rows_in_order = len(sizes) == 1 or (len(sizes) == 2 and strides[1] >= sizes[0])
    return stream.read and rows_in_order and vec_size * stream.itemsize >= 4


def _is_small(stream: Stream, strides: Sequence[int], sizes: Sequence[int]) -> bool:
    """True if an operand is broadcast so often that the L1 cache serves it, element by element."""
    if not stream.read:
        return False
    elements = prod([n for n, s in zip(sizes, strides, strict=True) if s])
    return elements * SMALL_PART <= prod(sizes)


def _access_of(stream: Stream, strides: Sequence[int], sizes: Sequence[int], vec_size: int, flat: bool) -> str:
    if vec_size == 1 or strides[0] != 1 or _aligned(stream, strides, vec_size):
        return _access(strides, vec_size, flat)
    return "shifted" if _shiftable(stream, strides, sizes, vec_size) else "singles"


def _access(strides: Sequence[int], vec_size: int, flat: bool) -> str:
    return "splat" if strides[0] == 0 and (flat or vec_size > 1) else "stream"


def chunks(vectors: int, vec_size: int, unroll: int = 0) -> int:
    """Returns the number of chunks, and thus of partial sums, that the vectors are divided into.

    A batch has ``unroll`` vectors per lane, by default those of :data:`UNROLL` (``kernels/pointwise/pointwise.cuh``,
    steps 1 to 4). The number depends on nothing else, by design: the sum has the same bits on every GPU.
    """
    return min(-(-vectors // (WARP * (unroll or UNROLL[vec_size]))), MAX_CHUNKS)


def chunks_of(space: Layout) -> int:
    """Returns the number of chunks of a layout; those of strips consist of tasks."""
    if space.kind not in STRIPS:
        return chunks(space.vectors, space.vec_size, space.batch)
    rounds = -(-space.tasks // MAX_TASKS)
    return -(-space.tasks // rounds)


def threads(chunks: int) -> int:
    """Returns the number of threads per block: fewer for few chunks, to make at least MIN_BLOCKS blocks.

    It depends on the number of chunks alone, because it determines how the last block divides the partial sums.
    """
    count = MAX_THREADS
    while count > 64 and chunks * WARP < count * MIN_BLOCKS:
        count //= 2
    return count


def grid(chunks: int, threads: int, processors: int) -> int:
    """Returns the number of blocks for ``chunks`` chunks, one per warp at a time, on a GPU with this many SMs.

    There are no more blocks than run at once, and no more than it takes for the same number of rounds: full rounds
    finish together.
    """
    per_block = threads // WARP
    most = processors * BLOCKS_PER_SM * (MAX_THREADS // threads) * per_block
    rounds = -(-chunks // most)
    return max(1, -(-chunks // (rounds * per_block)))


@dataclass(frozen=True)
class SumLayout:
    """Geometry of a sum over some dimensions (``kernels/pointwise/sum_over.cuh``); each list runs innermost first."""

    columns: bool
    outputs: int
    length: int
    slices: int
    slice_length: int
    kept: tuple[int, ...]
    kept_strides: tuple[tuple[int, ...], ...]
    reduced: tuple[int, ...]
    reduced_strides: tuple[tuple[int, ...], ...]
    vec_size: int = 1
    access: tuple[str, ...] = ()
    #: Number of lanes of a warp, and of warps of a block, that share the terms of an output.
    lanes: int = 1
    warps: int = 1
    #: Number of elements per row if rows may have any length, otherwise 0. A row is the innermost dimension of ``kept``
    #: (``columns``) or of ``reduced``; that dimension, and with it ``outputs`` or ``length``, is then counted in
    #: vectors.
    row: int = 0

    @property
    def counted(self) -> int:
        """Number of units of ``outputs`` or ``length`` per vector: 1 if they count vectors."""
        return 1 if self.row else self.vec_size

    @property
    def bundle(self) -> int:
        """Number of outputs that a warp processes at a time."""
        return WARP // self.lanes * (self.counted if self.columns else 1)

    @property
    def places(self) -> int:
        """Number of partial sums per slice, including those of outputs that do not exist."""
        return self.outputs * (self.vec_size if self.row and self.columns else 1)

    def arguments(self, kept_rank: int, reduced_rank: int) -> tuple[int | list[int], ...]:
        """Returns the arguments of a kernel with room for these numbers of dimensions."""
        return (
            self.outputs,
            self.length,
            self.slices,
            self.slice_length,
            self.lanes,
            self.warps,
            dimension_words(self.kept, self.kept_strides, kept_rank),
            dimension_words(self.reduced, self.reduced_strides, reduced_rank),
            *([self._rows()] if self.row else []),
        )

    @property
    def shared(self) -> bool:
        """True unless every output has exactly one lane (``columns``) or one warp."""
        return (self.lanes, self.warps) != (1 if self.columns else WARP, 1)

    @property
    def tasks(self) -> int:
        """Number of pairs of a slice and a bundle of outputs."""
        return -(-self.outputs // self.bundle) * self.slices

    def _rows(self) -> list[int]:
        """Returns the kernel's ``Rows`` as words."""
        sizes = [*self.kept, *self.reduced]
        strides = [(*x, *y) for x, y in zip(self.kept_strides, self.reduced_strides, strict=True)]
        # Number of elements of a row's last vector that exist.
        behind = (self.row - 1) % self.vec_size + 1
        ends = [sum([max(0, (n - 1) * s) for n, s in zip(sizes, x, strict=True)]) for x in strides]
        return [
            self.row,
            *(end + (behind if a == "ragged" else 1) for end, a in zip(ends, (*self.access, "", ""), strict=True)),
        ]


def sum_layout(shape: Sequence[int], streams: Sequence[Sequence[int]], result: Sequence[int]) -> SumLayout:
    """Splits a non-empty shape into the dimensions that are kept and those that are summed.

    ``streams`` are the strides of the tensors that are read, ``result`` those of the result: 0 along summed dimensions.
    """
    kept_dims = [d for d in range(len(shape)) if result[d] != 0 and shape[d] != 1]
    summed = [d for d in range(len(shape)) if result[d] == 0 and shape[d] != 1]
    everything = [*streams, result]
    kept, kept_strides = merge([shape[d] for d in kept_dims], [[s[d] for d in kept_dims] for s in everything])
    reduced, reduced_strides = merge([shape[d] for d in summed], [[s[d] for d in summed] for s in everything])
    if not kept_dims:
        kept_strides = tuple((0,) for _ in everything)
    if not summed:
        reduced_strides = tuple((0,) for _ in everything)
    most = max_rank(len(streams) - 1)
    if max(len(kept), len(reduced)) > most:
        raise ValueError(
            f"cupylosses: at most {most} dimensions that cannot be merged, got {max(len(kept), len(reduced))}; "
            "make the tensors contiguous with `.contiguous()`."
        )
    outputs, length = prod(kept), prod(reduced)
    # Lanes run along the kept or the reduced dimensions, whichever are nearer to unit stride in the streams that have
    # both, which are the large ones; ties go to the longer ones.
    large = [i for i in range(len(streams)) if any(kept_strides[i]) and any(reduced_strides[i])]
    near = [_nearest([strides[i] for i in large]) for strides in (kept_strides, reduced_strides)]
    columns = outputs > 1 and (near[0] < near[1] or (near[0] == near[1] and outputs >= length))
    if outputs > 1 and length > 1 and (kept if columns else reduced)[0] < WARP:
        # Lanes along a dimension shorter than a warp extend into other dimensions, whose elements may be far away.
        pairs = [(kept_strides[i], reduced_strides[i]) for i in large]
        sectors = {x: _sectors_per_term(kept, reduced, pairs, x) for x in (True, False)}
        columns ^= sectors[not columns] < 0.9 * sectors[columns]
    warps = -(-outputs // WARP) if columns else outputs
    terms = SLICE_TERMS if columns else SLICE_TERMS_OF_ROWS * WARP
    slices = max(1, min(-(-length // terms), TARGET_WARPS // warps, MAX_PARTIALS // outputs))
    slice_length = -(-length // slices)
    return SumLayout(
        columns,
        outputs,
        length,
        -(-length // slice_length),
        slice_length,
        kept,
        kept_strides,
        reduced,
        reduced_strides,
    )


def is_sparse(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """True if two passes over a large array cost more than a copy and two passes over the copy.

    This is so if the array fills little of the sectors that it touches, or little of the pairs of sectors in which
    memory is read, if L2 does not keep these.
    """
    if prod(shape) < SMALL or 0 in strides or min(strides, default=0) < 0:
        return False
    sizes, (merged,) = merge(shape, [strides])
    if _sectors(sizes, merged, itemsize) > SPARSE:
        return True
    pairs = _sectors(sizes, merged, itemsize, 2 * SECTOR_BYTES)
    return pairs > SPARSE and pairs * prod(shape) * itemsize > SPARSE_BYTES


def reordered(
    shape: tuple[int, ...], streams: Mapping[int, Stream], stages_16_bits: bool, twice: bool, gaps: bool, several: bool
) -> dict[int, tuple[int, ...]]:
    """Returns the operands to copy into the order of the first one, with the strides of the copies.

    ``streams`` holds the operands of the full shape. Operands in other orders are copied if they are read ``twice``, or
    have too many dimensions to be gathered. Large ones are also copied if they would be gathered from sectors that no
    cache keeps, or read in tiles of single elements, or of pairs if these have 16 bits or ``several`` gradients are
    written. If the first one has ``gaps``, all are copied to row-major order, which its gradient has.
    """
    if len(streams) < 2 or prod(shape) < ORDERED_ELEMENTS:
        return {}
    space = layout(shape, [*streams.values()], stages_16_bits=stages_16_bits)
    itemsize = max(x.itemsize for x in streams.values())
    narrow = 2 if space.kind in TILED and (itemsize == 2 or several) else 1
    if space.kind not in (*TILED, *SCALAR) or space.vec_size > narrow or space.staged:
        return {}
    fastest = {min(range(len(x)), key=x.__getitem__) for x in space.strides}
    large = itemsize <= 4 and space.elements >= SINGLE_ELEMENTS
    many = len(space.sizes) > len(GATHERED)
    if len(fastest) == 1:
        copied = large and many
    elif space.kind in TILED:
        copied = large
    else:
        copied = twice or many or (large and _is_scattered(space, itemsize))
    if not copied:
        return {}
    first = next(iter(streams.values()))
    order = row_major(shape) if gaps else first.strides
    return {i: order for i, x in streams.items() if not in_order(shape, x.strides, order)}


def _is_scattered(space: Layout, itemsize: int) -> bool:
    """True if some stream would be gathered from sectors that are read from memory again and again."""
    dense = [prod(space.sizes[:d]) for d in range(len(space.sizes))]
    apart = [min(range(len(s)), key=s.__getitem__) for s in space.strides]
    return any(
        dense[d] >= SCATTERED_APART and _sectors(space.sizes, s, itemsize) > SCATTERED
        for d, s in zip(apart, space.strides, strict=True)
    )


def blocks_vectors(full: Sequence[Stream], small: Stream, copy: Stream, shape: Sequence[int]) -> bool:
    """True if a broadcast operand forces loads of single elements, where its copy would allow vectors.

    ``full`` are the operands of the full shape, which are read beside it.
    """
    if prod(shape) < COMPACTED_ELEMENTS:
        return False
    return layout(shape, [*full, small]).vec_size == 1 < layout(shape, [*full, copy]).vec_size


def is_out_of_order(order: Layout, stream: int, itemsize: int) -> bool:
    """True if a kernel with this layout writes only a small part of each sector of a stream at a time."""
    scattered = order.kind != "flat" and order.kind not in TILED
    return scattered and _sectors(order.sizes, order.strides[stream], itemsize) > 3


def has_narrow_tiles(order: Layout, itemsize: int) -> bool:
    """True if a kernel with this layout writes a large array in micro-tiles of less than 16 bytes.

    That takes longer than a copy from another order.
    """
    narrow = order.kind in TILED and not order.staged and order.vec_size * itemsize < 16
    return narrow and order.elements >= ORDERED_ELEMENTS


def _sectors(sizes: Sequence[int], strides: Sequence[int], itemsize: int, sector: int = SECTOR_BYTES) -> float:
    """Returns the bytes of the sectors that the first elements touch, per byte of these elements."""
    offsets = _offsets(sizes, strides, _SAMPLE)
    return len({x * itemsize // sector for x in offsets}) * sector / (len(offsets) * itemsize)


def _sectors_per_term(
    kept: Sequence[int],
    reduced: Sequence[int],
    strides: Sequence[tuple[Sequence[int], Sequence[int]]],
    columns: bool,
) -> float:
    """Returns the number of float32 sectors that a warp touches per term, for its first terms."""
    outputs, length = prod(kept), prod(reduced)
    if columns:
        across = min(WARP, outputs)
        along = min(length, _SAMPLE // across)
    else:
        along = min(length, _SAMPLE)
        across = min(outputs, _SAMPLE // along)
    touched = 0
    for of_kept, of_reduced in strides:
        first, second = _offsets(kept, of_kept, across), _offsets(reduced, of_reduced, along)
        touched += len({(a + b) * 4 // SECTOR_BYTES for a in first for b in second})
    return touched / (across * along)


def _offsets(sizes: Sequence[int], strides: Sequence[int], count: int) -> set[int]:
    """Returns the offsets of the first ``count`` elements."""
    offsets = [0]
    for n, stride in zip(sizes, strides, strict=True):
        fewest = min(n, -(-count // len(offsets)))
        offsets = [x + i * stride for i in range(fewest) for x in offsets]
    return set(offsets[:count])


def sum_in_vectors(
    x: SumLayout, streams: Sequence[Stream], result: Stream, unaligned: bool = False, heavy: int = 0
) -> SumLayout:
    """Returns the sums with as many neighbouring elements per lane as sizes, strides and addresses allow.

    Neighbours are those along the direction of the lanes: outputs, which are stored together, or terms, which are
    added. With ``unaligned``, vectors may begin anywhere. Unaligned terms are then loaded one by one beside others.
    Large sums, mostly of 16-bit elements, cut their vectors out of aligned words, unless the loss is ``heavy`` and too
    many elements of these vectors are absent.
    """
    streams = [replace(s, read=False) for s in streams]
    along = x.kept if x.columns else x.reduced
    strides = list(zip(*((x.kept_strides, x.reduced_strides) if x.columns else (x.reduced_strides, x.kept_strides))))
    everything = [*streams, result] if x.columns else list(streams)
    inner = [strides[i][0][0] for i in range(len(everything))]
    vec_size, alone = 1, set()
    if all(s in (0, 1) for s in inner):
        of_all = [(i, *a[1:], *b) for i, (a, b) in zip(inner, strides, strict=False)]
        if unaligned and not x.columns:
            alone = {i for i, s in enumerate(of_all) if s[0] == 1 and not _aligned(everything[i], s, 2)}
        vectors = [i for i in range(len(everything)) if i not in alone]
        vec_size = _widest((along[0],), [of_all[i] for i in vectors], [everything[i] for i in vectors], False)
    access = ["stream"] * len(streams)
    if vec_size > 1:
        access = [
            "singles" if i in alone else _access((*a, *b), vec_size, False)
            for i, (a, b) in enumerate(strides[: len(streams)])
        ]
    vectorized = replace(x, vec_size=vec_size, access=tuple(access))
    ragged = _ragged_sums(vectorized, streams, inner, heavy) if unaligned and all(s in (0, 1) for s in inner) else None
    return _shared_sums(ragged or vectorized)


def _ragged_sums(x: SumLayout, streams: Sequence[Stream], inner: Sequence[int], heavy: int) -> SumLayout | None:
    """Returns the sums in vectors that begin with each row, at any address; None if that takes no less time."""
    sizes = x.kept if x.columns else x.reduced
    row, read = sizes[0], [s.itemsize for s, step in zip(streams, inner, strict=False) if step]
    if not read or max(read) > 4 or x.outputs * x.length < RAGGED_ELEMENTS:
        return None
    if max(read) > 2 and (x.columns or heavy or row < RAGGED_ROW[len(x.reduced) > 1]):
        return None
    if min(len(x.kept), len(x.reduced)) > 2:
        return None  # kernel parameters have no room for another stream with so many dimensions
    vec_size = 16 // max(read)
    while vec_size // 2 >= row:
        vec_size //= 2
    if vec_size < 4 * x.vec_size or vec_size * min(read) < 4:
        return None
    if heavy and _used(row, vec_size) < WELL_FILLED:
        return None

    vectors = -(-row // vec_size)
    # Kernels have no dimension of size 1, unless it is the only one.
    first = 1 if vectors == 1 and len(sizes) > 1 else 0

    def counted(strides: tuple[tuple[int, ...], ...], along: bool) -> tuple[tuple[int, ...], ...]:
        """Returns the strides in vectors, with a stream of positions within a row inserted before the result."""
        places = [0] * len(strides[0])
        if along:
            strides = tuple([(vec_size * s[0], *s[1:])[first:] for s in strides])
            places = [vec_size, *places[1:]][first:]
        return (*strides[:-1], tuple(places), strides[-1])

    of_rows = (vectors, *sizes[1:])[first:]
    return replace(
        x,
        kept=of_rows if x.columns else x.kept,
        reduced=x.reduced if x.columns else of_rows,
        kept_strides=counted(x.kept_strides, x.columns),
        reduced_strides=counted(x.reduced_strides, not x.columns),
        outputs=x.outputs // row * vectors if x.columns else x.outputs,
        length=x.length if x.columns else x.length // row * vectors,
        slice_length=x.slice_length if x.columns else -(-x.slice_length // vec_size),
        vec_size=vec_size,
        access=tuple(["ragged" if step else "splat" for step in inner[: len(streams)]]),
        row=row,
    )


def _shared_sums(x: SumLayout) -> SumLayout:
    """Cuts the sums into slices, and distributes lanes and warps over the outputs.

    Few outputs need more lanes each; short sums leave lanes to other outputs.
    """
    if x.columns:
        lanes = max(1, min(WARP // -(-x.outputs // x.counted), x.slice_length))
        x = replace(x, lanes=lanes)
        bundles, fewest = -(-x.outputs // x.bundle), -(-x.length // (SLICE_TERMS * lanes))
        slices = max(1, min(fewest, TARGET_WARPS // bundles, MAX_PARTIALS // x.places))
        if bundles * slices < ENOUGH_WARPS and x.length >= lanes * WARP:
            x = replace(x, warps=MAX_THREADS // WARP)
            if x.row:
                most = min(slices, max(4, 2 * RAGGED_BLOCKS // bundles))
                slices = max(range(1, most + 1), key=lambda n: (_used(n * bundles, RAGGED_BLOCKS), -n))
        length = -(-x.length // slices)
    else:
        length, round_ = x.slice_length, x.counted * WARP * TERMS_IN_FLIGHT
        warps, most = 1, MANY_ROUNDS * round_
        if x.slices > 1:
            most = FEWEST_ROUNDS * round_
        elif x.outputs < ENOUGH_WARPS and length > FEWEST_ROUNDS * round_:
            warps = MAX_THREADS // WARP
            most = MANY_SHARED_ROUNDS * warps * round_
        if length > most:
            more = min(ENOUGH_WARPS // x.outputs, x.length // (FEWEST_ROUNDS * round_), MAX_PARTIALS // x.outputs)
            length, warps = -(-x.length // max(x.slices, more)), 1
        length = -(-length // x.counted) * x.counted
        lanes = WARP
        while lanes > 1 and lanes * TERMS_IN_FLIGHT > max(length // x.counted, TERMS_IN_FLIGHT):
            lanes //= 2
        x = replace(x, lanes=lanes, warps=warps)
    return replace(x, slice_length=length, slices=-(-x.length // length))


def sum_grid(warps: int, processors: int) -> int:
    """Returns the number of blocks of a sum that is spread over ``warps`` warps.

    The limit is many more blocks than run at once: registers, and with them the number of resident blocks, differ
    between losses.
    """
    return max(1, min(-(-warps * WARP // MAX_THREADS), processors * SUM_BLOCKS_PER_SM))


def _nearest(strides: Sequence[Sequence[int]]) -> int:
    """Returns the smallest non-zero innermost stride of the streams."""
    return min((abs(s[0]) for s in strides if s[0] != 0), default=1 << 62)
