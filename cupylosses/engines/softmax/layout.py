"""Launch geometry of the softmax engine: which threads take which rows. Pure functions of integers.

subwarp                    neighbouring lanes of a warp share a row; the row stays in shared memory
block                      a block, or a cluster of blocks, takes a row; the row stays in shared memory
two_pass                   the same for rows too long for shared memory: they are read twice
thread_per_row             a thread takes a row (or neighbouring rows) of strided or few classes; in shared memory
thread_per_row_packed      a thread takes a row of few contiguous classes; its warp moves all its rows together
interleaved_rows           the same of many rows that no vector divides: the rows of a thread are a warp apart, or are
                           pairs in 16 bits
packed_rows                the same of many rows: they go to registers, and the number of classes is a constant. Logits
                           may have small gaps between rows, and between classes
columns                    many rows of few strided classes: a lane takes neighbouring rows, to registers; of more,
                           with a target for each, the warps of a block share 32 rows in shared memory
column_tiles               many rows of more strided classes: the warps of a block, or of a cluster, share neighbouring
                           rows, which stay in shared memory
column_slices              rows of so many strided classes, or few such rows: blocks share neighbouring rows by their
                           classes, and read them twice
thread_per_row_two_pass    a thread takes a row and reads it again from memory: second derivatives
staged_thread_per_row      the same of few strided classes: in shared memory, with their tangents
staged_packed_rows         the same of many rows of few contiguous classes, which a warp moves together
register_rows              second derivatives of rows that lanes of a warp have in registers; against dense targets,
                           those by the logits alone, where a lane also takes a row of few classes that lie apart, and
                           the warps of a block share 32 neighbouring rows of more
label_only                 only the label's class is read: log-probabilities
label_only_tiles           the same where gradients have no gaps: warps write tiles of them, whatever the rows
label_only_few             the same of few rows: a single warp adds up their losses
label_only_sparse          the same of large gradients, which are zeros before: a lane takes some rows, and writes the
                           gradients of their labels
label_only_rows            the same of short rows: a lane takes some of them, and its warp writes their gradients
label_only_columns         the same of classes that lie apart: a lane takes neighbouring rows, and several warps take
                           slices of long rows

Rows of strided classes are read in place only where that is fast. `copied` has the rule; all others are first copied
with their classes contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from cupylosses.engines.strides import MAX_RANK, dense_strides, dimension_words, merge, power_of_two
from cupylosses.jit.gpu import DECLARED_BYTES, SECTOR_BYTES, SHARED_BYTES, WARP, Chip

#: Vectors of a row that a thread takes, as long as there are threads to take the others: of rows in a warp, and longer
#: ones. What a row costs besides its logits is paid by each warp.
WARP_VECTORS = 8
VECTORS = 8
#: The former of many rows that would need more than a warp: of whole vectors or shifted ones, and of others with single
#: elements at their ends.
WARP_VECTORS_WHOLE = 16
WARP_VECTORS_EDGES = 12
#: Vectors of a row that a lane takes, at least, and lanes below which it takes fewer than WARP_VECTORS: those of few
#: rows would leave most of a GPU idle.
LEAST_VECTORS = 2
FEW_LANES = 1 << 15
#: Classes of rows that a thread takes each, though they are neighbours: more threads would have too little to do.
FEW_CLASSES = 32
#: Classes of a row that a thread takes where there are up to so many rows: these are too few to hide a longer loop over
#: classes, which lanes share.
LANE_CLASSES = 4
LANE_ROWS = 4096
#: Such classes of fewer than MANY_ROWS rows with a target for each class, and where there are few elements.
DENSE_ALONE, DENSE_ALONE_FEW = 24, 4
DENSE_FEW_ELEMENTS = 1 << 16
#: Neighbouring rows that a thread takes together, where classes lie apart, at most, and threads of a block, at least.
ROWS_PER_THREAD = 4
THREAD_PER_ROW_THREADS_MIN = 64
#: Bytes of a vector from which on lanes share rows with small gaps, and rows with a target per class are not shifted.
SHIFTED_BYTES = 8
#: Distance in elements of neighbouring rows that a warp reads as columns, at most: of each line it uses half at least.
NEAR = 2
#: Distance in elements of neighbouring rows that a lane takes to registers as columns, at most; and elements of both
#: operands from which on others of more classes than a lane takes so are copied, though these are near.
NEAR_COLUMNS = 4
SPREAD_ELEMENTS = 1 << 21
#: Bytes of a row of log-probabilities below which a lane takes a row, and bytes of the rows that it takes, as far as
#: these are not one.
LABEL_ONLY_ROW_BYTES = 256
LABEL_ONLY_LANE_BYTES = 192
#: Rows that a lane takes together of these, at most, and threads that a multiprocessor has registers for.
LABEL_ONLY_ROWS = 2
LABEL_ONLY_RESIDENT = 1024
#: Warps that columns of log-probabilities are spread over, at least, as long as each takes so many classes.
LABEL_ONLY_WARPS = 1 << 11
LABEL_ONLY_SLICE = 32
#: Tiles of gradients by the bytes of a row, up to which a lane stores so many vectors of a tile; and threads that a
#: multiprocessor runs at once.
LABEL_ONLY_TILES = ((2048, 16), (1 << 63, 64))
LABEL_ONLY_TILE_RESIDENT = 512
#: Vectors of a tile that a lane stores, at least, and tiles below which it stores fewer: a warp per multiprocessor
#: would write long after the others have ended.
LABEL_ONLY_LEAST_VECTORS = 4
LABEL_ONLY_MANY_TILES = 1 << 10
#: Bytes of gradients that are cleared before their labels are written, at least; the same where classes lie apart and
#: neighbouring rows in no vectors, or in parts of sectors; and bytes of the classes of a row in either case, as each
#: label takes a sector of its own.
SPARSE_BYTES = 1 << 27
SPARSE_APART_BYTES = 1 << 24
SPARSE_ROW_BYTES = 1 << 10
SPARSE_APART_ROW_BYTES = 1 << 8
#: Rows whose losses a single warp adds up, at most.
LABEL_ONLY_FEW = 2 * WARP
#: Partial sums of longer rows, at most: a warp that writes tile after tile for one of them is slower by up to a half.
LABEL_ONLY_CHUNKS = 1 << 16
#: Vectors that a thread reads together, of a row that does not stay on chip.
TWO_PASS_VECTORS = 4
#: Vectors of logits, and as many of targets, that a thread takes where each class has a target: what a row costs each
#: thread besides is as much as ten classes. And vectors of such a row, at least, if there are single elements at its
#: ends.
DENSE_VECTORS = 8
DENSE_EDGES = 32
TWO_PASS_DENSE_VECTORS = 2
#: Blocks of a cluster, at most, as many as every GPU that has clusters can run at once.
MAX_CLUSTER = 8
#: Blocks of a cluster of which some more run at once, and how many clusters do, with one, two or three blocks on each
#: of the 132 multiprocessors of an H200, as its driver says.
ODD_CLUSTER = 7
CLUSTERS_AT_ONCE = {7: (16, 32, 47), 8: (15, 30, 45)}
#: Blocks that rows are spread over where they are few.
MANY_BLOCKS = 128
#: Threads of long rows that a multiprocessor can run at once, as far as registers go.
RESIDENT_THREADS = 1024
#: Such threads where each takes neighbouring rows, those that are crowded, and threads of a block, at most: more would
#: spill registers.
THREAD_PER_ROW_RESIDENT = 640
CROWDED_RESIDENT = 512
THREAD_PER_ROW_THREADS = 128
#: Rows of which every warp counts the labels itself, at most, instead of a launch before; and rows of which it adds the
#: weights of the labels, whose sum has the bits of that launch as long as one of its warps takes all of them.
SELF_COUNTING_ROWS = 1024
COUNTED_AT_ONCE = 8 * WARP
#: Bytes of a row that a block takes, where a cluster can take the others. Rows with targets per class take the first
#: number if two blocks are enough then, because blocks of a multiprocessor hide each other's barriers; otherwise the
#: second, because larger clusters leave multiprocessors idle.
PART_BYTES = 65 << 10
DENSE_PART_BYTES = 130 << 10
#: Threads of a block that takes a row of logits, at most, and how many such blocks a multiprocessor has registers for:
#: of those that wait for others of a cluster, or have more to compute, and of others.
BLOCK_THREADS = 512
BLOCK_BLOCKS = 3
PLAIN_BLOCKS = 2
#: Bytes of a row, up to which the next one is brought to the cache prefetch of its turn, and half as many blocks run.
PREFETCH_BYTES = 16 << 10
#: Threads of rows without gradients that a multiprocessor can run at once, where they do not stay on chip: rows that so
#: many threads would share, at least, and so many rows that they fill a GPU without being shared by several blocks.
STREAMED_THREADS = 640
STREAMED_WIDTH = 512
STREAMED_ROWS = 256
#: Threads of short rows of 32 bits without gradients that a multiprocessor runs at once, which are in registers, where
#: a warp takes a row, and where several share it; such rows, at least; lanes that share one, at least and at most. In
#: 16 bits shared memory is faster.
PIPELINED_THREADS = 384
PIPELINED_SHARED_THREADS = 512
PIPELINED_ROWS = 1 << 14
PIPELINED_LANES = 4
PIPELINED_LANES_MOST = 128
#: Threads of a block whose lanes share rows, and how many of these blocks a multiprocessor has registers for: in fewer
#: registers they spill, and each number that is read back waits for the memory.
SUBWARP_BLOCK_THREADS = 128
SUBWARP_BLOCKS = 8
#: The latter where a lane takes more than two elements at the ends of a row.
MANY_EDGES_BLOCKS = 7
#: Blocks of THREADS threads that a multiprocessor has registers for, of gradients in 16 bits whose lanes share rows
#: with a target per class. A compiler that is free to choose may take a few registers more, which leave room for two.
DENSE_SUBWARP_BLOCKS = 3
#: Such blocks of two softmaxes in 16 bits whose rows a thread has alone, if the term's derivative is the gradient.
DENSE_ALONE_BLOCKS = 4
#: Elements at the ends of a row that a lane takes, at most, where there are more lanes than a GPU runs at once: as few
#: lanes as that allows share a short row, so that a warp has many rows on their way.
LANE_EDGES = 4
MANY_LANES = 1 << 17
#: Rows from which on they are many: kernels of their own for a number of classes are worth their compilation.
MANY_ROWS = 1 << 14
#: Classes that lie apart, up to which a thread of few takes a row alone, by bytes of a logit: it goes through them one
#: by one, and loads those of 16 bits a few at a time.
APART_CLASSES = {2: 48, 4: 80, 8: 80}
#: Rows with a target per class below which lanes share those whose terms take many instructions, by bytes of the widest
#: operand, copied if their classes lie apart: a thread alone evaluates one class after another. And classes of 32 bits,
#: apart in both operands, up to which a thread takes no longer than copies and lanes; and rows of 64 bits from which on
#: copies for a value alone take longer.
HEAVY_TERM_ROWS, HEAVY_TERM_CLASSES, HEAVY_VALUE_ROWS = {2: 0, 4: MANY_ROWS, 8: 1 << 62}, 8, 1 << 15
#: Classes that lie apart of rows with gaps, with a target for each, that are copied for wider words, at least.
WORD_CLASSES = 16
#: Rows of few classes that are copied if there are gaps between them, at least. Classes of two operands that are
#: copied for that reason, at most, by the bytes of an element and by whether threads exchange more than once.
PADDED_ROWS = 1 << 13
PADDED_CLASSES = {(2, False): 112, (2, True): 112, (4, True): 88}
#: Classes of a row in the registers of one lane, at most: contiguous ones, those of 16 bits; and registers of columns
#: that lie there.
PACKED_CLASSES = 112
PACKED_CLASSES_NARROW = 160
#: Fewer classes of rows that consist of whole vectors, which few lanes of a warp share well.
PACKED_CLASSES_WHOLE = 72
#: Classes of rows that a lane keeps in registers if more is computed than a loss, at most, as ``kMaxKept`` of
#: ``kernels/softmax/register_rows.cuh``; and threads that a multiprocessor runs of longer rows, which stay in shared
#: memory.
PACKED_CLASSES_HEAVY = 32
#: Blocks of a multiprocessor that take rows of which a lane has several, as many as their chunks suffice for: a
#: compiler that is free to choose would rather spill registers than leave no room for more.
PACKED_BLOCKS = 4
#: Rows with gaps that a warp copies as one stretch, gaps included: the most elements from class to class; the largest
#: ratio of a pitch to the elements of its row, because gaps are read for nothing; and the most bytes of shared memory
#: that a warp takes, because a multiprocessor runs fewer warps of more.
GAP_STEP = 4
GAP_RATIO = 2
GAP_BYTES = 24 << 10
ROLLED_RESIDENT = 640
COLUMN_REGISTERS = 64
#: Classes of columns that a lane takes alone, at most: with more, shared memory serves them better; and classes of 16
#: bits where no vector divides the rows.
COLUMN_CLASSES = 8
ODD_COLUMN_CLASSES = 15
#: Neighbouring rows that warps take in tiles though they lie in no vectors, at least: their last tile is not full.
#: Partial sums of these tiles at most: an H100 has as many warps, which take the same number of tiles. Rows from which
#: on a thread takes four in 16 bits, not two: there are tiles for all of these warps.
INTERLEAVED_ROWS = 512
INTERLEAVED_CHUNKS = 2640
MANY_INTERLEAVED = 1 << 17
#: Classes of rows whose operands both lie in the registers of a lane, at most: contiguous ones and columns; and
#: threads that a multiprocessor has registers for.
DENSE_PACKED_CLASSES = 16
DENSE_COLUMN_CLASSES = 32
DENSE_REGISTER_RESIDENT = 512
COLUMN_THREADS = 256
COLUMN_RESIDENT = 512
#: Classes of columns up to which a lane that takes one row at once leaves registers for half as many more threads, by
#: bytes of a logit; the partial sums of these, as many as an H100 has warps, and the rows from which on there are so
#: many.
LIGHT_COLUMN_CLASSES = {2: 15, 4: 5, 8: 0}
LIGHT_COLUMN_CHUNKS = 3168
MANY_COLUMNS = 1 << 20
#: Values of contiguous classes that a lane takes at once, of several rows if classes are fewer.
PACKED_VALUES = 8
PACKED_ROWS = 4
PACKED_THREADS = 128
#: Warps of a block that share a tile of columns; bytes of a block of which a multiprocessor runs three, or two; and
#: bytes of a row, from which on a block of one thread per row has few threads.
TILE_WARPS = 8
TILE_BYTES = (73 << 10, 111 << 10)
TILE_ROW_BYTES = 192
#: Rows from which on such a row may have twice as many bytes: threads alone keep a GPU busy.
TILE_MANY_ROWS = 1 << 16
#: Threads of tiles that a multiprocessor has registers for.
TILE_RESIDENT = 1024
#: Rows of tiles that keep them in shared memory, at least.
TILE_ROWS = 1 << 10
#: Slices of columns, which blocks share rows by: their number, as many blocks as 132 multiprocessors run at once, on
#: every GPU, because slices decide the order of additions; warps of a block, and threads of a multiprocessor, which are
#: few, so that each has many vectors on its way; bytes of a vector at most, by those of a logit; and classes of few
#: rows, at least.
SLICES = 2 * 132
SLICE_WARPS = 8
SLICE_RESIDENT = 512
SLICE_BYTES = {2: 4, 4: 8, 8: 8}
SLICE_CLASSES = 1 << 10
#: Elements of rows that slices read where they lie, at least, unless these are read again: of fewer a copy takes less
#: time.
SLICE_ELEMENTS = 1 << 20
#: Tiles of so many elements, at least, as long as each reads whole sectors of a class: one block combines the parts of
#: a tile. Not of more bytes than a cache holds, which would fetch the sectors between again.
SLICE_TILES = 4
SLICE_CACHED_BYTES = 1 << 25
#: Rows of a tile, at most, where classes begin within sectors: of larger ones there are too few.
SLICE_ROWS = 128
#: Vectors that a thread has on its way (``kAhead``), by the slices that there are then, at least; and doubles, of which
#: more would be too many instructions.
SLICE_AHEAD = ((16, SLICES), (8, 32), (2, 1))
SLICE_DOUBLES_AHEAD = 2
#: Vectors of a row that a thread takes for second derivatives, at least, and threads that keep a GPU busy then.
SECOND_VECTORS = 2
SECOND_THREADS = 1 << 16
#: Classes that a thread reads together then, as far as vectors are narrower.
SECOND_CLASSES = 8
#: Classes of rows that a thread takes alone though these are few: of each class it waits for memory.
SECOND_FEW_CLASSES = 16
#: Classes with a target each of many rows that a thread takes alone, at most, since it stages none of them in shared
#: memory; and vectors of a row with single elements at its ends, at least.
SECOND_DENSE_CLASSES = 4
SECOND_EDGES = 16
#: Blocks of warps that share no row, at least: of fewer large ones some multiprocessors have twice as many as others.
SECOND_BLOCKS = 4 * MANY_BLOCKS
#: Classes of a lane for second derivatives in registers, as long as there are lanes to take the others: with a target
#: each, or with a label of the row, whose loss each lane evaluates; bytes of their logits then; and classes of a lane
#: at most, by the bytes of a logit.
SECOND_LANE_CLASSES = 16
SECOND_LABEL_CLASSES = 32
SECOND_LANE_BYTES = 64
SECOND_LANE_MOST = {2: 32, 4: 32, 8: 8}
#: Classes with a target each of rows that warps stage instead, at most; of rows in registers though their classes lie
#: apart, numbers of 4 bytes; and of such rows that are read in any order.
SECOND_STAGED_CLASSES = 16
SECOND_APART_CLASSES = 24
SECOND_ORDER_CLASSES = 8
#: The warps of a block share rows of more classes that lie apart for second derivatives: the most warps and the most
#: classes of a warp, by the bytes of a number, and the fewest rows.
SECOND_COLUMN_WARPS = {2: 16, 4: 16, 8: 12}
SECOND_COLUMN_CLASSES = {2: 19, 4: 19, 8: 8}
SECOND_COLUMN_ROWS = 1 << 10
#: The fewest classes of such rows with a label each, by the bytes of a number; a thread alone keeps rows of fewer
#: classes in shared memory, where those of 16 bits are copied one by one.
SECOND_LABEL_COLUMNS = {2: 10, 4: 17, 8: 25}
#: Registers that a thread of such a kernel takes, and that each of its classes takes, by whether labels are smoothed or
#: classes have targets of their own; and all registers of a thread that computes in float64.
SECOND_COLUMN_REGISTERS = {False: 30, True: 36}
SECOND_CLASS_REGISTERS = {False: 3, True: 4}
SECOND_DOUBLE_REGISTERS = 168
#: Threads of a block of them.
SECOND_REGISTER_THREADS = 128
#: The warps of a block share a tile of 32 rows with a target per class that lie apart, if a multiprocessor has shared
#: memory for fewer than DENSE_COLUMN_TILES of them. The number of warps that take all tiles of a multiprocessor, and
#: that of affine terms in float64; the most warps of a block; and the threads of a multiprocessor that registers last
#: for.
DENSE_COLUMN_TILES = 16
DENSE_COLUMN_WARPS = 24
DENSE_COLUMN_DOUBLE_WARPS = 16
DENSE_COLUMN_MOST = 10
DENSE_COLUMN_RESIDENT = 1024
#: Elements whose classes may lie apart though warps share rows, at most: copies of so few take longer.
SECOND_APART = 1 << 16
#: Threads of a block that are no unit of their own.
THREADS = 256
#: Layouts whose gradients are computed again from the logits, because that reads no more than a residual would; and all
#: in which a thread writes gradients of whole rows from a residual.
RECOMPUTED = ("thread_per_row", "interleaved_rows", "packed_rows", "columns", "column_tiles")
IN_THREADS = ("thread_per_row_packed", *RECOMPUTED)
#: Layouts of log-probabilities of which gradients are found from these again, because a residual of each row would be
#: as large as its gradient, or would be read as often.
RECOMPUTED_LABELS = ("label_only", "label_only_few", "label_only_rows", "label_only_columns")
#: Those in which a thread keeps strided rows in shared memory.
STRIDED = ("thread_per_row", "interleaved_rows")
#: Layouts of log-probabilities whose gradients warps write in tiles.
IN_TILES = ("label_only_tiles", "label_only_few", "label_only_sparse", "label_only_rows", "label_only_columns")
#: Partial sums, and notes of teams, at most; and partial sums of a divisor.
MAX_CHUNKS = 1 << 14
COUNT_CHUNKS = 1 << 12
#: The former where few warps are resident, each of which then takes one chunk, from tile to tile through all of memory;
#: and the threads of a multiprocessor up to which these are few.
WARP_CHUNKS = 1 << 11
WARP_CHUNKS_RESIDENT = 704
#: Blocks of a multiprocessor that compute the divisor of a mean: with more, a lane has no registers for all the labels
#: that it reads together.
COUNT_BLOCKS = 4
#: Tiles of few contiguous classes, of at most 32 bits, up to which partial sums are as few: adding more would take
#: longer than what idle warps lose.
FEW_TILES = 1 << 15


@dataclass(frozen=True)
class RowStrides:
    """A tensor of rows: strides of the dimensions of the rows, and of the classes, in elements."""

    strides: tuple[int, ...]
    class_stride: int
    itemsize: int
    misalignment: int


@dataclass(frozen=True)
class RowLayout:
    """Geometry of a launch. ``words`` is the kernel's ``RowSpace``; ``chunks`` are partial sums, which teams of threads
    take, ``per_block`` of them in a block, or one in ``cluster`` blocks. ``shared`` are bytes, ``resident`` the threads
    that a multiprocessor runs at once, half of them with gradients if rows are brought to the cache ``prefetch``.
    ``streamed`` are the threads of a block that take a row whose gradients are not asked for, 0 where they take it in
    the same way. Of rows in registers ``warps`` share a row, and a thread takes ``per_thread`` classes; of tiles of
    gradients a lane stores ``per_thread`` vectors. ``shifted`` rows lie otherwise than their gradients: vectors of
    gradients are cut out of those of logits in shared memory, and operands with a target per class are shifted on their
    way there. Logits are ``gathered`` there if classes lie apart, or copied there together with their gaps if these are
    small, with classes ``step`` elements apart, 0 of other layouts, and ``padded`` by 16 bytes a row. Of interleaved
    rows of 16 bits classes that are ``step`` apart begin in the same half of a word, ``shifted`` ones in the other half
    than their gradients, and ``gathered`` ones some so and some so. Rows may have single elements at their ends, of
    which a thread takes up to ``edges``. Of second derivatives in registers a lane takes ``per_thread`` vectors, some
    lanes fewer if rows are ``partial``. Of rows that blocks share by their classes so many ``lanes`` read a class, and
    a thread has ``per_thread`` vectors on their way.
    """

    kind: str
    vec_size: int
    width: int
    threads: int
    chunks: int
    per_block: int
    shared: int
    rank: int
    words: list[int]
    cluster: int = 1
    resident: int = 2048
    streamed: int = 0
    prefetch: bool = False
    per_thread: int = 0
    warps: int = 1
    shifted: bool = False
    gathered: bool = False
    turns: int = 0
    edges: int = 0
    partial: bool = False
    lanes: int = 0
    step: int = 0
    padded: bool = False

    @property
    def slices(self) -> int:
        """The slices of the classes of all tiles that blocks share; 0 of other layouts."""
        return self.width if self.kind == "column_slices" else 0


def row_layout(
    shape: Sequence[int],
    classes: int,
    logits: RowStrides,
    gradients: RowStrides,
    others: Sequence[Sequence[int]],
    chip: Chip,
    kept: int = 0,
    heavy: bool = False,
    shifts: bool = True,
    capped: bool = False,
) -> RowLayout:
    """The layout of rows of a given shape. ``others`` are the strides of labels, mask and results; ``kept`` the bytes
    that stay on chip of each class of a warp's row, if those are more than its logit's; ``heavy`` whether more is
    computed than a loss; ``shifts`` whether logits may lie otherwise than their gradients, if that takes wider vectors;
    ``capped`` whether logits have a cap.
    """
    sizes, strides = merge(shape, [logits.strides, gradients.strides, *others, (0,) * len(shape)])
    rows = prod(shape)
    together = classes == 1 or (logits.class_stride == 1 and gradients.class_stride == 1)
    gathers = not together and shifts and gathered(classes, sizes, (strides[0], strides[1]), (logits, gradients), chip)
    vec_size = vector_size(sizes, strides, logits, gradients, together)
    cluster, shifted, per_thread, each_edges = 1, False, 0, 0
    # Lanes that share a row of more classes do it well in vectors that need no shift.
    shared_well = together and classes > FEW_CLASSES and vec_size * logits.itemsize >= SHIFTED_BYTES
    if shifts and not shared_well and has_small_gaps(rows, classes, (logits, gradients), sizes, strides, heavy):
        return _packed_layout(rows, classes, logits, gradients, sizes, strides, heavy, logits.class_stride)
    given = rows, classes, logits, gradients, together, sizes, strides, vec_size, chip, heavy
    found = None if gathers else _in_registers(*given)
    if found is not None:
        return found
    few = LANE_CLASSES if rows <= LANE_ROWS else FEW_CLASSES
    if gathers or (together and classes > few):
        # In long rows elements of 8 bytes are faster one by one.
        shifted = gathers or (shifts and logits.itemsize < 8 and vec_size * logits.itemsize < 16)
        of_block, size = (SUBWARP_BLOCK_THREADS, BLOCK_THREADS), logits.itemsize
        vec_sizes = (16 // logits.itemsize, *(() if gathers else (vec_size,))) if shifted else (vec_size,)
        for vec_size in vec_sizes:
            # Vectors of gradients are cut out of staged logits, or of numbers of as many bytes in their place.
            cuts = shifted and not gathers
            stays = 0 if cuts and size < kept else kept
            alike = ((gradients,), strides[1:2]) if gathers else ((logits, gradients), strides[:2])
            edges = not _whole(classes, vec_size, alike[0], sizes, alike[1])
            kind, width, threads, cluster = _on_chip(
                classes, vec_size, vec_size * size, rows, chip, of_block, VECTORS, PART_BYTES,
                edges * (1 if gathers and size > 2 else LANE_EDGES), stays * vec_size,
                WARP_VECTORS_WHOLE if cuts else 0,
            )  # fmt: skip
            if kind != "two_pass":
                of_thread = _stage(classes // vec_size, width * cluster) * vec_size
                of_thread *= max(size, stays) if kind == "subwarp" else size
                # Each of the warps that share a row has room for one vector more.
                beside = threads // WARP if kind == "block" and cuts else 0
                shared = (threads + beside) * of_thread
                if shared <= chip.shared - DECLARED_BYTES:
                    break
            # Rows that are read twice go through no shared memory.
            shifted, shared = False, 0
        each_edges = -(-2 * (vec_size - 1) * edges // width) if kind != "two_pass" else 0
        per_block, units = 1, -(-rows // (threads // width))
    else:
        vec_size, threads, shared = _thread_per_row(classes, 1 if together else vec_size, logits.itemsize)
        kind, per_thread = "thread_per_row", classes if rows >= MANY_ROWS and not together else 0
        if together and classes > 1 and without_gaps(classes, sizes, strides[0]) and strides[1] == strides[0]:
            kind, threads = "thread_per_row_packed", THREADS
            shared = (classes | 1) * logits.itemsize * threads
            while shared > SHARED_BYTES:
                threads, shared = threads // 2, shared // 2
        width, per_block = 1, threads // WARP
        units = -(-rows // (vec_size * WARP))
    words = space_words(rows, classes, (logits.class_stride, gradients.class_stride, 0, 0, 0, 0), sizes, strides)
    crowded = capped or (gathers and logits.itemsize < 4)
    resident = _resident(kind, vec_size, block_blocks(cluster, heavy, crowded), each_edges)
    prefetch = kind == "block" and cluster == 1 and not (heavy or shifted)
    prefetch = prefetch and classes * logits.itemsize <= PREFETCH_BYTES
    streamed = 0
    if kind == "block" and rows >= STREAMED_ROWS and width * cluster >= STREAMED_WIDTH and not gathers:
        fits = _stage(classes // vec_size, width * cluster) <= VECTORS
        streamed = fits * min(SUBWARP_BLOCK_THREADS, threads * cluster)
    chunks, rank = _chunks(units, _most_chunks(resident)), space_rank(rows, sizes)
    turns = 0
    plain = kind in ("subwarp", "block") and not (shifted or streamed or heavy)
    whole = vec_size * logits.itemsize == 16 and _whole(classes, vec_size, (logits,), sizes, strides[:1])
    if rows >= PIPELINED_ROWS and plain and whole and logits.itemsize == 4:
        turns = _turns(kind, width, threads, cluster, classes // vec_size, -(-units // chunks))
    return RowLayout(
        kind, vec_size, width, threads, chunks, per_block, shared, rank, words, cluster, resident, streamed, prefetch,
        per_thread=per_thread, shifted=shifted, gathered=gathers, turns=turns, edges=each_edges,
    )  # fmt: skip


def pipelined_threads(lanes: int) -> int:
    """Threads that a multiprocessor runs at once of rows that so many lanes share, in registers."""
    return PIPELINED_SHARED_THREADS if lanes > WARP else PIPELINED_THREADS


def _turns(kind: str, width: int, threads: int, cluster: int, vectors: int, rows: int) -> int:
    """Rows that a warp takes one after another where it takes a chunk of so many rows of a group without gradients; 0
    where warps take them as with gradients: a single row has no next one to load meanwhile.
    """
    fits = cluster == 1 and vectors <= VECTORS * width and PIPELINED_LANES <= width <= PIPELINED_LANES_MOST
    turns = rows * (threads // WARP if kind == "subwarp" else 1) * fits
    return turns if 1 < turns <= min(width, WARP) else 0


def _in_registers(
    rows: int,
    classes: int,
    logits: RowStrides,
    gradients: RowStrides,
    together: bool,
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    vec_size: int,
    chip: Chip,
    heavy: bool,
) -> RowLayout | None:
    """The layout of many rows that fit into registers, or that warps share as columns; or None."""
    size = logits.itemsize
    if classes < 2:
        return None
    if together:
        follow = strides[1] == strides[0] and without_gaps(classes, sizes, strides[0])
        whole = _whole(classes, 16 // size, (logits, gradients), sizes, ())
        most = PACKED_CLASSES_WHOLE if whole else PACKED_CLASSES_NARROW if size == 2 else PACKED_CLASSES
        if rows < MANY_ROWS or classes * max(size, 4) > 4 * most or not follow:
            return None
        return _packed_layout(rows, classes, logits, gradients, sizes, strides, heavy)
    near = _near(sizes, (strides[0], strides[1]))
    if not near and not spread_columns(rows, classes, sizes, (strides[0], strides[1])):
        return None
    if near and tiled(rows, classes, size):
        tile = tile_shape(rows, classes, size, vec_size, chip, heavy)
        if tile:
            return _tile_layout(tile, rows, classes, logits, gradients, sizes, strides)
        return _slice_layout(rows, classes, vec_size, logits, gradients, sizes, strides)
    if near and sliced(rows, classes, sizes, size):
        return _slice_layout(rows, classes, vec_size, logits, gradients, sizes, strides)
    forward = size > 2 or (logits.class_stride > 0 and min(strides[0]) >= 0)
    if near and vec_size == 1 and forward and interleaved(rows, classes, sizes, strides, size):
        return _interleaved_layout(rows, classes, logits, gradients, sizes, strides)
    found = _column_rows(rows, classes, size, vec_size)
    if not found:
        return None
    resident, tiles = column_resident(classes, found, size), -(-rows // (WARP * found))
    light = resident > COLUMN_RESIDENT and rows >= MANY_COLUMNS
    threads, chunks = COLUMN_THREADS, _chunks(tiles, LIGHT_COLUMN_CHUNKS if light else WARP_CHUNKS)
    words = space_words(rows, classes, (logits.class_stride, gradients.class_stride, 0, 0, 0, 0), sizes, strides)
    return RowLayout(
        "columns", found, 1, threads, chunks, threads // WARP, 0, space_rank(rows, sizes), words,
        resident=resident, per_thread=classes,
    )  # fmt: skip


def column_resident(classes: int, rows: int, size: int) -> int:
    """Threads that a multiprocessor has registers for whose lanes take so many rows of columns at once."""
    light = rows == 1 and classes <= LIGHT_COLUMN_CLASSES[size]
    return COLUMN_RESIDENT * 3 // 2 if light else COLUMN_RESIDENT


def _packed_layout(
    rows: int,
    classes: int,
    logits: RowStrides,
    gradients: RowStrides,
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    heavy: bool,
    step: int = 0,
) -> RowLayout:
    """The layout of many rows of few classes that a warp moves together; of logits with gaps, with their classes
    ``step`` elements apart.
    """
    size, each, buffers = logits.itemsize, packed_rows_of_lane(classes), packed_buffers(classes)
    pitch = strides[0][0] * size if step else 0
    # Rows that fill their pitch but begin within 16 bytes would lie on both sides of what is put between them.
    padded = step > 0 and pitch % 32 == 0 and logits.misalignment + ((classes - 1) * step + 1) * size <= pitch
    vec_size = gcd(16, logits.misalignment, pitch or gradients.misalignment) // size
    shifted = step > 0 or (gradients.misalignment == 0 and vec_size < 16 // size)
    units, resident = -(-rows // (WARP * each)), 65536 // packed_registers(classes)
    if rolled(classes, heavy, shifted):
        resident = ROLLED_RESIDENT // (2 if size == 8 else 1)
    few = buffers > 1 or (units <= FEW_TILES and size <= 4)
    chunks = _chunks(units, WARP_CHUNKS if few else _most_chunks(resident))
    warp = packed_stage(classes, size, pitch + 16 * padded, shifted)
    threads = min(PACKED_THREADS, WARP * power_of_two(SHARED_BYTES // warp + 1) // 2)
    words = space_words(rows, classes, (logits.class_stride, gradients.class_stride, 0, 0, 0, 0), sizes, strides)
    return RowLayout(
        "packed_rows", vec_size, 1, threads, chunks, threads // WARP, threads // WARP * warp, space_rank(rows, sizes),
        words, resident=max(threads, min(2048, resident)), per_thread=classes, shifted=shifted, step=step,
        padded=padded,
    )  # fmt: skip


def packed_stage(classes: int, size: int, pitch: int, shifted: bool) -> int:
    """Bytes of shared memory for the tiles of a warp that moves rows of few classes together; ``pitch`` bytes from row
    to row of logits with gaps there, or 0.
    """
    tile = WARP * packed_rows_of_lane(classes)
    return (tile * max(packed_pitch(classes * size), pitch) + 16 * shifted) * packed_buffers(classes)


def has_small_gaps(
    rows: int,
    classes: int,
    tensors: Sequence[RowStrides],
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    heavy: bool,
) -> bool:
    """True of many rows of few classes with small gaps between rows, or between classes, that a warp copies to shared
    memory as one stretch: gaps lie in sectors that are read anyway. ``tensors`` are the logits and their gradients,
    which follow each other without gaps, ``strides`` begin with those of both; ``heavy`` rows compute more than a loss.
    Of more than FEW_CLASSES classes only those of 16 bits gain, and those that are apart in 32: lanes that share a row
    read others one by one as fast.
    """
    logits, gradients = tensors
    step, size, pitch = logits.class_stride, logits.itemsize, strides[0][0]
    most = PACKED_CLASSES_NARROW if size == 2 else PACKED_CLASSES if step > 1 and size == 4 else FEW_CLASSES
    if rows < max(2, MANY_ROWS) or not 1 < classes <= most or rolled(classes, heavy, shifted=False):
        return False
    span = (classes - 1) * step + 1
    if not (gradients.class_stride == 1 <= step <= GAP_STEP and max(span, classes + 1) <= pitch <= GAP_RATIO * span):
        return False
    fits = packed_stage(classes, size, packed_pitch(pitch * size), shifted=True) <= GAP_BYTES
    return fits and _evenly_apart(pitch, sizes, strides[0]) and without_gaps(classes, sizes, strides[1])


def _evenly_apart(pitch: int, sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """True if each row begins ``pitch`` elements behind the one before it, over all dimensions, which begin with the
    innermost.
    """
    return all(s == pitch * prod(sizes[:d]) for d, s in enumerate(strides) if sizes[d] > 1)


def interleaved(rows: int, classes: int, sizes: Sequence[int], strides: Sequence[Sequence[int]], size: int) -> bool:
    """True of many neighbouring rows that lie in no vectors, of which a thread takes several."""
    near = strides[0][0] == strides[1][0] == 1 and sizes[0] >= INTERLEAVED_ROWS
    warps = 2 if size == 2 else 1
    fits = warps * interleaved_bytes(classes, interleaved_rows(rows, classes, size), size) <= SHARED_BYTES
    least = ODD_COLUMN_CLASSES if size == 2 else COLUMN_CLASSES
    return rows >= MANY_ROWS and near and classes > least and fits


def interleaved_rows(rows: int, classes: int, size: int) -> int:
    """Rows of a thread of interleaved ones: in 16 bits fewer where there are few tiles, or a block would have a single
    warp.
    """
    single = 2 * interleaved_bytes(classes, ROWS_PER_THREAD, size) > SHARED_BYTES
    narrow = size == 2 and (rows < MANY_INTERLEAVED or single)
    return ROWS_PER_THREAD // 2 if narrow else ROWS_PER_THREAD


def interleaved_bytes(classes: int, rows: int, size: int) -> int:
    """Bytes of shared memory of a warp whose threads have so many interleaved rows each. In 16 bits a class has words
    of four bytes, one more than there are pairs (``kernels/softmax/paired_rows.cuh``).
    """
    return classes * (4 * (rows // 2 * WARP + 1) if size == 2 else rows * WARP * size)


def interleaved_threads(classes: int, rows: int, size: int) -> int:
    """Threads of a block of such warps."""
    fits = SHARED_BYTES // interleaved_bytes(classes, rows, size)
    return min(THREAD_PER_ROW_THREADS, WARP * power_of_two(fits + 1) // 2)


def _interleaved_layout(
    rows: int,
    classes: int,
    logits: RowStrides,
    gradients: RowStrides,
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
) -> RowLayout:
    size, each = logits.itemsize, interleaved_rows(rows, classes, logits.itemsize)
    threads = interleaved_threads(classes, each, size)
    words = space_words(rows, classes, (logits.class_stride, gradients.class_stride, 0, 0, 0, 0), sizes, strides)
    units = rows // sizes[0] * -(-sizes[0] // (WARP * each))
    chunks = _chunks(units, INTERLEAVED_CHUNKS)
    halves = _between_halves(logits, gradients, sizes, strides) if size == 2 else set()
    return RowLayout(
        "interleaved_rows", each, 1, threads, chunks, threads // WARP,
        threads // WARP * interleaved_bytes(classes, each, size), space_rank(rows, sizes), words,
        resident=THREAD_PER_ROW_RESIDENT, per_thread=classes,
        shifted=halves == {1}, gathered=halves == {0, 1}, step=logits.class_stride % 2 + 1 if size == 2 else 0,
    )  # fmt: skip


def _between_halves(
    logits: RowStrides, gradients: RowStrides, sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> set[int]:
    """0 if neighbouring rows of 16 bits begin in the same half of a word in logits and gradients, 1 if they begin in
    the other half; both if some do and others do not.
    """
    apart = [a - b for a, b, n in zip(strides[0], strides[1], sizes, strict=True) if n > 1]
    if any([x % 2 for x in (logits.class_stride - gradients.class_stride, *apart)]):
        return {0, 1}
    return {(logits.misalignment - gradients.misalignment) // 2 % 2}


def packed_rows_of_lane(classes: int) -> int:
    """Rows of few contiguous classes that a lane takes at once."""
    return min(PACKED_ROWS, power_of_two(max(1, PACKED_VALUES // classes)))


def packed_buffers(classes: int) -> int:
    """Places of a warp in shared memory for tiles of rows of few contiguous classes: 2 where the next tile is on its
    way while one is evaluated. Tiles of a row per lane would pay more for that than they wait.
    """
    return 2 if packed_rows_of_lane(classes) > 1 else 1


def rolled(classes: int, heavy: bool, shifted: bool) -> bool:
    """True of contiguous rows that a lane reads from shared memory again, some classes at a time."""
    return heavy and not shifted and classes > PACKED_CLASSES_HEAVY


def packed_registers(classes: int) -> int:
    """Registers of a thread that takes rows of few contiguous classes: an upper bound, as counted. More blocks than a
    multiprocessor has room for would wait with chunks of their own until the others have finished.
    """
    rows = packed_rows_of_lane(classes)
    if rows > 1:
        return 124 if rows > 2 else 80 if classes <= 4 else 96
    return 64 if classes <= 8 else 72 if classes <= 12 else 96 if classes <= 33 else 64 + 11 * classes // 10


def packed_pitch(row: int) -> int:
    """Bytes from row to row in shared memory, as ``kPitch`` of ``kernels/softmax/packed_rows.cuh``."""
    return row + 16 * (row % 32 == 0)


def _column_rows(rows: int, classes: int, size: int, vec_size: int) -> int:
    """Neighbouring rows that a lane takes to registers, of ``vec_size`` that can be moved at once; 0 if they do not
    fit.
    """
    most = ODD_COLUMN_CLASSES if size == 2 and vec_size == 1 else COLUMN_CLASSES
    if classes > most or rows < MANY_ROWS:
        return 0
    words = max(1, size // 4)  # of the number that a logit becomes
    return next((x for x in (4, 2, 1) if x <= vec_size and x * classes * words <= COLUMN_REGISTERS), 0)


@dataclass(frozen=True)
class TileShape:
    """Columns that warps share: neighbouring rows of a lane, warps of a block, blocks of a cluster, bytes of shared
    memory for logits and for what warps exchange.
    """

    vec_size: int
    warps: int
    cluster: int
    shared: int
    exchanged: int


def tiled(rows: int, classes: int, size: int) -> bool:
    """True of rows of strided classes that warps share as columns: many rows of too many classes for one thread."""
    return rows >= TILE_ROWS and classes * size >= TILE_ROW_BYTES * (2 if rows >= TILE_MANY_ROWS else 1)


def sliced(rows: int, classes: int, sizes: Sequence[int], size: int) -> bool:
    """True of few rows of strided classes that blocks share as columns: of each class they read whole sectors."""
    return rows < TILE_ROWS and classes >= SLICE_CLASSES and sizes[0] * size >= SECTOR_BYTES


def exchanged_bytes(lanes: int, warps: int, cluster: int, size: int, heavy: bool) -> int:
    """The bytes of ``TileExchange`` in ``kernels/softmax/column_tiles.cuh``."""
    numbers = max(1, size // 4) * 4
    parts = warps + (2 * cluster if cluster > 1 else 0)
    return WARP * lanes * numbers * (parts * (4 if heavy else 2) + 4)


def tile_shape(rows: int, classes: int, size: int, vec_size: int, chip: Chip, heavy: bool) -> TileShape | None:
    """Tiles whose warps read 256 bytes of a class, or else 128, and of which a multiprocessor runs several; of few
    rows, and of 16 bits, first of all those in small clusters. None if rows do not fit into shared memory.
    """
    clusters = (1, 2, 4, MAX_CLUSTER) if chip.clusters else (1,)
    widths = sorted({min(vec_size, max(1, x // size)) for x in (8, 4)}, reverse=True)
    choices = [(x, k) for x in widths for k in clusters]
    if rows < TILE_MANY_ROWS or size < 4:
        choices.sort(key=lambda x: x[1])
    for limit, least in ((TILE_BYTES[0], MANY_BLOCKS), (TILE_BYTES[1], MANY_BLOCKS), (TILE_BYTES[1], 1)):
        for lanes, cluster in choices:
            rows_of_tile = WARP * lanes
            exchanged = exchanged_bytes(lanes, TILE_WARPS, cluster, size, heavy)
            shared = -(-classes // (TILE_WARPS * cluster)) * TILE_WARPS * rows_of_tile * size
            blocks = -(-rows // rows_of_tile) * cluster
            # A warp of a cluster has some classes of its own.
            shares = cluster == 1 or classes >= 4 * TILE_WARPS * cluster
            if shares and shared + exchanged + 1024 <= min(limit, chip.shared) and blocks >= least:
                shape = TileShape(lanes, TILE_WARPS, cluster, shared, exchanged)
                return _in_fewer_waves(shape, rows, classes, size, heavy, min(TILE_BYTES[1], chip.shared))
    return None


def _in_fewer_waves(shape: TileShape, rows: int, classes: int, size: int, heavy: bool, room: int) -> TileShape:
    """The shape, or one of clusters of seven blocks instead of eight, of which some more run at once: 32 tiles wait for
    two clusters of eight in turn. ``room``: bytes of a block.
    """
    if shape.cluster != MAX_CLUSTER:
        return shape
    shared = -(-classes // (shape.warps * ODD_CLUSTER)) * shape.warps * WARP * shape.vec_size * size
    exchanged = exchanged_bytes(shape.vec_size, shape.warps, ODD_CLUSTER, size, heavy)
    other = TileShape(shape.vec_size, shape.warps, ODD_CLUSTER, shared, exchanged)

    def time(x: TileShape) -> float:
        at_once = CLUSTERS_AT_ONCE[x.cluster][min(_tile_blocks(x), 3) - 1]
        return -(-rows // (WARP * x.vec_size * at_once)) / x.cluster

    return other if shared + exchanged + 1024 <= room and time(other) < time(shape) else shape


def _tile_blocks(tile: TileShape) -> int:
    """Blocks that a multiprocessor has room for; each has 2 KiB besides."""
    fits = max(1, (227 << 10) // (tile.shared + tile.exchanged + 2048))
    return max(1, min(TILE_RESIDENT // (tile.warps * WARP), fits))


def _tile_layout(
    tile: TileShape,
    rows: int,
    classes: int,
    logits: RowStrides,
    gradients: RowStrides,
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
) -> RowLayout:
    words = space_words(rows, classes, (logits.class_stride, gradients.class_stride, 0, 0, 0, 0), sizes, strides)
    units = -(-rows // (WARP * tile.vec_size))
    resident = _tile_blocks(tile) * tile.warps * WARP
    return RowLayout(
        "column_tiles", tile.vec_size, 1, tile.warps * WARP, _chunks(units), 1, tile.shared, space_rank(rows, sizes),
        words, tile.cluster, resident, warps=tile.warps,
    )  # fmt: skip


def _slice_layout(
    rows: int,
    classes: int,
    vec_size: int,
    logits: RowStrides,
    gradients: RowStrides,
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
) -> RowLayout:
    vec_size = max(1, min(vec_size, SLICE_BYTES[logits.itemsize] // logits.itemsize))
    lanes = min(WARP, power_of_two(rows // vec_size))
    narrows = SLICE_ELEMENTS <= rows * classes <= SLICE_CACHED_BYTES // logits.itemsize
    while (
        narrows and rows <= (SLICE_TILES - 1) * lanes * vec_size and lanes * vec_size * logits.itemsize > SECTOR_BYTES
    ):
        lanes //= 2
    if not narrows:
        lanes = _slice_lanes(rows, lanes, vec_size, (logits, gradients), sizes, strides)
    tiles = -(-rows // (lanes * vec_size))

    def units(ahead: int) -> int:
        return tiles * -(-classes // (SLICE_WARPS * WARP // lanes * ahead))

    ahead = next(x for x, least in SLICE_AHEAD if units(x) >= least)
    if logits.itemsize > 4:
        ahead = SLICE_DOUBLES_AHEAD
    # Blocks that share a tile count its parts, for which a workspace has as many counters.
    slices = max(tiles, min(SLICES, units(ahead)))
    words = space_words(rows, classes, (logits.class_stride, gradients.class_stride, 0, 0, 0, 0), sizes, strides)
    return RowLayout(
        "column_slices", vec_size, slices, SLICE_WARPS * WARP, tiles, 1, 0, space_rank(rows, sizes), words,
        resident=SLICE_RESIDENT, warps=SLICE_WARPS, lanes=lanes, per_thread=ahead,
    )  # fmt: skip


def _slice_lanes(
    rows: int,
    lanes: int,
    vec_size: int,
    tensors: Sequence[RowStrides],
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
) -> int:
    """The threads that read a class of a tile: ``lanes``, or those of several warps if classes begin within sectors,
    because a sector that lies in two tiles is moved twice. Larger tiles are not taken where more than an eighth of
    their rows would not exist, beyond those that do not exist anyway.
    """
    if all(_whole_sectors(sizes, s, x) for s, x in zip(strides, tensors, strict=False)):
        return lanes
    of_tiles = {
        x: -(-rows // (x * vec_size)) * x * vec_size
        for x in (lanes, 2 * lanes, 4 * lanes)
        if x == lanes or x * vec_size <= SLICE_ROWS
    }
    return max(x for x, count in of_tiles.items() if 8 * count <= 9 * min(of_tiles.values()))


def slice_memory(layout: RowLayout, number: int, smoothed: bool) -> int:
    """Doubles of workspace for the partial sums of tiles and the sums of their parts, which consist of numbers of so
    many bytes.
    """
    rows = (layout.chunks + layout.slices) * layout.lanes * layout.vec_size
    return layout.chunks + 1 + rows * number * (4 if smoothed else 2) // 8


def slice_records(layout: RowLayout, rows: int, number: int) -> int:
    """Doubles of the records of tiles, of a divisor and of the coefficients of all rows (``coeffs_behind``)."""
    return (layout.chunks + 2) // 2 * 2 + rows * number // 2


def gathered(
    classes: int,
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    tensors: Sequence[RowStrides],
    chip: Chip,
) -> bool:
    """True of rows that are read class by class though their gradients have contiguous classes: each lies in memory of
    its own, and stays on chip. ``strides`` and ``tensors`` are those of the logits and of their gradients.
    """
    logits, gradients = tensors
    step = logits.class_stride
    if gradients.class_stride != 1 or step <= 1 or classes <= FEW_CLASSES:
        return False
    alone = all(abs(s) >= classes * step for s, n in zip(strides[0], sizes, strict=True) if n > 1)
    part = min(PART_BYTES, chip.shared - DECLARED_BYTES)
    return alone and classes * max(4, logits.itemsize) <= part * (MAX_CLUSTER if chip.clusters else 1)


def _near(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> bool:
    """True if a warp reads neighbouring rows in whole lines."""
    return sizes[0] > 1 and all(x[0] == 1 for x in strides)


def spread_columns(rows: int, classes: int, sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> bool:
    """True of many rows of so few classes that a lane takes a row to registers though neighbouring logits are a few
    elements apart. ``strides`` are those of the logits and of their gradients.
    """
    return rows >= MANY_ROWS and 1 < classes <= COLUMN_CLASSES and spread(sizes, strides[:1], strides[1:2])


def spread(sizes: Sequence[int], operands: Sequence[Sequence[int]], gradients: Sequence[Sequence[int]]) -> bool:
    """True if neighbouring rows are next to each other in all gradients, and a few elements apart in an operand."""
    steps = [x[0] for x in operands]
    return sizes[0] > 1 and all([x[0] == 1 for x in gradients]) and min(steps) > 0 and 1 < max(steps) <= NEAR_COLUMNS


def subwarp_blocks(edges: int) -> int:
    """Blocks of SUBWARP_BLOCK_THREADS that a multiprocessor has registers for, whose lanes take up to so many elements
    at the ends of a row.
    """
    return MANY_EDGES_BLOCKS if edges > 2 else SUBWARP_BLOCKS


def block_blocks(cluster: int, heavy: bool, crowded: bool) -> int:
    """Blocks of BLOCK_THREADS that a multiprocessor has registers for. More ``crowded`` ones, with a cap or with
    vectors of 16 bits that are gathered, would spill.
    """
    return BLOCK_BLOCKS if (cluster > 1 or heavy) and not crowded else PLAIN_BLOCKS


def copied(
    shape: Sequence[int],
    classes: int,
    tensors: Sequence[RowStrides],
    read: int,
    softmax: bool,
    shares: bool = True,
    chip: Chip | None = None,
    second: bool = False,
    room: int = 0,
    registers: bool = False,
    columns: bool = False,
    tile: int = 0,
    lane: int = 0,
    again: bool = False,
    heavy_terms: bool = False,
    writes: bool = True,
    heavy: bool = False,
) -> bool:
    """True of rows that are copied, their classes next to each other, before kernels take them.

    They are where classes lie apart, unless columns serve them well: neighbouring rows are next to each other in all
    ``tensors``, operands and gradients, and either warps share them, or a row of the operands, the first ``read``
    tensors, fits into shared memory. So images (N, C, H, W) are taken as they are, small ones up to C = 192 in float32.
    A thread alone would read a longer row several times, at the speed of one thread if rows are few, and lose
    digits in a long sum of number after number; few rows of some classes are copied for that reason, too.
    ``shares`` is False of what is computed by threads alone; ``second`` derivatives of few rows are too slow then.
    On a ``chip`` rows that lie in memory of their own may be gathered. A row of up to ``room`` bytes stays on chip.
    Where lanes take rows of few classes to ``registers``, these are read as they lie, in whole lines; so are those of
    more that warps share, if there are kernels of ``columns``, or if 32 of two operands have up to ``tile`` bytes. Of
    two operands a lane takes up to ``lane`` classes to registers though neighbouring rows are a few elements apart, or
    fewer where more than 16 bits are read ``again``; of many others those of 16 bits are copied, and 32 read again.
    With ``heavy_terms`` a class takes many instructions; ``writes`` is False of a value alone. Of one operand more is
    computed than a loss if it is ``heavy``.
    """
    rows = prod(shape)
    if not softmax:
        # Of the operand one element of each row is read, wherever it lies.
        tensors = tensors[read:]
    if not rows or classes <= 1:
        return False
    sizes, strides = merge(shape, [x.strides for x in tensors])
    if softmax and read == 1 and shares and has_small_gaps(rows, classes, tensors, sizes, strides, heavy):
        return False
    if all(x.class_stride == 1 for x in tensors):
        if not softmax or (second and read == 2):
            return False
        return _padded(rows, classes, tensors, sizes, strides, read, room, lane == 0)
    if softmax and read == 1 and shares and chip is not None and gathered(classes, sizes, strides, tensors, chip):
        return False
    if softmax and read == 1 and shares and spread_columns(rows, classes, sizes, strides):
        return False
    widest = max(x.itemsize for x in tensors[:read])
    if read == 2 and heavy_terms and _copied_for_lanes(rows, classes, widest, writes):
        return True
    if rows >= MANY_ROWS and read == 2 and not second and spread(sizes, strides[:2], strides[2:]):
        farthest = max(x[0] for x in strides[:2])
        if classes <= lane:
            few = _in_few_tiles(classes, sum([x.itemsize for x in tensors[:2]]))
            return farthest > (NEAR if few else NEAR_COLUMNS - (again and widest > 2))
        if classes > COLUMN_CLASSES and rows * classes >= SPREAD_ELEMENTS and widest <= (4 if again else 2):
            return True
    if registers and classes <= SECOND_ORDER_CLASSES:
        together = [classes if x.class_stride == 1 else 1 for x in tensors]
        if all(abs(x[0]) <= NEAR * n for x, n in zip(strides, together, strict=True)):
            return False
    if sizes[0] > 1 and any(abs(x[0]) > NEAR for x in strides):
        return True
    # Elements of 16 bits would be read one by one.
    if rows >= MANY_ROWS and widest == 2 and not second and len({x.class_stride == 1 for x in tensors[:read]}) > 1:
        return True
    if read == 2 and not second and _has_words_in_copies_alone(shape, classes, tensors, lane, again):
        return True
    least = SECOND_LABEL_COLUMNS[widest] if read == 1 else _second_alone(widest) + 1
    if columns and second_in_columns(rows, classes, widest, least):
        return False
    if registers and read == 2 and classes >= least:
        return rows * classes > SECOND_APART
    if softmax and read == 1 and not second and _near(sizes, strides):
        size = tensors[0].itemsize
        if sliced(rows, classes, sizes, size):
            return shares and not again and rows * classes < SLICE_ELEMENTS
        if shares and tiled(rows, classes, size):
            return False
    if not softmax:
        return False
    if read == 1 and shares and rows < TILE_ROWS and classes > APART_CLASSES[widest]:
        return True
    if second and read == 1 and rows >= MANY_ROWS and SECOND_FEW_CLASSES < classes <= FEW_CLASSES:
        # Threads that stage their rows copy 16 bits one by one.
        return tensors[0].itemsize == 2
    if second and rows < MANY_ROWS and classes > SECOND_FEW_CLASSES:
        return rows * classes > SECOND_APART
    size = classes * sum(x.itemsize for x in tensors[:read])
    if read == 2 and not second and size * WARP <= tile:
        return False
    return size * THREAD_PER_ROW_THREADS_MIN > SHARED_BYTES


def lanes_share(rows: int, itemsize: int) -> bool:
    """True of rows of heavy terms that lanes which share a row evaluate in less time than a thread that has it alone.
    Terms of 16 bits take fewer instructions, those of 64 more.
    """
    return rows < HEAVY_TERM_ROWS[itemsize]


def _copied_for_lanes(rows: int, classes: int, itemsize: int, writes: bool) -> bool:
    """True of rows of heavy terms, with classes that lie apart in both operands, that are copied for lanes to share."""
    if not lanes_share(rows, itemsize):
        return False
    if itemsize == 8:
        return writes or rows < HEAVY_VALUE_ROWS
    return writes and classes > HEAVY_TERM_CLASSES


def _has_words_in_copies_alone(
    shape: Sequence[int], classes: int, tensors: Sequence[RowStrides], lane: int, again: bool
) -> bool:
    """True of rows of two operands with gaps, in 16 bits, of which lanes move neighbouring ones in words if they are
    copied, but one by one as they lie; and in 32 bits, if a few of them are read again. A lane takes many rows of up to
    ``lane`` classes to registers as they lie; many whose neighbours are a few elements apart have rules of their own.
    """
    operands, gradients = tensors[:2], tensors[2:]
    many, widest = prod(shape) >= MANY_ROWS, max(x.itemsize for x in operands)
    if classes < WORD_CLASSES or any(x.class_stride == 1 for x in tensors) or (many and classes <= lane):
        return False
    short = again and not many and not _in_few_tiles(classes, sum(x.itemsize for x in operands))
    if widest > (4 if short else 2):
        return False

    def lies(of: Sequence[RowStrides]) -> tuple[int, bool]:
        """The rows of a word, and whether neighbours are next to each other."""
        order = [x for pair in zip(of, gradients, strict=True) for x in pair]
        sizes, strides = merge(shape, [x.strides for x in order])
        return _column_words(sizes, strides, order, True)[0], all(x[0] == 1 for x in strides)

    words, near = lies(operands)
    return words == 1 < lies(gradients)[0] and (near or not many)


def room_of_rows(chip: Chip) -> int:
    """Bytes of a row that the blocks of a cluster can keep on chip."""
    return (chip.shared - DECLARED_BYTES) * (MAX_CLUSTER if chip.clusters else 1)


def _padded(
    rows: int,
    classes: int,
    tensors: Sequence[RowStrides],
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    read: int,
    room: int,
    heavy: bool,
) -> bool:
    """True of rows of contiguous classes that would be read class by class because there are gaps between rows of an
    operand, one of the first ``read`` tensors, but not of a gradient: many rows of few classes, since warps move only
    rows without gaps together; more classes of two operands, of which each lane that shares a row would have a single
    vector or element, most of all if threads exchange more than once, ``heavy``; and rows of two operands in 16 bits
    that do not stay on chip, where vectors that lie otherwise can be shifted, if gaps leave no vectors that lie alike
    in both.
    """
    few = rows >= PADDED_ROWS and classes <= FEW_CLASSES
    if read == 2:
        widest = max(x.itemsize for x in tensors[:read])
        most, least = PADDED_CLASSES.get((widest, heavy), 0), MANY_ROWS
        if heavy and widest == 2:
            least = PADDED_ROWS if classes <= most else MANY_ROWS
            # Without gaps short rows with edges have narrower vectors, and fewer lanes.
            most = 8 * DENSE_EDGES - 1 if classes % 8 else most
        few = few or (rows >= least and classes <= most)
    long = classes > FEW_CLASSES and classes * sum(x.itemsize for x in tensors[:read]) > room
    apart = [s for s in strides[:read] if not without_gaps(classes, sizes, s)]
    if not few and not (read == 2 and long and _scalar(tensors, sizes, strides)):
        return False
    alone = all(abs(x) >= classes for s in apart for x, n in zip(s, sizes, strict=True) if n > 1)
    return bool(apart) and alone and all(without_gaps(classes, sizes, s) for s in strides[read:])


def _scalar(tensors: Sequence[RowStrides], sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> bool:
    """True of tensors in 16 bits without vectors that lie alike in all of them."""
    return max(x.itemsize for x in tensors) == 2 and _alike(sizes, strides, tensors) == 1


def classes_last(shape: Sequence[int], class_dim: int) -> tuple[int, ...]:
    """Strides without gaps, with the classes next to each other and the rows in the order of the shape."""
    rows = [n for d, n in enumerate(shape) if d != class_dim]
    strides = [x * shape[class_dim] for x in dense_strides(rows, (0,) * len(rows))]
    return (*strides[:class_dim], 1, *strides[class_dim:])


def label_only_layout(
    shape: Sequence[int],
    classes: int,
    logits: RowStrides,
    gradients: RowStrides,
    others: Sequence[Sequence[int]],
    _: Chip,
) -> RowLayout:
    """The layout of rows of which only the label's class is read. If gradients have no gaps, a lane takes some short
    rows, or a warp writes a tile of longer ones. Otherwise a warp writes those of a row, or a lane those of its
    neighbours if classes lie apart. Large gradients of many classes are zeros before.
    """
    sizes, strides = merge(shape, [gradients.strides, logits.strides, *others, (0,) * len(shape)])
    strides = (strides[1], strides[0], *strides[2:])
    rows, size = prod(shape), gradients.itemsize
    class_strides = (logits.class_stride, gradients.class_stride, 0, 0, 0, 0)
    words, rank = space_words(rows, classes, class_strides, sizes, strides), space_rank(rows, sizes)
    row = max(classes, 1) * size
    together = classes == 1 or gradients.class_stride == 1
    each = min(LABEL_ONLY_ROWS, vector_size(sizes, (strides[1], strides[1]), gradients, gradients, False))
    scattered = each == 1 or not _whole_sectors(sizes, strides[1], gradients)
    least = (SPARSE_BYTES, SPARSE_ROW_BYTES) if together else (SPARSE_APART_BYTES, SPARSE_APART_ROW_BYTES)
    large = rows * row >= least[0] and row >= least[1]
    if large and (together or scattered) and classes < 1 << 31:
        return RowLayout(
            "label_only_sparse", 1, 1, THREADS, _chunks(-(-rows // (WARP * LABEL_ONLY_ROWS))), THREADS // WARP, 0, rank,
            words, resident=LABEL_ONLY_RESIDENT, per_thread=LABEL_ONLY_ROWS,
        )  # fmt: skip
    if together and without_gaps(classes, sizes, strides[1]):
        vec_size = 16 // size
        if row < LABEL_ONLY_ROW_BYTES:
            each = min(LABEL_ONLY_ROWS, power_of_two(max(1, LABEL_ONLY_LANE_BYTES // row) + 1) // 2)
            threads = min(THREADS, power_of_two(SHARED_BYTES // (each * row) + 1) // 2)
            return RowLayout(
                "label_only_rows", vec_size, 1, threads, _chunks(-(-rows // (WARP * each))), threads // WARP,
                threads * each * row, rank, words, resident=LABEL_ONLY_RESIDENT, per_thread=each,
            )  # fmt: skip
        vectors = next(x[1] for x in LABEL_ONLY_TILES if row < x[0])
        tiles = -(-rows * row // (16 * WARP * vectors))
        while vectors > LABEL_ONLY_LEAST_VECTORS and tiles < LABEL_ONLY_MANY_TILES:
            vectors, tiles = vectors // 4, -(-rows * row // (16 * WARP * (vectors // 4)))
        many = tiles >= LABEL_ONLY_MANY_TILES
        threads, chunks = (THREADS, LABEL_ONLY_CHUNKS) if many else (4 * WARP, LABEL_ONLY_MANY_TILES // 2)
        kind = "label_only_few" if rows <= LABEL_ONLY_FEW else "label_only_tiles"
        return RowLayout(
            kind, vec_size, 1, threads, max(1, min(tiles, chunks)), threads // WARP, 0, rank, words,
            resident=LABEL_ONLY_TILE_RESIDENT, per_thread=vectors,
        )  # fmt: skip
    if gradients.class_stride == 1 and classes > 1:
        return RowLayout("label_only", 1, WARP, THREADS, _chunks(rows), THREADS // WARP, 0, rank, words)
    tiles = -(-rows // (WARP * each))
    slices = max(1, min(classes // LABEL_ONLY_SLICE, -(-LABEL_ONLY_WARPS // max(1, tiles))))
    return RowLayout(
        "label_only_columns", each, slices, THREADS, _chunks(tiles * slices), THREADS // WARP, 0, rank, words,
        resident=LABEL_ONLY_RESIDENT,
    )  # fmt: skip


def _whole_sectors(sizes: Sequence[int], strides: Sequence[int], gradients: RowStrides) -> bool:
    """True if neighbouring rows of each class begin with a sector of memory, and end with one."""
    apart = (*(s for s, n in zip(strides[1:], sizes[1:], strict=True) if n > 1), gradients.class_stride, sizes[0])
    return not any(x * gradients.itemsize % SECTOR_BYTES for x in apart)


def dense_layout(
    shape: Sequence[int],
    classes: int,
    operands: Sequence[RowStrides],
    others: Sequence[Sequence[int]],
    chip: Chip,
    affine: bool = False,
    capped: bool = False,
    shifts: bool = True,
    heavy_terms: bool = False,
) -> RowLayout:
    """The layout of rows with a target per class. ``operands`` are the logits, their gradients, the targets and theirs;
    ``others`` the strides of mask and results; ``affine`` whether the term is affine in log p; ``capped`` whether
    logits have a cap; ``shifts`` whether operands may lie otherwise than gradients, if that takes wider vectors;
    ``heavy_terms`` whether a class takes many instructions.
    """
    logits, gradients, targets, target_gradients = operands
    rows_of = [logits.strides, gradients.strides, targets.strides, *others, target_gradients.strides]
    sizes, strides = merge(shape, rows_of)
    rows, size, cluster, per_thread, shifted = prod(shape), logits.itemsize + targets.itemsize, 1, 0, False
    warps, widest = 1, max(logits.itemsize, targets.itemsize)
    together = classes == 1 or all(x.class_stride == 1 for x in operands)
    of_operands = [strides[0], strides[1], strides[2], strides[5]]
    registers = classes <= dense_register_classes("packed_rows", affine, capped)
    by_lanes = heavy_terms and lanes_share(rows, widest)
    packed = together and not by_lanes and _packed_dense(rows, classes, operands, sizes, of_operands, registers)
    if packed:
        kind, width, per_thread = "packed_rows", 1, classes
        vec_size, threads, shared = packed
    elif together and classes > _classes_alone(rows, classes, by_lanes, heavy_terms):
        part = PART_BYTES if classes * size <= 2 * PART_BYTES else DENSE_PART_BYTES
        alike = _alike(sizes, of_operands, operands)
        shifted = shifts and logits.itemsize == targets.itemsize and alike * logits.itemsize < SHIFTED_BYTES
        wide = _alike(sizes, [strides[1], strides[5]], (gradients, target_gradients))
        shifted = shifted and wide * logits.itemsize == 16
        alike = _without_edges(classes, alike, operands, sizes, of_operands, DENSE_EDGES)
        for vec_size in (wide, alike) if shifted else (alike,):
            kind, width, threads, cluster = _on_chip(
                classes, vec_size, vec_size * size, rows, chip, (THREADS, BLOCK_THREADS), DENSE_VECTORS, part
            )
            if kind != "two_pass":
                break
            # Rows that are read again go through no shared memory.
            shifted = False
        shared = 0 if kind == "two_pass" else _stage(classes // vec_size, width * cluster) * threads * vec_size * size
    elif not together and dense_in_columns(classes, size, chip):
        kind, width, (vec_size, shifted) = "columns", 1, _column_words(sizes, of_operands, operands, shifts)
        shared, warps = classes * size * WARP, _dense_column_warps(classes, size, affine and widest == 8)
        threads = warps * WARP
    else:
        vec_size, threads, shared = _thread_per_row(classes, 1, size)
        kind, width = "thread_per_row", 1
        registers = classes <= dense_register_classes("columns", affine, capped) and rows >= MANY_ROWS
        columns = 0 if together or not registers else _column_rows_of_lane(sizes, of_operands, operands)
        moved = (1, False) if together else _column_words(sizes, of_operands, operands, shifts)
        if columns:
            kind, vec_size, threads, shared, per_thread = "columns", columns, PACKED_THREADS, 0, classes
        elif moved[0] > 1:
            kind, (vec_size, shifted), threads = "columns", moved, min(threads, PACKED_THREADS)
            shared = classes * size * threads
    in_warps = kind not in ("block", "two_pass")
    per_block = threads // WARP if in_warps and warps == 1 else 1
    units = -(-rows // (WARP // width)) if in_warps else rows
    registers = per_thread > 0 and classes <= dense_register_classes(kind, affine, capped)
    if registers:
        units = -(-rows // (WARP * (packed_rows_of_lane(classes) if kind == "packed_rows" else vec_size)))
    class_strides = (
        logits.class_stride,
        gradients.class_stride,
        targets.class_stride,
        0,
        0,
        target_gradients.class_stride,
    )
    words = space_words(rows, classes, class_strides, sizes, strides)
    rank = space_rank(rows, sizes)
    # Kernels of blocks have up to 64 registers.
    resident = DENSE_REGISTER_RESIDENT if registers else 2048 if in_warps else RESIDENT_THREADS
    if warps > 1:
        resident = dense_column_blocks(warps, widest) * threads
    chunks = _chunks(units, _most_chunks(resident))
    return RowLayout(
        kind, vec_size, width, threads, chunks, per_block, shared, rank, words, cluster, resident,
        per_thread=per_thread, warps=warps, shifted=shifted,
    )  # fmt: skip


def dense_in_columns(classes: int, size: int, chip: Chip) -> bool:
    """True of rows of so many classes, of ``size`` bytes each in both operands, of which the warps of a block can take
    32 while those of another block wait for theirs.
    """
    return _in_few_tiles(classes, size) and classes * size * WARP <= room_of_tiles(chip)


def _in_few_tiles(classes: int, size: int) -> bool:
    """True if shared memory has room for few tiles of 32 such rows, whose warps then share them."""
    return _room(classes * size * WARP) < DENSE_COLUMN_TILES


def room_of_tiles(chip: Chip) -> int:
    """Bytes of 32 such rows, at most."""
    return (chip.shared - DECLARED_BYTES) // 2


def _dense_column_warps(classes: int, size: int, double: bool) -> int:
    """Warps that share such rows: as many as keep a multiprocessor busy with the rows that its shared memory holds."""
    together = DENSE_COLUMN_DOUBLE_WARPS if double else DENSE_COLUMN_WARPS
    return max(2, min(DENSE_COLUMN_MOST, together // _room(classes * size * WARP)))


def dense_column_blocks(warps: int, itemsize: int) -> int:
    """Blocks of a multiprocessor whose warps share such rows, as many as there are registers for."""
    return DENSE_COLUMN_RESIDENT // (2 if itemsize == 8 else 1) // (warps * WARP)


def dense_register_classes(kind: str, affine: bool, capped: bool) -> int:
    """Classes of both operands that a lane holds in registers, at most, of packed rows or columns."""
    if not affine or capped:
        return 0
    return DENSE_PACKED_CLASSES if kind == "packed_rows" else DENSE_COLUMN_CLASSES if kind == "columns" else 0


def _classes_alone(rows: int, classes: int, shared: bool, heavy_terms: bool) -> int:
    """Classes of a row with a target for each that a thread takes alone: its time grows with them, that of lanes that
    share a row with the rows, above all with ``heavy_terms``. If rows are to be ``shared``, few.
    """
    if shared:
        return DENSE_ALONE_FEW
    if rows >= MANY_ROWS:
        return FEW_CLASSES
    return DENSE_ALONE_FEW if rows * classes <= DENSE_FEW_ELEMENTS and not heavy_terms else DENSE_ALONE


def _column_rows_of_lane(sizes: Sequence[int], strides: Sequence[Sequence[int]], tensors: Sequence[RowStrides]) -> int:
    """Neighbouring rows that a lane takes to registers, in words of four bytes if they lie so; 0 of rows that are not
    neighbours in all gradients, or far apart in an operand.
    """
    if spread(sizes, strides[::2], strides[1::2]):
        return 1
    if not all(x[0] == 1 for x in strides) or sizes[0] == 1:
        return 0
    apart = [x for s in strides for x in s[1:]] + [x.class_stride for x in tensors]
    size = min(x.itemsize for x in tensors)
    rows = max(1, 4 // size)
    aligned = not any(x.misalignment % (rows * x.itemsize) for x in tensors)
    return rows if aligned and not sizes[0] % rows and not any(x % rows for x in apart) else 1


def _column_words(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], tensors: Sequence[RowStrides], shifts: bool
) -> tuple[int, bool]:
    """Neighbouring rows of a class that a lane moves as a word in all tensors, 1 if that saves nothing; and whether it
    shifts operands, of 16 bits, to the words of their gradients. ``tensors`` are operands, each before its gradient.
    """
    itemsizes = [x.itemsize for x in tensors]
    apart = [x for s in strides for x in s[1:]] + [x.class_stride for x in tensors]
    shifts = shifts and max(itemsizes) == 2
    for rows in (8, 4, 2):
        if rows * max(itemsizes) > 16 or rows * min(itemsizes) < 4 or sizes[0] % rows:
            continue
        aligned = [x.misalignment % (rows * x.itemsize) == 0 for x in tensors]
        lies = all(aligned[1::2] if shifts else aligned)
        if lies and all(x[0] == 1 for x in strides) and not any(x % rows for x in apart):
            return rows, not all(aligned)
    return 1, False


def _packed_dense(
    rows: int,
    classes: int,
    operands: Sequence[RowStrides],
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    registers: bool,
    tangents: int = 0,
) -> tuple[int, int, int] | None:
    """Elements of a word, threads of a block and bytes of shared memory for many rows of few contiguous classes with a
    target each; None for others. Of those in ``registers`` a lane takes several, and the next ones have room, too. The
    last ``tangents`` of the ``operands`` are tangents.
    """
    itemsizes = [x.itemsize for x in operands]
    word = gcd(16, *(x.misalignment for x in operands))
    fits = rows >= MANY_ROWS and 1 < classes <= PACKED_CLASSES and word >= max(itemsizes)
    if not fits or any(x != strides[0] for x in strides) or not without_gaps(classes, sizes, strides[0]):
        return None
    row = sum(packed_pitch(classes * x) for x in (itemsizes[0], itemsizes[2], *itemsizes[len(itemsizes) - tangents :]))
    row *= 2 * packed_rows_of_lane(classes) if registers else 1
    if WARP * row > SHARED_BYTES:
        return None
    threads = min(PACKED_THREADS, power_of_two(SHARED_BYTES // row + 1) // 2)
    return word // itemsizes[0], threads, threads * row


def second_layout(
    shape: Sequence[int],
    classes: int,
    logits: RowStrides,
    gradients: RowStrides,
    others: Sequence[Sequence[int]],
    directions: RowStrides,
    softmax: bool,
    heavy: bool = False,
    capped: bool = False,
    chip: Chip | None = None,
) -> RowLayout:
    """The layout of rows for second derivatives; directions may lie in any way. Rows that threads take alone stay in
    shared memory if they fit and have no cap, all others are read again. Without a softmax only the label's class is
    read.
    """
    sizes, strides = merge(shape, [logits.strides, gradients.strides, *others, directions.strides])
    rows = prod(shape)
    together = classes == 1 or (logits.class_stride == 1 and gradients.class_stride == 1)
    # Operands that lie otherwise are shifted, or loaded element by element.
    vec_size = _second_vector(classes, sizes, strides[1:2], (gradients,)) if together and softmax else 1
    edges = not _whole(classes, vec_size, (gradients,), sizes, strides[1:2])
    shifted = together and softmax and vector_size(sizes, strides, logits, gradients, together) < vec_size
    kind, width, threads, cluster = _read_again(rows, classes, vec_size, together, chip, edges)
    class_strides = (logits.class_stride, gradients.class_stride, 0, 0, 0, directions.class_stride)
    words = space_words(rows, classes, class_strides, sizes, strides)
    shares = together and vec_size > 1 and directions.class_stride == 1 and kind in ("subwarp", "block")
    if shares and not capped:
        lies = _alike(sizes, [strides[0], strides[1], strides[5]], (logits, gradients, directions))
        given = rows, classes, sizes, words, vec_size, logits.itemsize, edges, lies < vec_size
        found = _register_layout(*given, SECOND_LABEL_CLASSES)
        if found:
            return found
    least = SECOND_LABEL_COLUMNS[logits.itemsize]
    if softmax and not (together or capped) and second_in_columns(rows, classes, logits.itemsize, least):
        return _second_column_layout(rows, classes, sizes, words, logits.itemsize, heavy)
    row = per_thread = 0  # bytes of a row in shared memory
    alone = softmax and not capped and kind == "thread_per_row_two_pass"
    if alone and together:
        word = gcd(16, logits.misalignment, gradients.misalignment, directions.misalignment)
        follow = strides[0] == strides[1] == strides[-1] and directions.class_stride == 1
        if rows >= MANY_ROWS and follow and word >= logits.itemsize and without_gaps(classes, sizes, strides[0]):
            kind, vec_size, per_thread = "staged_packed_rows", word // logits.itemsize, classes
            row, threads = 2 * packed_pitch(classes * logits.itemsize), PACKED_THREADS
    elif alone:
        row = 2 * classes * logits.itemsize
        kind, row = ("staged_thread_per_row", row) if row * THREAD_PER_ROW_THREADS_MIN <= SHARED_BYTES else (kind, 0)
    if row:
        threads = min(threads, power_of_two(SHARED_BYTES // row + 1) // 2)
    if not softmax:
        width, cluster = WARP if gradients.class_stride == 1 and classes > 1 else 1, 1
        kind, threads = "label_only", THREADS
    per_block, units = _workers(kind, rows, width, threads)
    vec_size = 1 if "thread_per_row" in kind else vec_size
    return RowLayout(
        kind, vec_size, width, threads, _chunks(units), per_block, row * threads, space_rank(rows, sizes),
        words, cluster, per_thread=per_thread, shifted=shifted and kind in ("subwarp", "block"),
    )  # fmt: skip


def dense_second_layout(
    shape: Sequence[int],
    classes: int,
    operands: Sequence[RowStrides],
    others: Sequence[Sequence[int]],
    directions: Sequence[RowStrides | None],
    chip: Chip | None = None,
) -> RowLayout:
    """The layout of second derivatives of rows with a target per class. ``operands`` are as in `dense_layout`, and
    ``directions`` are those of the logits and of the targets, None for an operand that has none.
    """
    logits, gradients, targets, target_gradients = operands
    rows_of = [logits.strides, gradients.strides, targets.strides, *others, target_gradients.strides]
    sizes, strides = merge(shape, rows_of)
    rows, of_operands = prod(shape), [strides[0], strides[1], strides[2], strides[5]]
    together = classes == 1 or all(x.class_stride == 1 for x in operands)
    # Operands that lie otherwise are shifted, or loaded element by element.
    results = (gradients, target_gradients)
    vec_size = _second_vector(classes, sizes, (strides[1], strides[5]), results) if together else 1
    edges = not _whole(classes, vec_size, results, sizes, (strides[1], strides[5]))
    kind, width, threads, cluster = _read_again(rows, classes, vec_size, together, chip, edges, SECOND_DENSE_CLASSES)
    moved, shared, per_thread = [x for x in directions if x], 0, 0
    packed = None
    if classes <= FEW_CLASSES and together:
        packed = _packed_dense(rows, classes, (*operands, *moved), sizes, of_operands, False, len(moved))
    if packed:
        kind, width, per_thread = "staged_packed_rows", 1, classes
        vec_size, threads, shared = packed
    per_block, units = _workers(kind, rows, width, threads)
    apart = [x.class_stride for x in (logits, gradients, targets)]
    words = space_words(rows, classes, (*apart, 0, 0, target_gradients.class_stride), sizes, strides)
    vec_size = 1 if kind == "thread_per_row_two_pass" else vec_size
    return RowLayout(
        kind, vec_size, width, threads, _chunks(units), per_block, shared, space_rank(rows, sizes), words, cluster,
        per_thread=per_thread,
    )  # fmt: skip


def register_second_layout(
    shape: Sequence[int],
    classes: int,
    operands: Sequence[RowStrides],
    others: Sequence[Sequence[int]],
    directions: RowStrides,
) -> RowLayout | None:
    """The layout of such rows in registers, if only the logits have ``directions`` and gradients; None for rows that do
    not fit, and for those that warps move together.
    """
    logits, gradients, targets, target_gradients = operands
    rows_of = [logits.strides, gradients.strides, targets.strides, *others, target_gradients.strides]
    sizes, strides = merge(shape, rows_of)
    rows, results, shares = prod(shape), (gradients,), classes > 1
    shares = shares and all(x.class_stride == 1 for x in (logits, gradients, targets, directions))
    vec_size, edges, shifted = 1, False, False
    if shares:
        of_operands = [strides[0], strides[1], strides[2], strides[5]]
        given = rows, classes, (*operands, directions), sizes, of_operands
        if classes <= SECOND_STAGED_CLASSES and _packed_dense(*given, False, 1):
            return None
        vec_size = min(_second_vector(classes, sizes, strides[1:2], results), 16 // targets.itemsize)
        edges = not _whole(classes, vec_size, results, sizes, strides[1:2])
        shifted = _alike(sizes, strides[:3], (logits, gradients, targets, directions)) < vec_size
    apart = [x.class_stride for x in (logits, gradients, targets)]
    words = space_words(rows, classes, (*apart, 0, 0, target_gradients.class_stride), sizes, strides)
    size = max(logits.itemsize, targets.itemsize)
    if not shares and classes > _second_alone(size):
        in_columns = second_in_columns(rows, classes, size, 1)
        return _second_column_layout(rows, classes, sizes, words, size, True) if in_columns else None
    return _register_layout(rows, classes, sizes, words, vec_size, size, edges, shifted, SECOND_LANE_CLASSES, shares)


def second_in_columns(rows: int, classes: int, itemsize: int, least: int) -> bool:
    """True of rows of ``least`` classes or more whose second derivatives the warps of a block share where they lie."""
    most = SECOND_COLUMN_WARPS[itemsize] * SECOND_COLUMN_CLASSES[itemsize]
    return rows >= SECOND_COLUMN_ROWS and least <= classes <= most


def _second_column_layout(
    rows: int, classes: int, sizes: Sequence[int], words: list[int], itemsize: int, heavy: bool
) -> RowLayout:
    """The layout of such rows, ``heavy`` ones with smoothing or a target per class: as many blocks are resident as can
    be, of as few warps, which have less to exchange. Precondition: `second_in_columns`.
    """
    fewest = max(2, -(-classes // SECOND_COLUMN_CLASSES[itemsize]))

    def blocks(warps: int) -> int:
        return second_column_blocks(warps, -(-classes // warps), itemsize, heavy)

    warps = max(range(fewest, SECOND_COLUMN_WARPS[itemsize] + 1), key=blocks)
    per_thread, threads = -(-classes // warps), warps * WARP
    return RowLayout(
        "register_rows", 1, 1, threads, _chunks(-(-rows // WARP)), 1, 0, space_rank(rows, sizes), words,
        resident=blocks(warps) * threads, per_thread=per_thread, warps=warps, partial=classes != warps * per_thread,
    )  # fmt: skip


def second_column_blocks(warps: int, per_thread: int, itemsize: int, heavy: bool) -> int:
    """Blocks of a multiprocessor whose warps share such rows, each with so many classes of a row."""
    registers = SECOND_COLUMN_REGISTERS[heavy] + SECOND_CLASS_REGISTERS[heavy] * per_thread
    if itemsize == 8:
        registers = SECOND_DOUBLE_REGISTERS
    # Each quarter of a multiprocessor has 512 registers a lane, and gives them to warps by eight.
    return 4 * (512 // (-(-registers // 8) * 8)) // warps


def _register_layout(
    rows: int,
    classes: int,
    sizes: Sequence[int],
    words: list[int],
    vec_size: int,
    itemsize: int,
    edges: bool,
    shifted: bool,
    few: int,
    shares: bool = True,
) -> RowLayout | None:
    """The layout of rows of second derivatives in registers, which lanes share or take alone; None if they do not fit.
    A lane takes ``few`` classes as long as there are others.
    """
    width, per_thread = 1, classes
    if shares:
        vectors, lanes = classes // vec_size, -(-classes // min(few, SECOND_LANE_BYTES // itemsize))
        width = min(WARP, power_of_two(max(lanes, 2 * (vec_size - 1) * edges)))
        while width < WARP and rows * width < SECOND_THREADS and vectors > width:
            width *= 2
        per_thread = max(1, -(-vectors // width))
    if per_thread * vec_size > (SECOND_LANE_MOST[itemsize] if shares else _second_alone(itemsize)):
        return None
    partial = edges or classes != width * per_thread * vec_size
    threads = SECOND_REGISTER_THREADS
    while threads > WARP and rows * width < SECOND_BLOCKS * threads:
        threads //= 2
    per_block, units = _workers("subwarp", rows, width, threads)
    return RowLayout(
        "register_rows", vec_size, width, threads, _chunks(units), per_block, 0, space_rank(rows, sizes), words,
        resident=second_resident(per_thread, vec_size, itemsize), per_thread=per_thread, shifted=shifted,
        edges=int(edges), partial=partial,
    )  # fmt: skip


def _second_alone(itemsize: int) -> int:
    """Classes that lie apart of a row of second derivatives that a thread takes to registers alone, at most."""
    return SECOND_APART_CLASSES // max(1, itemsize // 4)


def second_resident(per_thread: int, vec_size: int, itemsize: int) -> int:
    """Threads of a multiprocessor of which each has so many vectors of a row in registers, for second derivatives."""
    lane = per_thread * (vec_size * itemsize if vec_size > 1 else max(4, itemsize))
    return 1024 if lane <= 16 else 768 if lane <= 32 else 512 if lane <= 64 else 384


def _second_vector(
    classes: int, sizes: Sequence[int], strides: Sequence[Sequence[int]], results: Sequence[RowStrides]
) -> int:
    """Elements of a vector of the results of second derivatives."""
    return _without_edges(classes, _alike(sizes, strides, results), results, sizes, strides, SECOND_EDGES)


def _without_edges(
    classes: int,
    vec_size: int,
    tensors: Sequence[RowStrides],
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    least: int,
) -> int:
    """Elements of a vector of which a row has ``least``, or of which it consists: with single elements at its ends a
    short row takes many lanes, most of which have nothing to do.
    """
    while vec_size > 1 and classes < least * vec_size and not _whole(classes, vec_size, tensors, sizes, strides):
        vec_size //= 2
    return vec_size


def _read_again(
    rows: int, classes: int, vec_size: int, together: bool, chip: Chip | None, edges: bool, few: int = FEW_CLASSES
) -> tuple[str, int, int, int]:
    """Kind, threads that share a row, and threads of a block and blocks of a cluster, where nothing stays on chip. Few
    rows are shared by more threads. If rows have ``edges``, each element there is one thread's. A thread takes rows of
    ``few`` classes alone.
    """
    few = few if rows >= MANY_ROWS else min(few, SECOND_FEW_CLASSES)
    if classes <= few or not (together or rows * classes <= SECOND_APART):
        return "thread_per_row_two_pass", 1, THREADS, 1
    vectors, each, cluster = -(-classes // vec_size), VECTORS, 1
    while each > SECOND_VECTORS and rows * vectors < SECOND_THREADS * each:
        each //= 2
    width = power_of_two(max(1, 2 * (vec_size - 1) * edges, -(-vectors // each)))
    if width <= WARP:
        threads = THREADS
        while threads > WARP and rows * width < SECOND_BLOCKS * threads:
            threads //= 2
        return "subwarp", width, threads, 1
    width = min(width, THREADS)
    most = 1 if chip is None or not chip.clusters else MAX_CLUSTER
    while cluster < most and rows * cluster < 4 * MANY_BLOCKS and vectors >= 2 * cluster * width * SECOND_VECTORS:
        cluster *= 2
    return "block", width, width, cluster


def _workers(kind: str, rows: int, width: int, threads: int) -> tuple[int, int]:
    """Teams of a block, and how many there are to be."""
    return (1, rows) if kind == "block" else (threads // WARP, -(-rows // (WARP // width)))


def _chunks(units: int, most: int = MAX_CHUNKS) -> int:
    """Partial sums of so many tiles. Each ends with a sum over a warp, and the last block adds them while the GPU
    waits.
    """
    return max(1, min(units, most))


def _most_chunks(resident: int) -> int:
    """The most partial sums where so many threads of a multiprocessor are resident."""
    return WARP_CHUNKS if resident <= WARP_CHUNKS_RESIDENT else MAX_CHUNKS


def space_words(
    rows: int, classes: int, class_strides: Sequence[int], sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> list[int]:
    """``RowSpace`` of ``kernels/softmax/rows.cuh``."""
    rank = space_rank(rows, sizes)
    inverse = inverse_words(sizes[0]) if rank == 2 else []
    return [*inverse, rows, classes, *class_strides, *dimension_words(sizes, strides, rank)]


def space_rank(rows: int, sizes: Sequence[int]) -> int:
    """Dimensions that a ``RowSpace`` has room for. Two of them are divided by multiplication, see ``InnerDivision``."""
    return 1 if len(sizes) == 1 else 2 if len(sizes) == 2 and rows < 1 << 31 else MAX_RANK


def inverse_words(size: int) -> list[int]:
    """Multiplier and shift that divide numbers below 2^31 by ``size``."""
    shift = 31 + (size - 1).bit_length()
    return [-(-(1 << shift) // size), shift]


def label_words(
    shape: Sequence[int], classes: int, labels: Sequence[int], mask: Sequence[int]
) -> tuple[int, list[int]]:
    """Rank and words of the space of labels and mask alone, which merge where logits do not."""
    sizes, strides = merge(shape, [labels, mask])
    nowhere = (0,) * len(sizes)
    streams = [nowhere, nowhere, *strides, nowhere, nowhere]
    return space_rank(prod(shape), sizes), space_words(prod(shape), classes, (0,) * len(streams), sizes, streams)


def blocks(layout: RowLayout, chunks: int, processors: int, gradient: bool = True) -> int:
    """The blocks for so many chunks: as many as run at once, and no more than there is work for."""
    usable = processors
    if layout.cluster > 2:
        # Clusters do not cross the parts that a GPU is made of, of which each has some multiprocessors left over: so
        # many are of use on a GPU of 132.
        usable = max(1, processors * 17 // 20 if layout.cluster == ODD_CLUSTER else processors * 10 // 11)
    at_once = max(1, usable * _at_once(layout, gradient and layout.prefetch) // layout.cluster)
    return max(1, min(layout.slices or -(-chunks // layout.per_block), at_once)) * layout.cluster


def _at_once(layout: RowLayout, half: bool) -> int:
    """Blocks that a multiprocessor runs at once, or half of them, as far as it is known without compiling: it has some
    227 KiB of shared memory.
    """
    return max(1, min(layout.resident // (2 if half else 1) // layout.threads, _room(layout.shared)))


def _room(shared: int) -> int:
    """Blocks of so many bytes for which a multiprocessor has shared memory."""
    return (227 << 10) // (shared + 3072) if shared else 2048


def thread_per_row_blocks(threads: int, shared: int, crowded: bool = False) -> int:
    """Blocks of a multiprocessor whose threads take neighbouring rows alone. Where shared memory has room for few
    threads, these may have more registers; so may those that are ``crowded``.
    """
    return max(1, min((CROWDED_RESIDENT if crowded else THREAD_PER_ROW_RESIDENT) // threads, _room(shared)))


def _resident(kind: str, vec_size: int, blocks: int, edges: int) -> int:
    """Threads that a multiprocessor has registers for, or works best with."""
    if kind == "subwarp":
        return subwarp_blocks(edges) * SUBWARP_BLOCK_THREADS
    if kind == "thread_per_row" and vec_size > 1:
        return THREAD_PER_ROW_RESIDENT
    if kind == "block":
        return blocks * BLOCK_THREADS
    return RESIDENT_THREADS if kind == "two_pass" else 2048


def vector_size(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], logits: RowStrides, gradients: RowStrides, together: bool
) -> int:
    """Elements that can be moved at once: 16 bytes, where logits and gradients lie alike.

    Rows may begin anywhere, but the gradients of one have to be as far from an aligned address as its logits are.
    """
    most = 16 // logits.itemsize
    for vec_size in (x for x in (8, 4, 2) if x <= most):
        if together:
            beside = logits.misalignment == gradients.misalignment
            if beside and all(
                (a - b) % vec_size == 0 for a, b, n in zip(strides[0], strides[1], sizes, strict=True) if n > 1
            ):
                return vec_size
            continue
        step = vec_size * logits.itemsize
        outer = [x for s in strides[:2] for x in (*s[1:],)] + [logits.class_stride, gradients.class_stride]
        unit = strides[0][0] == strides[1][0] == 1 and sizes[0] % vec_size == 0
        if (
            unit
            and not (logits.misalignment % step or gradients.misalignment % step)
            and not any(x % vec_size for x in outer)
        ):
            return vec_size
    return 1


def _alike(sizes: Sequence[int], strides: Sequence[Sequence[int]], tensors: Sequence[RowStrides]) -> int:
    """Elements of all these tensors that can be moved at once, 16 bytes of the widest: they have to be equally far from
    an aligned address in every row.
    """
    for vec_size in (x for x in (8, 4, 2) if x <= 16 // max(y.itemsize for y in tensors)):
        phases = {x.misalignment // x.itemsize % vec_size for x in tensors}
        first, *rest = strides
        steps = [(a - b) % vec_size for s in rest for a, b, n in zip(first, s, sizes, strict=True) if n > 1]
        if len(phases) == 1 and not any(steps):
            return vec_size
    return 1


def _stage(vectors: int, count: int) -> int:
    """Vectors of each thread that are in shared memory."""
    return max(1, -(-vectors // count))


def _whole(
    classes: int,
    vec_size: int,
    tensors: Sequence[RowStrides],
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
) -> bool:
    """True if all rows begin and end with a vector."""
    starts = [x.misalignment % (vec_size * x.itemsize) for x in tensors]
    steps = [x % vec_size for s in strides for x, n in zip(s, sizes, strict=True) if n > 1]
    return classes % vec_size == 0 and not any(starts + steps)


def _on_chip(
    classes: int,
    vec_size: int,
    vector: int,
    rows: int,
    chip: Chip,
    threads: tuple[int, int],
    each: int,
    part: int,
    edges: int = 1,
    kept: int = 0,
    longest: int = 0,
) -> tuple[str, int, int, int]:
    """Kind, threads of a block that share a row, threads and blocks of a cluster, for classes that are neighbours. A
    vector has so many bytes, or ``kept`` ones in a warp's row if that is more, and a thread of a block takes ``each``
    of them. Blocks whose lanes share rows, and those that share a row, have up to so many threads; one of these takes
    ``part`` bytes where others can take the rest. Of single elements at the ends of rows, if there are any, each thread
    takes up to ``edges``. Of many longer rows a lane of a warp takes ``longest`` vectors, if that is not 0.
    """
    most, at_most = threads[0], min(threads[1], chip.threads)
    # The last class of 257 is no vector of its own.
    vectors = classes // vec_size if edges > 1 else -(-classes // vec_size)
    # A warp takes many rows that are longer, too.
    usual = WARP_VECTORS_EDGES if edges > 1 else WARP_VECTORS if edges else WARP_VECTORS_WHOLE
    of_lane = WARP_VECTORS if rows < MANY_ROWS or vectors <= WARP * WARP_VECTORS else longest or usual
    width = power_of_two(max(1, -(-2 * (vec_size - 1) // edges) if edges else 0, -(-vectors // of_lane)))
    few, room = rows <= MANY_BLOCKS // 2, chip.shared - DECLARED_BYTES
    if width <= WARP and not (few and vectors > 2 * WARP):
        while width < WARP and vectors > LEAST_VECTORS * width and rows * width < FEW_LANES:
            width *= 2
        while edges and width < 2 * (vec_size - 1) and rows * width < MANY_LANES:
            width *= 2
        of_thread = _stage(classes // vec_size, width) * max(vector, kept)
        return "subwarp", width, max(WARP, min(most, 1 << (room // of_thread).bit_length() - 1)), 1
    cluster, part = 1, min(part, room)
    while chip.clusters and cluster < MAX_CLUSTER:
        # More blocks if there are few rows, and enough for each thread to do.
        if vectors * vector <= part * cluster and not (
            rows * cluster * 2 <= MANY_BLOCKS and vectors > cluster * at_most
        ):
            break
        cluster *= 2
    count = max(2 * WARP, min(power_of_two(-(-vectors // ((1 if few else each) * cluster))), at_most))
    if _stage(classes // vec_size, count * cluster) * count * vector <= room:
        return "block", count, count, cluster
    while cluster > 1 and rows * cluster > 2 * MANY_BLOCKS:
        cluster //= 2
    return "two_pass", chip.threads, chip.threads, cluster


def without_gaps(classes: int, sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """True if rows of so many classes follow each other."""
    return _evenly_apart(classes, sizes, strides)


def thread_per_row_threads(classes: int, vec_size: int, itemsize: int) -> int:
    """Threads of a block of which each keeps so many rows in shared memory; fewer than the least if they do not fit."""
    fits = SHARED_BYTES // max(1, classes * vec_size * itemsize)
    return min(THREADS if vec_size == 1 else THREAD_PER_ROW_THREADS, power_of_two(fits + 1) // 2)


def _thread_per_row(classes: int, vec_size: int, itemsize: int) -> tuple[int, int, int]:
    """Lanes, threads of a block and bytes of shared memory, for classes that lie apart. Precondition: a row fits."""
    vec_size = min(vec_size, ROWS_PER_THREAD)
    while vec_size * itemsize >= 4 or vec_size == 1:
        threads = thread_per_row_threads(classes, vec_size, itemsize)
        if threads >= THREAD_PER_ROW_THREADS_MIN:
            return vec_size, threads, classes * vec_size * itemsize * threads
        if vec_size == 1:
            break
        vec_size //= 2
    raise ValueError(f"cupylosses: rows of {classes} classes that lie apart are copied first")
