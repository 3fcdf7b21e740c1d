"""Launch geometry of row statistics: which threads take which rows. Pure functions of integers.

lanes    neighbouring lanes of a warp share a row
block    the threads of a block share a row, or those of several blocks, each of which takes a part of it

A thread takes vectors of features in turn. Vectors, lanes and chunks follow from dtypes and sizes, so that strides and
addresses decide only how a vector is read: at once, or element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from cupylosses.engines.strides import MAX_RANK, dimension_words, merge, power_of_two
from cupylosses.jit.gpu import WARP

#: Bytes of all operands that a thread reads together, and vectors of less than 16 bytes of each, at most.
AHEAD_BYTES = 128
MAX_AHEAD = 8
#: Vectors of 16 bytes of a row that a lane takes of short rows. Besides its features a row costs a warp some 400
#: instructions, and a block of four warps 1,900.
FEW_VECTORS = 4
#: Words of four bytes of all vectors of a row that a lane has in registers, at most, an element of 16 bits being one:
#: of 16 bits, which are converted twice, of others, and along tangents. The least rows of such kernels, which are
#: compiled for their number of features.
REGISTER_WORDS_NARROW, REGISTER_WORDS, REGISTER_WORDS_ALONG = 24, 32, 48
REGISTER_ROWS = 1 << 15
#: Bytes of a row, as it is kept, that a warp takes at most: shared memory has room for too few warps of longer ones.
WARP_BYTES = 12 << 10
#: Threads of a block whose lanes share rows, at most and at least, and the bytes of its rows at most.
LANE_THREADS = 256
MIN_LANE_THREADS = 64
LANE_BYTES = 32 << 10
#: Vectors of 16 bytes of each operand that a thread reads together where it writes gradients, at most: more registers
#: leave room for fewer rows.
BATCH = 2
#: Elements of a vector where a derivative along tangents is computed, at most, half as many of 16 bits with more
#: operands than these. Its numbers are nested and take twice the registers, so that its blocks have as many threads as
#: those that share a multiprocessor, and fewer vectors of long rows are read together.
ALONG_ELEMENTS = 4
ALONG_OPERANDS = 3
#: Threads of a block that shares a row, at most and at least.
MAX_BLOCK_THREADS = 512
MIN_BLOCK_THREADS = 64
#: Vectors that threads read together of rows that shared memory has no room for, of which a multiprocessor has one
#: block; where no gradients are written, the bytes of all operands; and shared memory of that block at most: what is in
#: flight takes the L1 cache, which has the rest.
LONG_AHEAD = 4
LONG_AHEAD_BYTES = 256
LONG_ROOM = 128 << 10
#: Of blocks that share a multiprocessor, the threads of one at most, and the bytes of its row.
SHARING_THREADS = 256
SHARING_BYTES = 100 << 10
#: Bytes of a row that are one part of it, and parts of a row at most: as many blocks as a cluster has on every GPU with
#: clusters.
PART_BYTES = 64 << 10
MAX_PARTS = 8
#: Bytes of a part above which a cluster has no room for a row of so many; and parts of such a row at most, as many of
#: which are about as large as leave room for two blocks on a multiprocessor.
LONG_PART_BYTES = 200 << 10
MANY_PARTS = 128
#: Layout of kernels in which each part of such a row has a block.
PART = "part"
#: Rows that leave multiprocessors without work where each has a cluster, at most. Blocks that share those with more
#: parts than a cluster has blocks, in all; and how many of these are resident on a multiprocessor.
FEW_ROWS = 16
#: Elements of a vector, and of all vectors that a thread reads together, of parts that are not kept, at most.
PART_ELEMENTS = 4
PART_NUMBERS = 32
SPLIT_BLOCKS = 256
SPLIT_RESIDENT = 2
#: Elements of all vectors that a thread reads together of parts that are kept, at most: 80 registers have room for
#: them.
KEPT_NUMBERS = 24
#: Shared memory of such a block besides its part.
PART_RESERVED = 4 << 10
#: Bytes of a row above which it has two parts at least: more blocks of fewer threads, which are less often at the same
#: step.
WHOLE_BYTES = 40 << 10
#: Operands whose vectors of 16 bytes blocks copy asynchronously, at most: with three a thread is faster if it adds up
#: the first vectors while others are on their way. Lanes copy shorter vectors.
COPIED_OPERANDS = 2
#: Bytes of an element that is kept in shared memory, at least.
KEPT_BYTES = 4
#: Bytes of elements of which every second one is read in whole vectors.
PAIRED_BYTES = 2
#: Shared memory that kernels declare, at most: statistics of each warp, and the result of a row.
DECLARED_BYTES = 14 << 10
#: Rows from this size on are taken by blocks that stay, and prefetch their next row; threads of those that share a
#: multiprocessor.
LONG_BYTES = 48 << 10
RESIDENT_THREADS = 768
#: Blocks of a multiprocessor that look for stale gradients.
CHECKING = 2
#: Chunks that rows are cut into until a chunk takes more rows than a block at once, twice as many where a warp copies
#: rows of three operands element by element; and the most times as many rows that it takes then.
CHUNKS = 8192
MAX_ROUNDS = 64
#: Chunks of rows of up to so many lanes: a block of so few elements spends most of its time on its beginning and end.
SHORT_CHUNKS = 2048
FEW_LANES = 8


@dataclass(frozen=True)
class RowStream:
    """One array as the layout sees it: strides of its rows, the distance of its features, bytes per element, address
    modulo 16. Labels, masks and results have no features.
    """

    strides: tuple[int, ...]
    step: int = 0
    itemsize: int = 0
    misalignment: int = 0


@dataclass(frozen=True)
class Parts:
    """Geometry of the parts of rows that have a block each. A block has ``threads``, of which each has so many
    ``batches`` of ``ahead`` vectors of each operand: a batch of all threads takes ``batch_bytes`` of the ``room`` of a
    multiprocessor, 0 batches of rows that are too long to be kept. ``whole`` if those may be copied that are all kept.
    """

    threads: int
    ahead: int
    batches: int = 0
    batch_bytes: int = 0
    room: int = 0
    whole: bool = False

    def resident(self, threads: int) -> int:
        """The blocks of a multiprocessor that runs so many threads."""
        if not self.batches:
            return max(1, min(threads // self.threads, SPLIT_RESIDENT))
        return max(1, min(threads // self.threads, self.room // (self.batch_bytes + PART_RESERVED)))

    def kept(self, resident: int) -> int:
        """Vectors that a thread keeps of each operand, the first ones, where so many blocks share a multiprocessor."""
        return self.ahead * max(
            0, min(self.batches, (self.room // resident - PART_RESERVED) // max(1, self.batch_bytes))
        )

    def held(self, resident: int) -> bool:
        """True if these are all."""
        return 0 < self.batches * self.ahead == self.kept(resident)

    def shared(self, resident: int) -> int:
        """Their bytes, of a block."""
        return self.kept(resident) // self.ahead * self.batch_bytes


#: The place of ``kept`` in the words of ``RowsOfFeatures``.
_KEPT = 2


@dataclass(frozen=True)
class Layout:
    """Launch geometry of rows: ``words`` is the kernel's ``RowsOfFeatures``; ``many`` if rows have several dimensions;
    ``wide`` has a bit for each vector that is read or written at once, ``paired`` one for each that is read as every
    second element of two of these; ``held`` if a row stays in shared memory, of
    which a block then takes ``shared`` bytes, and ``copied`` if its vectors go there without registers; otherwise the
    row's first vectors may, or each of its parts has a block of its own, of ``apart``. ``split`` if rows are so few
    that blocks share them in all kernels. ``resident`` is the number of blocks of a multiprocessor that stay, 0 if
    registers decide; ``ahead`` that of the vectors of each operand that a thread reads together, ``value_ahead``
    where it writes no gradients. A row has ``parts``, which a ``cluster`` of blocks takes, or one block, in ``rounds``.
    So many rows of each stream are ``neighbours``, those that follow one another in memory. ``in_registers`` are the
    features of short rows whose vectors stay in the registers of a lane, 0 of others.
    """

    kind: str
    vec_size: int
    wide: int
    held: bool
    width: int
    threads: int
    rows_per_chunk: int
    chunks: int
    many: bool
    words: list[int]
    shared: int
    resident: int
    ahead: int
    value_ahead: int
    parts: int = 1
    rounds: int = 1
    cluster: int = 1
    copied: bool = False
    apart: Parts | None = None
    split: bool = False
    paired: int = 0
    neighbours: tuple[int, ...] = ()
    in_registers: int = 0

    def rows_at_once(self, stream: int) -> int:
        """Neighbouring rows of which the lanes of a warp read an element each at once."""
        return min(WARP // self.width, self.neighbours[stream]) if self.kind == "lanes" else 1

    def parts_meet(self, processors: int, threads: int) -> bool:
        """True if the parts of a row may wait for each other, in a block each: if all of them run at once, and a half
        besides; those that are not kept, with those of all rows. A multiprocessor runs so many ``threads``.
        """
        assert self.apart is not None
        resident = self.apart.resident(threads)
        if not self.apart.kept(resident):
            return self.split and processors * resident >= self.chunks * self.parts
        return 2 * processors * resident >= 3 * self.parts

    def words_of_parts(self, resident: int) -> list[int]:
        """``words`` of kernels of parts, of which a multiprocessor runs so many."""
        assert self.apart is not None
        return [*self.words[:_KEPT], self.apart.kept(resident), *self.words[_KEPT + 1 :]]

    def part_memory(self, rows: int, statistics: int) -> int:
        """Doubles that such blocks share: records, ``PartsInMemory`` and counters."""
        parts = rows * self.parts
        return parts * (1 + part_numbers(statistics)) + (parts + rows + 1) // 2

    def blocks(self, processors: int) -> int:
        """The blocks of a launch, at most: one for each chunk, since the registers of a formula decide how many run at
        once; of long rows as many as have room. Clusters may leave multiprocessors idle, and only the hardware knows
        how many have room.
        """
        chunks = min(self.chunks, processors * self.resident) if self.resident else self.chunks
        return max(1, chunks) * self.cluster

    def blocks_of_check(self, processors: int) -> int:
        """The blocks of a launch that looks for stale gradients."""
        return max(1, min(self.chunks, processors * CHECKING // self.cluster)) * self.cluster

    @property
    def records(self) -> int:
        """Records of the scale of gradients: one for each chunk and warp that evaluates rows, in a block that shares
        rows the first.
        """
        return self.chunks * (self.threads // WARP if self.kind == "lanes" else self.cluster)


def layout(
    shape: Sequence[int],
    features: int,
    vectors: Sequence[RowStream | None],
    streams: Sequence[RowStream],
    read: int,
    along: bool,
    room: int,
    clusters: bool,
) -> Layout:
    """The layout of rows of a given shape. ``streams`` are all arrays in the order of the kernel, ``vectors`` those of
    them whose features are read, ``read`` in number, and then their gradients, None for those that are not written.
    ``along`` is True of a derivative along tangents; ``room`` is the shared memory of a block; ``clusters`` if the chip
    has clusters of blocks, which change no bit.
    """
    rows = prod(shape)
    sizes_of_elements = [x.itemsize for x in vectors[:read] if x]
    largest = max(sizes_of_elements)
    widest = 16 // largest
    # Elements of 16 bits are kept in words of 32.
    in_memory, row = features * read * largest, features * read * max(KEPT_BYTES, largest)
    # Few rows that are not kept are shared by all blocks at once.
    most_bytes = row if rows <= FEW_ROWS else in_memory
    split = rows <= FEW_ROWS and most_bytes > MANY_PARTS * SHARING_BYTES
    many_parts = row > MAX_PARTS * LONG_PART_BYTES and most_bytes <= MANY_PARTS * SHARING_BYTES
    if split or (many_parts and read > COPIED_OPERANDS):
        widest = min(widest, PART_ELEMENTS)
    if along and widest > ALONG_ELEMENTS:
        widest = ALONG_ELEMENTS if read <= ALONG_OPERANDS else ALONG_ELEMENTS // 2
    # Vectors of a row whose features they do not divide would begin anywhere. Shorter ones are coalesced as well, if a
    # thread reads more of them together.
    vec_size = gcd(widest, features)
    narrower = widest // vec_size
    value_ahead = _ahead(AHEAD_BYTES, read, narrower)
    count = features // vec_size
    width = power_of_two(max(1, -(-count // (FEW_VECTORS * narrower))))
    ahead = min(value_ahead, BATCH * narrower)
    parts = cluster = taken = 1
    if row <= WARP_BYTES:
        kind, threads, width = "lanes", LANE_THREADS, min(width, WARP)
        # Short rows have fewer vectors of a lane than it could read together.
        value_ahead = min(value_ahead, power_of_two(max(1, -(-count // width))))
        ahead = min(value_ahead, BATCH * narrower * max(1, KEPT_BYTES * widest // 16))
        while threads > MIN_LANE_THREADS and row * (threads // width) > LANE_BYTES:
            threads //= 2
    else:
        # Parts and their threads are those of any chip: the order of additions must not depend on it.
        parts = 2 if row > WHOLE_BYTES else 1
        while parts < MAX_PARTS and row > parts * PART_BYTES:
            parts *= 2
        if many_parts:
            parts = max(WARP, power_of_two(-(-in_memory // SHARING_BYTES)))
        elif split:
            parts = power_of_two(SPLIT_BLOCKS // max(1, rows) + 1) // 2
        sharing = along or parts > MAX_PARTS or row <= parts * SHARING_BYTES
        most = SHARING_THREADS if sharing else MAX_BLOCK_THREADS
        kind, team = "block", min(max(width // parts, MIN_BLOCK_THREADS), most)
        cluster = min(parts, MAX_PARTS) if clusters else 1
        threads = team if clusters else min(team * parts, SHARING_THREADS if along else MAX_BLOCK_THREADS)
        width = threads * cluster
        value_ahead = value_ahead if cluster > 1 else ahead
        taken = team * parts // width
    at_once, most = threads * cluster // width, SHORT_CHUNKS if width <= FEW_LANES else CHUNKS
    if kind == "lanes" and vec_size == 1 and width == WARP and largest >= KEPT_BYTES and read > COPIED_OPERANDS:
        most *= 2
    rounds = max(1, min(rows * cluster // (at_once * most), MAX_ROUNDS))
    wide = sum([1 << i for i, x in enumerate(vectors) if x is None or _whole(x, shape, vec_size)])
    paired = sum([1 << i for i, x in enumerate(vectors[:read]) if x and _is_paired(x, shape, vec_size)])
    sizes, strides = merge(shape, [x.strides for x in streams])
    many = len(sizes) > 1
    neighbours = tuple([sizes[0] if x[0] == 1 else 1 for x in strides])
    # A thread has whole batches of vectors.
    each = threads * (row // count)
    shared = -(-count // (width * taken * ahead)) * ahead * taken * each
    held, kept = shared <= room, 0
    all_read = (1 << read) - 1
    whole_elements = wide & all_read == all_read and min(sizes_of_elements) >= KEPT_BYTES
    copied = whole_elements and held
    copied = copied and (kind == "lanes" if narrower > 1 else kind == "block" and read <= COPIED_OPERANDS)
    apart = None
    if parts > MAX_PARTS and rounds == 1:
        part_threads = min(max(width * taken // parts, MIN_BLOCK_THREADS), MAX_BLOCK_THREADS)
        if split:
            most = min(AHEAD_BYTES // largest, PART_NUMBERS) // (read * vec_size)
            apart = Parts(part_threads, min(power_of_two(most + 1) // 2, MAX_AHEAD) or 1)
        else:
            part_ahead = max(1, min(ahead, KEPT_NUMBERS // (read * vec_size)))
            batches = -(-count // (part_threads * parts * part_ahead))
            whole = whole_elements and narrower == 1 and read <= COPIED_OPERANDS
            of_batch = part_threads * (row // count) * part_ahead
            apart = Parts(part_threads, part_ahead, batches, of_batch, room + DECLARED_BYTES + (1 << 10), whole)
    if not held:
        ahead = apart.ahead if apart and split else min((BATCH if along else LONG_AHEAD) * narrower, MAX_AHEAD)
        value_ahead = _ahead(AHEAD_BYTES if along or split else LONG_AHEAD_BYTES, read, narrower)
        kept = min(room, LONG_ROOM) // (ahead * each) * ahead if taken == 1 else 0
        shared = kept * each
    most_words = REGISTER_WORDS if largest >= KEPT_BYTES else REGISTER_WORDS_NARROW
    short = row <= KEPT_BYTES * (REGISTER_WORDS_ALONG if along else most_words) and rows >= REGISTER_ROWS
    in_registers = features if short and kind == "lanes" and width == 1 else 0
    if in_registers:
        copied, shared = False, 0
    words = [rows, features, kept, *(x.step for x in streams)]
    words += dimension_words(sizes, strides, MAX_RANK if many else 1)
    resident = 0
    if kind == "block" and cluster == 1 and row >= LONG_BYTES:
        resident = RESIDENT_THREADS // threads
        resident = max(1, min(resident, room // (shared + DECLARED_BYTES)) if held else resident)
    return Layout(
        kind, vec_size, wide, held, width, threads, rounds * at_once, -(-rows // (rounds * at_once)), many, words,
        shared, resident, ahead, value_ahead, parts, taken, cluster, copied, apart,
        parts > MAX_PARTS and rows <= FEW_ROWS, paired, neighbours, in_registers,
    )  # fmt: skip


def part_numbers(statistics: int) -> int:
    """Doubles of the statistics of a part, at most."""
    return 2 * statistics


def _ahead(size: int, read: int, narrower: int) -> int:
    """Vectors of each of ``read`` operands that have so many bytes together, a power of two."""
    return min(power_of_two(max(1, size // (16 * read)) + 1) // 2 * narrower, MAX_AHEAD)


def _is_paired(x: RowStream, shape: Sequence[int], vec_size: int) -> bool:
    """True of 16 bits that are every second element of whole vectors: one by one they take a load each, and from rows
    that lanes do not share, a sector of each lane. Of wider elements a vector has fewer, and rows are read as fast.
    """
    return x.itemsize == PAIRED_BYTES and vec_size > 1 and _whole(x, shape, vec_size, step=2)


def _whole(x: RowStream, shape: Sequence[int], vec_size: int, step: int = 1) -> bool:
    """True if every vector of a stream whose features are ``step`` elements apart begins at a multiple of its size, or
    of 16 bytes.
    """
    if x.step != step or x.misalignment % min(16, vec_size * x.itemsize):
        return False
    return all(n == 1 or s % vec_size == 0 for n, s in zip(shape, x.strides, strict=True))
