"""Launch geometry of row statistics: which threads process which rows. Pure functions of integers.

lanes    neighbouring lanes of a warp share a row
block    a block shares a row, or several blocks do, each of which processes a part of it

Each thread loops over vectors of features. The size of vectors, the threads per row and the chunks follow from dtypes
and sizes alone. Strides and addresses only decide how a vector is read: as a whole, or element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from cupylosses.engines.strides import MAX_RANK, dimension_words, merge, power_of_two
from cupylosses.jit.gpu import WARP

#: Maximum bytes, over all operands, that a thread has in flight if vectors have 16 bytes; narrower vectors are more in
#: number, up to MAX_AHEAD of each operand.
AHEAD_BYTES = 128
MAX_AHEAD = 8
#: Number of 16-byte vectors of each operand that one lane processes in a short row, at most, as long as there are lanes
#: for the others. Besides its features, a row costs a warp some 400 instructions, and a block of four warps 1,900.
FEW_VECTORS = 4
#: Maximum number of four-byte words of a row, over all operands, that one lane keeps in registers: for 16-bit elements,
#: which are converted twice and take a word each; for other elements; and for derivatives along tangents. REGISTER_ROWS
#: is the minimum number of rows of such kernels, because they are compiled for one number of features.
REGISTER_WORDS_NARROW, REGISTER_WORDS, REGISTER_WORDS_ALONG = 24, 32, 48
REGISTER_ROWS = 1 << 15
#: A warp stages the gradients of all its rows and stores them together if at most FEW_LANES lanes share a row and each
#: has at least STORES vectors of each gradient; or, if there is a single one, at least STORES_OF_ONE for each of these
#: lanes. Lanes that store so many vectors themselves write parts of the same sectors again and again.
STORES, STORES_OF_ONE = 5, 15
#: Maximum bytes of a row, as it is kept on chip, that lanes of a warp share: with longer rows, too few warps would fit
#: into shared memory.
WARP_BYTES = 12 << 10
#: Blocks whose lanes share rows: maximum and minimum number of threads, and maximum bytes of the rows of a block.
LANE_THREADS = 256
MIN_LANE_THREADS = 64
LANE_BYTES = 32 << 10
#: Maximum number of 16-byte vectors of each operand in flight per thread if gradients are written: with more, kernels
#: take more registers, and fewer rows run at once.
BATCH = 2
#: Maximum number of elements of a vector in derivatives along tangents, halved for 16-bit elements of more than
#: ALONG_OPERANDS operands. These kernels compute with nested numbers, which take twice the registers. Their blocks
#: therefore have at most SHARING_THREADS threads, and have fewer vectors of long rows in flight.
ALONG_ELEMENTS = 4
ALONG_OPERANDS = 3
#: Maximum and minimum number of threads of a block that shares a row.
MAX_BLOCK_THREADS = 512
MIN_BLOCK_THREADS = 64
#: Rows that do not fit into shared memory, with one block per multiprocessor. Maximum number of vectors of each operand
#: in flight per thread; bytes of all operands in flight if no gradients are written; and maximum shared memory of the
#: block. What is in flight takes L1 cache, which has the rest of that memory.
LONG_AHEAD = 4
LONG_AHEAD_BYTES = 256
LONG_ROOM = 128 << 10
#: Blocks that share a multiprocessor: maximum number of threads of a block, and maximum bytes of its part of a row.
SHARING_THREADS = 256
SHARING_BYTES = 100 << 10
#: Bytes of a row per part, and maximum number of parts: the cluster size that every GPU with clusters supports. Longer
#: rows have larger parts.
PART_BYTES = 64 << 10
MAX_PARTS = 8
#: Rows with more bytes than MAX_PARTS parts of LONG_PART_BYTES do not fit into a cluster. They are cut into more parts,
#: at most MANY_PARTS, of about the size at which two blocks fit on a multiprocessor (SHARING_BYTES).
LONG_PART_BYTES = 200 << 10
MANY_PARTS = 128
#: Layout of kernels in which each part of such a row has a block of its own.
PART = "part"
#: Maximum number of rows that leave multiprocessors idle if each row has one cluster.
FEW_ROWS = 16
#: Parts that are not kept: maximum number of elements of a vector (also for kept parts of more than COPIED_OPERANDS
#: operands), and of all vectors in flight per thread.
PART_ELEMENTS = 4
PART_NUMBERS = 32
#: Maximum number of blocks, in all, that share up to FEW_ROWS rows with more parts than a cluster has blocks; and
#: maximum number of these blocks per multiprocessor.
SPLIT_BLOCKS = 256
SPLIT_RESIDENT = 2
#: Maximum number of elements, over all vectors in flight per thread, for parts that are kept: as many as fit into 80
#: registers.
KEPT_NUMBERS = 24
#: Bytes of shared memory of such a block besides its part.
PART_RESERVED = 4 << 10
#: Bytes above which a row has at least two parts: with more blocks of fewer threads, blocks are less often at the same
#: step.
WHOLE_BYTES = 40 << 10
#: Maximum number of operands whose 16-byte vectors a block copies to shared memory asynchronously: with three operands,
#: a thread is faster if it sums the first vectors while others are in flight. Lanes of a warp copy shorter vectors.
COPIED_OPERANDS = 2
#: Minimum bytes of an element in shared memory: 16-bit elements are kept as words.
KEPT_BYTES = 4
#: Bytes of the elements that are read as whole vectors even if only every second element belongs to the row.
PAIRED_BYTES = 2
#: Maximum shared memory that kernels declare statically: the statistics of each warp, and the result of a row.
DECLARED_BYTES = 14 << 10
#: Minimum bytes of a row that persistent blocks process, each of which prefetches its next row; and the number of
#: threads of such blocks per multiprocessor.
LONG_BYTES = 48 << 10
RESIDENT_THREADS = 768
#: Blocks per multiprocessor in a launch that checks for stale speculative gradients.
CHECKING = 2
#: With fewer than twice this number of chunks (times the blocks of a cluster), a block processes a chunk in one round.
#: With more rows, a chunk takes several rounds, at most MAX_ROUNDS, which keep the number of chunks below that bound;
#: then the number grows again. Doubled if a warp copies rows of three or more operands element by element.
CHUNKS = 8192
MAX_ROUNDS = 64
#: Replaces CHUNKS if at most FEW_LANES lanes share a row: blocks of so few elements would spend most of their time
#: starting and finishing.
SHORT_CHUNKS = 2048
FEW_LANES = 8


@dataclass(frozen=True)
class RowStream:
    """One array as the layout sees it: strides of its rows, stride of its features (``step``), bytes per element, and
    address modulo 16. Labels, masks and results have no features.
    """

    strides: tuple[int, ...]
    step: int = 0
    itemsize: int = 0
    misalignment: int = 0


@dataclass(frozen=True)
class Parts:
    """Geometry of parts of rows that have one block each.

    Attributes:
        threads: Threads of a block.
        ahead: Vectors of each operand in a batch: those that a thread has in flight.
        batches: Batches of each thread; 0 if the rows are too long for parts to be kept.
        batch_bytes: Bytes of shared memory that one batch of all threads takes.
        room: Bytes of shared memory of a multiprocessor.
        whole: True if parts that are kept completely may be copied to shared memory asynchronously.
    """

    threads: int
    ahead: int
    batches: int = 0
    batch_bytes: int = 0
    room: int = 0
    whole: bool = False

    def resident(self, threads: int) -> int:
        """Returns the number of blocks on a multiprocessor whose registers allow ``threads`` threads."""
        if not self.batches:
            return max(1, min(threads // self.threads, SPLIT_RESIDENT))
        return max(1, min(threads // self.threads, self.room // (self.batch_bytes + PART_RESERVED)))

    def kept(self, resident: int) -> int:
        """Returns how many vectors of each operand a thread keeps, starting with its first one, if ``resident`` blocks
        share a multiprocessor.
        """
        return self.ahead * max(
            0, min(self.batches, (self.room // resident - PART_RESERVED) // max(1, self.batch_bytes))
        )

    def held(self, resident: int) -> bool:
        """True if a thread keeps all of its vectors."""
        return 0 < self.batches * self.ahead == self.kept(resident)

    def shared(self, resident: int) -> int:
        """Returns the bytes of shared memory that a block takes for the vectors it keeps."""
        return self.kept(resident) // self.ahead * self.batch_bytes


#: Index of ``features`` and of ``kept`` among the words of ``RowsOfFeatures``.
_FEATURES, _KEPT = 1, 2


@dataclass(frozen=True)
class Layout:
    """Launch geometry of rows.

    Attributes:
        kind: "lanes" or "block"; see the top of this module.
        vec_size: Elements of a vector.
        wide: Mask with a bit for each operand with features, and then for each of their gradients, that is read or
            written as whole vectors.
        held: True if a row stays in shared memory. If it does not, its first vectors may stay there, or each part of
            the row has a block of its own (``apart``).
        width: Threads that share a row.
        threads: Threads of a block.
        rows_per_chunk, chunks: Rows of a chunk, and number of chunks.
        many: True if the rows have several dimensions after merging.
        words: The kernel's ``RowsOfFeatures``.
        shared: Bytes of shared memory of a block for what it keeps of rows.
        resident: Persistent blocks per multiprocessor; 0 if blocks are not persistent, and registers decide.
        ahead, value_ahead: Vectors of each operand in flight per thread; the latter if no gradients are written.
        parts: Parts of a row.
        rounds: Rounds in which a cluster, or a block, processes the parts of a row.
        cluster: Blocks of a cluster that shares a row, or 1.
        copied: True if vectors are copied to shared memory asynchronously, without passing through registers.
        apart: Geometry of parts that have a block each, in rows with more parts than a cluster has blocks; or None.
        split: True if there are so few rows that in all kernels several blocks share each of them.
        paired: Mask with a bit for each operand of which a vector is every second element of two vectors in memory.
        neighbours: For each stream, the number of rows that follow one another in memory.
        in_registers: Features of short rows, each of which stays in the registers of one lane; 0 for other rows.
        staging: Bytes of shared memory in which a block can stage one gradient of its rows; 0 if it cannot.
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
    staging: int = 0

    def stages(self, written: int) -> bool:
        """Returns True if each warp stages this number of gradients of its rows, and stores them together."""
        if not (written and self.staging):
            return False
        stores = self.words[_FEATURES] // self.vec_size / self.width
        if written == 1:
            return stores >= STORES_OF_ONE * self.width
        return stores >= STORES and self.width <= FEW_LANES

    def rows_at_once(self, stream: int) -> int:
        """Returns the number of neighbouring rows of which the lanes of a warp read an element at the same time."""
        return min(WARP // self.width, self.neighbours[stream]) if self.kind == "lanes" else 1

    def parts_meet(self, processors: int, threads: int) -> bool:
        """True if blocks that have one part of a row each may wait for each other. Blocks that keep their parts may if
        one and a half times as many blocks run at once as a row has parts. Others may only if the rows are ``split``
        and the blocks of all rows run at once. ``threads`` is the number of threads that a multiprocessor runs.
        """
        assert self.apart is not None
        resident = self.apart.resident(threads)
        if not self.apart.kept(resident):
            return self.split and processors * resident >= self.chunks * self.parts
        return 2 * processors * resident >= 3 * self.parts

    def words_of_parts(self, resident: int) -> list[int]:
        """Returns ``words`` for kernels of parts with ``resident`` blocks per multiprocessor."""
        assert self.apart is not None
        return [*self.words[:_KEPT], self.apart.kept(resident), *self.words[_KEPT + 1 :]]

    def part_memory(self, rows: int, statistics: int) -> int:
        """Returns the number of doubles of memory that such blocks share: a record per part, and ``PartsInMemory``."""
        parts = rows * self.parts
        return parts * (1 + part_numbers(statistics)) + (parts + rows + 1) // 2

    def blocks(self, processors: int) -> int:
        """Returns the maximum number of blocks of a launch: one block or cluster per chunk, because the registers of a
        formula decide how many run at once; for persistent blocks, as many as fit. Clusters are not limited here: they
        may leave multiprocessors idle, and only the hardware knows how many fit.
        """
        chunks = min(self.chunks, processors * self.resident) if self.resident else self.chunks
        return max(1, chunks) * self.cluster

    def blocks_of_check(self, processors: int) -> int:
        """Returns the number of blocks of a launch that checks for stale speculative gradients."""
        return max(1, min(self.chunks, processors * CHECKING // self.cluster)) * self.cluster

    @property
    def records(self) -> int:
        """Number of recorded ``grad_output`` values: one per chunk and per warp that evaluates rows. If a block shares
        rows, only its first warp evaluates them.
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
    """Returns the layout of rows of a given shape.

    ``streams`` are all arrays in the order of the kernel. ``vectors`` are the ``read`` arrays with features that are
    read, followed by their gradients, with None for gradients that are not written. ``along`` is True for a derivative
    along tangents. ``room`` is the shared memory that a block may allocate. ``clusters`` is True if the chip has
    clusters of blocks; they change no bit of the results.
    """
    rows = prod(shape)
    sizes_of_elements = [x.itemsize for x in vectors[:read] if x]
    largest = max(sizes_of_elements)
    widest = 16 // largest
    # 16-bit elements are kept as 32-bit words.
    in_memory, row = features * read * largest, features * read * max(KEPT_BYTES, largest)
    # If few rows are too long to be kept, all blocks share them.
    most_bytes = row if rows <= FEW_ROWS else in_memory
    split = rows <= FEW_ROWS and most_bytes > MANY_PARTS * SHARING_BYTES
    many_parts = row > MAX_PARTS * LONG_PART_BYTES and most_bytes <= MANY_PARTS * SHARING_BYTES
    if split or (many_parts and read > COPIED_OPERANDS):
        widest = min(widest, PART_ELEMENTS)
    if along and widest > ALONG_ELEMENTS:
        widest = ALONG_ELEMENTS if read <= ALONG_OPERANDS else ALONG_ELEMENTS // 2
    # Vectors must divide the features; otherwise those of some rows would start at unaligned addresses. Shorter vectors
    # are coalesced as well, if a thread has more of them in flight.
    vec_size = gcd(widest, features)
    narrower = widest // vec_size
    value_ahead = _ahead(AHEAD_BYTES, read, narrower)
    count = features // vec_size
    width = power_of_two(max(1, -(-count // (FEW_VECTORS * narrower))))
    ahead = min(value_ahead, BATCH * narrower)
    parts = cluster = part_rounds = 1
    if row <= WARP_BYTES:
        kind, threads, width = "lanes", LANE_THREADS, min(width, WARP)
        # In a short row, a lane may have fewer vectors than it could have in flight.
        value_ahead = min(value_ahead, power_of_two(max(1, -(-count // width))))
        ahead = min(value_ahead, BATCH * narrower * max(1, KEPT_BYTES * widest // 16))
        while threads > MIN_LANE_THREADS and row * (threads // width) > LANE_BYTES:
            threads //= 2
    else:
        # The parts and their threads must not depend on the chip, because the order of additions follows from them.
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
        part_rounds = team * parts // width
    at_once, most = threads * cluster // width, SHORT_CHUNKS if width <= FEW_LANES else CHUNKS
    if kind == "lanes" and vec_size == 1 and width == WARP and largest >= KEPT_BYTES and read > COPIED_OPERANDS:
        most *= 2
    rounds = max(1, min(rows * cluster // (at_once * most), MAX_ROUNDS))
    wide = sum([1 << i for i, x in enumerate(vectors) if x is None or _whole(x, shape, vec_size)])
    paired = sum([1 << i for i, x in enumerate(vectors[:read]) if x and _is_paired(x, shape, vec_size)])
    sizes, strides = merge(shape, [x.strides for x in streams])
    many = len(sizes) > 1
    neighbours = tuple([sizes[0] if x[0] == 1 else 1 for x in strides])
    # Shared memory has space for whole batches of each thread.
    each = threads * (row // count)
    shared = -(-count // (width * part_rounds * ahead)) * ahead * part_rounds * each
    held, kept = shared <= room, 0
    all_read = (1 << read) - 1
    whole_elements = wide & all_read == all_read and min(sizes_of_elements) >= KEPT_BYTES
    copied = whole_elements and held
    copied = copied and (kind == "lanes" if narrower > 1 else kind == "block" and read <= COPIED_OPERANDS)
    apart = None
    if parts > MAX_PARTS and rounds == 1:
        part_threads = min(max(width * part_rounds // parts, MIN_BLOCK_THREADS), MAX_BLOCK_THREADS)
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
        kept = min(room, LONG_ROOM) // (ahead * each) * ahead if part_rounds == 1 else 0
        shared = kept * each
    most_words = REGISTER_WORDS if largest >= KEPT_BYTES else REGISTER_WORDS_NARROW
    short = row <= KEPT_BYTES * (REGISTER_WORDS_ALONG if along else most_words) and rows >= REGISTER_ROWS
    in_registers = features if short and kind == "lanes" and width == 1 else 0
    if in_registers:
        copied, shared = False, 0
    sinks = [x for x in vectors[read:] if x]
    # Rows are an odd number of vectors apart.
    staging = threads // width * (count | 1) * vec_size * largest if kind == "lanes" else 0
    in_order = len(sizes) == 1 and (held or in_registers > 0)
    in_order = in_order and all(
        _whole(x, shape, vec_size) and strides[[*streams].index(x)] == (features,) for x in sinks
    )
    if not in_order or vec_size * largest >= 16 or shared + staging * len(sinks) > room:
        staging = 0
    words = [rows, features, kept, *(x.step for x in streams)]
    words += dimension_words(sizes, strides, MAX_RANK if many else 1)
    resident = 0
    if kind == "block" and cluster == 1 and row >= LONG_BYTES:
        resident = RESIDENT_THREADS // threads
        resident = max(1, min(resident, room // (shared + DECLARED_BYTES)) if held else resident)
    return Layout(
        kind, vec_size, wide, held, width, threads, rounds * at_once, -(-rows // (rounds * at_once)), many, words,
        shared, resident, ahead, value_ahead, parts, part_rounds, cluster, copied, apart,
        parts > MAX_PARTS and rows <= FEW_ROWS, paired, neighbours, in_registers, staging,
    )  # fmt: skip


def part_numbers(statistics: int) -> int:
    """Returns the maximum number of doubles that the statistics of a part take."""
    return 2 * statistics


def _ahead(size: int, read: int, narrower: int) -> int:
    """Returns how many vectors of each of ``read`` operands a thread has in flight: those that have ``size`` bytes in
    all, rounded down to a power of two. If vectors are ``narrower`` by a factor, there are as many times more of them.
    """
    return min(power_of_two(max(1, size // (16 * read)) + 1) // 2 * narrower, MAX_AHEAD)


def _is_paired(x: RowStream, shape: Sequence[int], vec_size: int) -> bool:
    """True if the features are 16-bit elements with a stride of 2 that can be read as whole vectors. Read one by one,
    each would take a load, and, in rows that lanes do not share, each lane a sector of its own. Wider elements gain
    nothing: a vector has fewer of them.
    """
    return x.itemsize == PAIRED_BYTES and vec_size > 1 and _whole(x, shape, vec_size, step=2)


def _whole(x: RowStream, shape: Sequence[int], vec_size: int, step: int = 1) -> bool:
    """True if the features of a stream are ``step`` elements apart, and every vector begins at a multiple of its size,
    or of 16 bytes.
    """
    if x.step != step or x.misalignment % min(16, vec_size * x.itemsize):
        return False
    return all(n == 1 or s % vec_size == 0 for n, s in zip(shape, x.strides, strict=True))
