"""Launch geometry of the softmax engine: which threads process which rows. Pure functions of integers.

Layouts (`RowLayout.kind`). "Strided classes" means that the classes of a row are not contiguous in memory.

subwarp                    neighbouring lanes of a warp share a row, which stays in shared memory
block                      a block, or a cluster of blocks, shares a row, which stays in shared memory
two_pass                   as block, for rows too long for shared memory: they are read twice
windowed                   as block, for long rows with dense targets: shared memory holds a part of them, and each pass
                           reads the rest
thread_per_row             one thread per row (or per few neighbouring rows), for strided or few classes; in shared
                           memory
thread_per_row_packed      one thread per row of few contiguous classes; a warp moves its 32 rows together
interleaved_rows           as thread_per_row, for many rows that no vector divides: the rows of a thread are a warp
                           apart, or in 16 bits are pairs of neighbours
packed_rows                as thread_per_row_packed, for many rows: they are held in registers, and the number of
                           classes is a compile-time constant. Logits may have small gaps between rows and between
                           classes
columns                    many rows of few strided classes: a lane holds neighbouring rows in registers. Dense targets
                           with more classes: the warps of a block share 32 rows in shared memory
column_tiles               many rows of more strided classes: the warps of a block, or of a cluster, share neighbouring
                           rows, which stay in shared memory
column_slices              rows of even more strided classes, or few rows of many: blocks divide the classes of
                           neighbouring rows among themselves and read them twice
thread_per_row_two_pass    second derivatives: one thread per row, which it reads again from memory
staged_thread_per_row      second derivatives of few strided classes: one thread per row, logits and tangents in shared
                           memory
staged_packed_rows         second derivatives of many rows of few contiguous classes: one thread per row, a warp moves
                           its 32 rows together
register_rows              second derivatives of rows that lanes of a warp hold in registers; of strided classes, the
                           warps of a block share 32 neighbouring rows. With dense targets only those with respect to
                           the logits; a lane then also processes a row of few strided classes alone
label_only                 log-probabilities: only the label's class is read
label_only_tiles           gradients without gaps: warps write tiles of them, regardless of row boundaries
label_only_few             as label_only_tiles, for few rows: a single warp adds up their losses
label_only_sparse          large gradients that are cleared beforehand: a lane processes some rows, and writes the
                           gradients of their labels only
label_only_rows            short rows: a lane processes some of them, and its warp writes their gradients together
label_only_columns         strided classes: a lane processes neighbouring rows; the classes of long rows are cut into
                           slices for several warps

Rows of strided classes are read in place only where that is fast (`copied`); all others are first copied so that their
classes are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from cupylosses.engines.strides import MAX_RANK, dense_strides, dimension_words, merge, power_of_two
from cupylosses.jit.gpu import DECLARED_BYTES, SECTOR_BYTES, SHARED_BYTES, WARP, Chip

#: Vectors of a row per lane, in rows that lanes of one warp share. The fixed cost of a row, apart from its logits, is
#: paid by each warp, so a lane processes this many before more lanes share the row.
WARP_VECTORS = 8
#: Vectors of a row per thread, in pipelined rows and in rows that do not stay on chip.
VECTORS = 8
#: Maximum number of vectors per thread in rows that a block holds on chip, before a row gets twice as many threads.
BLOCK_VECTORS = 12
#: WARP_VECTORS for many rows that would otherwise need more than a warp: rows of whole vectors, or shifted rows.
WARP_VECTORS_WHOLE = 16
#: WARP_VECTORS for such rows with edge elements (single elements before the first and after the last vector).
WARP_VECTORS_EDGES = 12
#: Minimum number of vectors of a row per lane.
LEAST_VECTORS = 2
#: Number of vectors per lane down to which more lanes share a row so that neighbouring lanes read more of it at once.
LANE_VECTORS = 4
#: Number of lanes, over all rows, below which a lane processes fewer than WARP_VECTORS vectors: with few rows most of
#: the GPU would be idle.
FEW_LANES = 1 << 15
#: Maximum number of contiguous classes that one thread processes alone: more threads per row would have too little
#: work.
FEW_CLASSES = 32
#: FEW_CLASSES for at most LANE_ROWS rows: these are too few to hide a longer loop over classes, so lanes share it.
LANE_CLASSES = 4
#: Maximum number of rows to which LANE_CLASSES applies.
LANE_ROWS = 4096
#: FEW_CLASSES for fewer than MANY_ROWS rows with dense targets: in general, and for at most DENSE_FEW_ELEMENTS
#: elements.
DENSE_ALONE, DENSE_ALONE_FEW = 24, 4
#: Maximum number of elements to which DENSE_ALONE_FEW applies.
DENSE_FEW_ELEMENTS = 1 << 16
#: Maximum number of neighbouring rows of strided classes that a thread processes together.
ROWS_PER_THREAD = 4
#: Minimum number of threads of a block with one thread per row.
THREAD_PER_ROW_THREADS_MIN = 64
#: Bytes of a vector from which on lanes share rows that have small gaps, and rows with dense targets are not shifted.
SHIFTED_BYTES = 8
#: Maximum distance in elements between neighbouring rows that a warp reads as columns: at least half of each cache line
#: is used.
NEAR = 2
#: Maximum distance in elements between neighbouring rows that a lane reads to registers as columns.
NEAR_COLUMNS = 4
#: Number of elements (rows times classes) from which on such rows of two operands are copied although they are near, if
#: they have more classes than a lane holds in registers.
SPREAD_ELEMENTS = 1 << 21
#: Bytes of a row of log-probabilities below which a lane processes whole rows.
LABEL_ONLY_ROW_BYTES = 256
#: Maximum bytes of the rows that such a lane processes together, unless it is a single row.
LABEL_ONLY_LANE_BYTES = 192
#: Maximum number of rows of log-probabilities that a lane processes together.
LABEL_ONLY_ROWS = 2
#: Threads that a multiprocessor has registers for if its lanes process rows of log-probabilities.
LABEL_ONLY_RESIDENT = 1024
#: Minimum number of warps that strided log-probabilities are spread over, as long as each warp has at least
#: LABEL_ONLY_SLICE classes.
LABEL_ONLY_WARPS = 1 << 11
#: Minimum number of classes of a slice of strided log-probabilities.
LABEL_ONLY_SLICE = 32
#: Tiles of gradients, as (bytes, vectors): for rows of fewer bytes, a lane stores so many vectors of a tile.
LABEL_ONLY_TILES = ((2048, 16), (1 << 63, 64))
#: Threads that a multiprocessor runs at once in layouts that write tiles of gradients.
LABEL_ONLY_TILE_RESIDENT = 512
#: Minimum number of vectors of a tile per lane.
LABEL_ONLY_LEAST_VECTORS = 4
#: Number of tiles below which a lane stores fewer vectors: one warp per multiprocessor would still write long after the
#: others have finished.
LABEL_ONLY_MANY_TILES = 1 << 10
#: Minimum bytes of gradients of contiguous classes that are cleared beforehand, so that the kernel writes only the
#: gradients of labels.
SPARSE_BYTES = 1 << 27
#: SPARSE_BYTES for strided classes whose neighbouring rows form no vectors, or do not consist of whole sectors.
SPARSE_APART_BYTES = 1 << 24
#: Minimum bytes of a row to which SPARSE_BYTES applies: each label writes a sector of its own.
SPARSE_ROW_BYTES = 1 << 10
#: Minimum bytes of a row to which SPARSE_APART_BYTES applies, for the same reason.
SPARSE_APART_ROW_BYTES = 1 << 8
#: Maximum number of rows of log-probabilities whose losses a single warp adds up.
LABEL_ONLY_FEW = 2 * WARP
#: Maximum number of partial sums of longer rows of log-probabilities: a warp that writes several tiles for one partial
#: sum is slower by up to a half.
LABEL_ONLY_CHUNKS = 1 << 16
#: Vectors that a thread loads together, of a row that does not stay on chip.
TWO_PASS_VECTORS = 4
#: Maximum number of vectors of logits, and as many of targets, per thread with dense targets, before a row gets more
#: threads. A row costs a thread as much as one or two of them.
DENSE_VECTORS = 10
#: Bytes of both operands that the lanes of a row read at once, if they have enough vectors. With half of it, rows of
#: 128 classes in float32 take up to a quarter longer.
DENSE_BYTES_AT_ONCE = 256
#: Minimum number of vectors of a row with dense targets that has edge elements; with fewer, vectors are narrower.
DENSE_EDGES = 32
#: TWO_PASS_VECTORS for dense targets.
TWO_PASS_DENSE_VECTORS = 2
#: Maximum number of blocks of a cluster: as many as every GPU with clusters can run at once.
MAX_CLUSTER = 8
#: Alternative to MAX_CLUSTER: slightly more of these clusters run at once.
ODD_CLUSTER = 7
#: Clusters that run at once, by blocks of a cluster, with one, two or three blocks on each of the 132 multiprocessors
#: of an H200, as its driver reports.
CLUSTERS_AT_ONCE = {7: (16, 32, 47), 8: (15, 30, 45)}
#: Number of blocks that few rows are spread over.
MANY_BLOCKS = 128
#: Threads that a multiprocessor has registers for, in kernels of long rows.
RESIDENT_THREADS = 1024
#: Threads that a multiprocessor has registers for if each processes neighbouring rows.
THREAD_PER_ROW_RESIDENT = 640
#: THREAD_PER_ROW_RESIDENT for crowded kernels, whose threads take more registers (`thread_per_row_blocks`).
CROWDED_RESIDENT = 512
#: Maximum number of threads of a block of these: more would spill registers.
THREAD_PER_ROW_THREADS = 128
#: Maximum number of rows of which every warp counts the labels itself, which saves a separate launch.
SELF_COUNTING_ROWS = 1024
#: Rows that one warp of the separate launch processes; also the maximum number of rows of which every warp adds the
#: weights of the labels itself. The sum then has the same bits as in the separate launch, where one warp processes all
#: these rows.
COUNTED_AT_ONCE = 8 * WARP
#: Maximum bytes of a row per block, if a cluster can hold the rest of the row. With dense targets only if two blocks
#: then suffice, because blocks of a multiprocessor hide each other's barriers.
PART_BYTES = 65 << 10
#: Maximum bytes of a row with dense targets, both operands together, that is held on chip as a whole.
DENSE_BLOCK_BYTES = 2 * PART_BYTES
#: DENSE_BLOCK_BYTES for elements of 4 bytes and more, whose places the numbers of a pass can take, and for affine terms
#: if rows nearly fill a cluster of four blocks. FULL_CLUSTER: how much of it they fill then.
DENSE_CLUSTER_BYTES, FULL_CLUSTER = 4 * PART_BYTES, 0.9
#: Minimum number of longer rows of which a window is held: fewer are spread over clusters of eight blocks.
WINDOWED_ROWS = 64
#: Vectors of both operands in the window of a thread, for blocks of 256 threads.
WINDOW = 8
#: Bytes of a row per block of a cluster if the term is affine in log p, and thus bound by memory.
WINDOWED_PART_BYTES = 160 << 10
#: Maximum number of rows that are shared by pairs of blocks if the term is not affine: more keep a GPU busy without.
WINDOWED_PAIRS = 2048
#: Maximum number of rows that are shared by pairs of blocks if the term is affine.
WINDOWED_FEW = 1023
#: Maximum number of rows with larger blocks, as many as an H200 runs at once, and with pairs of these.
WINDOWED_LARGE_BLOCKS, WINDOWED_LARGE_PAIRS = 264, 191
#: Maximum number of threads of a block that shares a row of logits.
BLOCK_THREADS = 512
#: Number of these blocks that a multiprocessor has registers for, if blocks wait for others of a cluster or compute
#: more than a loss.
BLOCK_BLOCKS = 3
#: BLOCK_BLOCKS for other blocks.
PLAIN_BLOCKS = 2
#: Maximum bytes of a row for which the next row is prefetched into L2, and half as many blocks run.
PREFETCH_BYTES = 16 << 10
#: Threads that a multiprocessor can run at once for streamed rows (without gradients, not kept on chip), by the number
#: of vectors that a thread loads together.
STREAMED_THREADS = {8: 640, 16: 512}
#: Minimum number of threads that would share such a row otherwise.
STREAMED_WIDTH = 512
#: Minimum number of such rows: as many as fill a GPU without several blocks per row. STREAMED_FEW_ROWS is that of rows
#: of more than STREAMED_LONG bytes, of which a block shared by a cluster waits longer than a larger block.
STREAMED_ROWS, STREAMED_FEW_ROWS, STREAMED_LONG = 256, 96, 128 << 10
#: Maximum number of threads of all rows together for which blocks get more threads: one block for each of the 132
#: multiprocessors of an H200, two of half as many threads, and so on.
STREAMED_LANES = 132 * BLOCK_THREADS
#: Threads that a multiprocessor runs at once for pipelined rows (short rows of 32-bit elements without gradients, in
#: registers) that are shared by at most a warp. In 16 bits shared memory is faster.
PIPELINED_THREADS = 384
#: PIPELINED_THREADS for rows that several warps share.
PIPELINED_SHARED_THREADS = 512
#: Minimum number of pipelined rows.
PIPELINED_ROWS = 1 << 14
#: Minimum number of threads that share a pipelined row.
PIPELINED_LANES = 4
#: Maximum number of threads that share a pipelined row.
PIPELINED_LANES_MOST = 128
#: Threads of a block whose lanes share rows.
SUBWARP_BLOCK_THREADS = 128
#: Number of these blocks that a multiprocessor has registers for: with fewer registers per thread they spill, and each
#: reload waits for memory.
SUBWARP_BLOCKS = 8
#: SUBWARP_BLOCKS if a lane has more than two edge elements of a row.
MANY_EDGES_BLOCKS = 7
#: Number of blocks of THREADS threads that a multiprocessor has registers for, in kernels of 16-bit gradients with
#: dense targets whose lanes share rows. Without the bound the compiler may take a few registers more, which leave room
#: for only two blocks.
DENSE_SUBWARP_BLOCKS = 3
#: DENSE_SUBWARP_BLOCKS for mixtures of two softmaxes. Without the bound the compiler may take registers that leave room
#: for only one block.
HEAVY_SUBWARP_BLOCKS = 2
#: Number of such blocks in kernels of two softmaxes in 16 bits with one thread per row, if the derivative of the term
#: is the gradient.
DENSE_ALONE_BLOCKS = 4
#: Maximum number of edge elements of a row per lane, if there are at least MANY_LANES lanes. As few lanes as that
#: allows share a short row, so that a warp has many rows in flight.
LANE_EDGES = 4
#: Number of lanes from which on there are more than a GPU runs at once.
MANY_LANES = 1 << 17
#: Number of rows from which on a kernel for each number of classes is worth its compilation.
MANY_ROWS = 1 << 14
#: Maximum number of strided classes that a thread processes alone if rows are few, by bytes of a logit: it processes
#: classes one by one, and loads those of 16 bits a few at a time.
APART_CLASSES = {2: 48, 4: 80, 8: 80}
#: HEAVY_TERM_ROWS: number of rows with dense targets, by bytes of the widest operand, below which lanes share rows
#: whose term takes many instructions, because a thread alone evaluates one class after another. Rows of strided classes
#: are copied for that. HEAVY_TERM_CLASSES: maximum number of 32-bit classes, strided in both operands, for which one
#: thread takes no longer than copies and lanes. HEAVY_VALUE_ROWS: number of 64-bit rows from which on copies take
#: longer, if no gradient is written.
HEAVY_TERM_ROWS, HEAVY_TERM_CLASSES, HEAVY_VALUE_ROWS = {2: 0, 4: MANY_ROWS, 8: 1 << 62}, 8, 1 << 15
#: Minimum number of strided classes, in rows with gaps and dense targets, that are copied so that wider words are
#: moved.
WORD_CLASSES = 16
#: Minimum number of rows of few classes that are copied if there are gaps between them.
PADDED_ROWS = 1 << 13
#: Maximum number of classes of two operands that are copied for that reason, by bytes of an element and by whether
#: threads exchange more than once per row.
PADDED_CLASSES = {(2, False): 112, (2, True): 112, (4, True): 88}
#: Maximum number of contiguous classes of a row in the registers of one lane.
PACKED_CLASSES = 112
#: PACKED_CLASSES in 16 bits.
PACKED_CLASSES_NARROW = 160
#: PACKED_CLASSES for rows of whole vectors: few lanes of a warp share longer ones well.
PACKED_CLASSES_WHOLE = 72
#: Maximum number of classes of a row that a lane keeps in registers if more than a loss is computed: ``kMaxKept`` of
#: ``kernels/softmax/register_rows.cuh``. Longer rows stay in shared memory.
PACKED_CLASSES_HEAVY = 32
#: Number of blocks of a multiprocessor whose lanes hold several rows each, as many as there are chunks for. Without the
#: bound the compiler spills registers to make room for more blocks.
PACKED_BLOCKS = 4
#: Maximum class stride, in elements, of rows with gaps that a warp copies as one stretch, gaps included.
GAP_STEP = 4
#: Maximum ratio of the pitch of these rows to their length: gaps are read for nothing.
GAP_RATIO = 2
#: Maximum bytes of shared memory per warp for these rows: with more, a multiprocessor runs fewer warps.
GAP_BYTES = 24 << 10
#: Threads that a multiprocessor runs for rows of more than PACKED_CLASSES_HEAVY classes, which stay in shared memory.
ROLLED_RESIDENT = 640
#: Maximum number of registers for the columns of a lane.
COLUMN_REGISTERS = 64
#: Maximum number of classes of columns that a lane holds in registers: for more, shared memory is faster.
COLUMN_CLASSES = 8
#: COLUMN_CLASSES in 16 bits if no vector divides the rows.
ODD_COLUMN_CLASSES = 15
#: Minimum number of neighbouring rows that warps process in tiles although no vector divides them: their last tile is
#: not full.
INTERLEAVED_ROWS = 512
#: Maximum number of partial sums of these tiles: an H100 has as many warps, which then process equal numbers of tiles.
INTERLEAVED_CHUNKS = 2640
#: Number of rows from which on a thread processes four rows in 16 bits instead of two: there are then tiles for all of
#: these warps.
MANY_INTERLEAVED = 1 << 17
#: Maximum number of contiguous classes of a row of which a lane holds both operands in registers.
DENSE_PACKED_CLASSES = 16
#: Maximum number of strided classes of such a row.
DENSE_COLUMN_CLASSES = 32
#: Threads of these layouts that a multiprocessor has registers for.
DENSE_REGISTER_RESIDENT = 512
#: Threads of a block whose lanes hold columns in registers.
COLUMN_THREADS = 256
#: Threads that a multiprocessor has registers for in these blocks.
COLUMN_RESIDENT = 512
#: Maximum number of classes of columns, by bytes of a logit, for which a lane that processes one row at a time leaves
#: registers for half as many threads again.
LIGHT_COLUMN_CLASSES = {2: 15, 4: 5, 8: 0}
#: Maximum number of partial sums of these columns: as many as an H100 has warps.
LIGHT_COLUMN_CHUNKS = 3168
#: Number of rows from which on LIGHT_COLUMN_CHUNKS applies.
MANY_COLUMNS = 1 << 20
#: Values of contiguous classes that a lane processes at once, of several rows if there are fewer classes.
PACKED_VALUES = 8
#: Maximum number of these rows.
PACKED_ROWS = 4
#: Maximum number of threads of a block of packed rows.
PACKED_THREADS = 128
#: Warps of a block that share a tile of columns.
TILE_WARPS = 8
#: Maximum bytes of shared memory of a block, if a multiprocessor is to run three of them, or two.
TILE_BYTES = (73 << 10, 111 << 10)
#: Minimum bytes of a row that warps share as columns: a block with one thread per row would have few threads.
TILE_ROW_BYTES = 192
#: Number of rows from which on one thread per row keeps a GPU busy.
TILE_MANY_ROWS = 1 << 16
#: TILE_ROW_BYTES for as many rows, by bytes of a logit. Staggered tiles of 16 bits gain from TILE_ROW_BYTES on.
TILE_MANY_ROW_BYTES = {2: 256, 4: 384, 8: 384}
#: Threads that a multiprocessor has registers for in kernels of tiles.
TILE_RESIDENT = 1024
#: Minimum number of rows of tiles that stay in shared memory.
TILE_ROWS = 1 << 10
#: Number of slices of the classes of columns, one per block, unless there are more tiles or too few classes. As many
#: blocks as 132 multiprocessors run at once, on every GPU, because slices determine the order of additions.
SLICES = 2 * 132
#: Warps of a block that processes slices.
SLICE_WARPS = 8
#: Threads of a multiprocessor that process slices: few, so that each has many vectors in flight.
SLICE_RESIDENT = 512
#: Maximum bytes of a vector in slices, by bytes of a logit.
SLICE_BYTES = {2: 4, 4: 8, 8: 8}
#: Minimum number of classes of few rows that are cut into slices.
SLICE_CLASSES = 1 << 10
#: Minimum number of elements of rows that slices read in place, unless they are read again: for fewer, a copy takes
#: less time.
SLICE_ELEMENTS = 1 << 20
#: Minimum number of tiles that SLICE_ELEMENTS or more elements are cut into, as long as each tile contains whole
#: sectors of a class: one block combines the parts of a tile.
SLICE_TILES = 4
#: Maximum bytes of logits to which SLICE_TILES applies. More do not fit into a cache, and narrower tiles would fetch
#: the sectors between again.
SLICE_CACHED_BYTES = 1 << 25
#: Maximum number of rows of a tile if classes begin within sectors: of larger tiles there are too few.
SLICE_ROWS = 128
#: Vectors that a thread has in flight (``kAhead``), each with the minimum number of slices for it.
SLICE_AHEAD = ((16, SLICES), (8, 32), (2, 1))
#: Vectors of doubles that a thread has in flight: more would take too many instructions.
SLICE_DOUBLES_AHEAD = 2
#: Minimum number of vectors of a row per thread for second derivatives.
SECOND_VECTORS = 2
#: Threads of a block that shares a long row for second derivatives. So few rows are then in flight that a cache has
#: room for them until the second pass.
SECOND_LONG_THREADS = 1024
#: Number of threads that keep a GPU busy with second derivatives.
SECOND_THREADS = 1 << 16
#: Classes that a thread loads together for second derivatives, as one or more vectors.
SECOND_CLASSES = 8
#: FEW_CLASSES for second derivatives of fewer than MANY_ROWS rows: a thread waits for memory for each class.
SECOND_FEW_CLASSES = 16
#: Maximum number of classes of rows that warps stage in shared memory for second derivatives, by bytes of a logit.
SECOND_STAGED_LABEL_CLASSES = {2: 96, 4: 64, 8: 32}
#: Minimum number of such rows of more than FEW_CLASSES classes, by bytes of a logit.
SECOND_STAGED_LABEL_ROWS = {2: 1 << 15, 4: 1 << 17, 8: 1 << 17}
#: FEW_CLASSES for second derivatives with dense targets: a thread stages no classes in shared memory.
SECOND_DENSE_CLASSES = 4
#: Minimum number of vectors of a row with edge elements, for second derivatives; with fewer, vectors are narrower.
SECOND_EDGES = 16
#: Minimum number of blocks of warps that share no row: with fewer, larger blocks some multiprocessors have twice as
#: many as others.
SECOND_BLOCKS = 4 * MANY_BLOCKS
#: Classes per lane for second derivatives in registers with dense targets, as long as there are lanes for the rest.
SECOND_LANE_CLASSES = 16
#: SECOND_LANE_CLASSES for class indices, where each lane evaluates the loss of the row.
SECOND_LABEL_CLASSES = 32
#: Maximum bytes of the logits of these classes.
SECOND_LANE_BYTES = 64
#: Maximum number of classes per lane, by bytes of a logit.
SECOND_LANE_MOST = {2: 32, 4: 32, 8: 8}
#: Maximum number of classes of rows with dense targets that warps stage in shared memory instead.
SECOND_STAGED_CLASSES = 16
#: Maximum number of strided classes of a row in registers, in numbers of 4 bytes.
SECOND_APART_CLASSES = 24
#: Maximum number of classes of rows in registers that are read in place whatever their order, with rows or with classes
#: contiguous.
SECOND_ORDER_CLASSES = 8
#: Maximum number of warps of a block that share rows of more strided classes for second derivatives, by bytes of a
#: number.
SECOND_COLUMN_WARPS = {2: 16, 4: 16, 8: 12}
#: Maximum number of classes per warp of such rows, by bytes of a number.
SECOND_COLUMN_CLASSES = {2: 19, 4: 19, 8: 8}
#: Minimum number of such rows.
SECOND_COLUMN_ROWS = 1 << 10
#: Minimum number of classes of such rows with class indices, by bytes of a number. A thread alone keeps rows of fewer
#: classes in shared memory, to which those of 16 bits are copied one by one.
SECOND_LABEL_COLUMNS = {2: 10, 4: 17, 8: 25}
#: Registers of a thread of such a kernel besides its classes; the key is True if labels are smoothed or targets are
#: dense.
SECOND_COLUMN_REGISTERS = {False: 30, True: 36}
#: Registers for each of its classes, by the same key.
SECOND_CLASS_REGISTERS = {False: 3, True: 4}
#: All registers of a thread of such a kernel in float64.
SECOND_DOUBLE_REGISTERS = 168
#: Maximum number of threads of a block for second derivatives in registers, if no warps share a row.
SECOND_REGISTER_THREADS = 128
#: The warps of a block share a tile of 32 rows of strided classes with dense targets if a multiprocessor has shared
#: memory for fewer than this number of tiles.
DENSE_COLUMN_TILES = 16
#: Number of warps that process all tiles of a multiprocessor.
DENSE_COLUMN_WARPS = 24
#: DENSE_COLUMN_WARPS for affine terms in float64.
DENSE_COLUMN_DOUBLE_WARPS = 16
#: Maximum number of warps of a block that share such a tile.
DENSE_COLUMN_MOST = 10
#: Threads that a multiprocessor has registers for in these kernels.
DENSE_COLUMN_RESIDENT = 1024
#: Maximum number of elements whose classes may be strided although lanes share rows: copies of so few take longer.
SECOND_APART = 1 << 16
#: Threads of a block whose warps work independently.
THREADS = 256
#: Layouts whose backward recomputes gradients from the logits, because that reads no more than a residual would.
RECOMPUTED = ("thread_per_row", "interleaved_rows", "packed_rows", "columns", "column_tiles")
#: All layouts in which one thread writes the gradients of whole rows from a residual.
IN_THREADS = ("thread_per_row_packed", *RECOMPUTED)
#: Layouts of log-probabilities whose backward evaluates these again, because a residual of each row would be as large
#: as its gradient, or would be read as often.
RECOMPUTED_LABELS = ("label_only", "label_only_few", "label_only_rows", "label_only_columns")
#: Layouts in which a thread keeps strided rows in shared memory.
STRIDED = ("thread_per_row", "interleaved_rows")
#: Layouts of log-probabilities that warps process in tiles.
IN_TILES = ("label_only_tiles", "label_only_few", "label_only_sparse", "label_only_rows", "label_only_columns")
#: Maximum number of chunks, each with a partial sum and a record of ``grad_output``.
MAX_CHUNKS = 1 << 14
#: Maximum number of partial sums of a divisor.
COUNT_CHUNKS = 1 << 12
#: MAX_CHUNKS if few warps are resident: each then processes one chunk, from tile to tile through all of memory.
WARP_CHUNKS = 1 << 11
#: Maximum number of resident threads of a multiprocessor that count as few.
WARP_CHUNKS_RESIDENT = 704
#: Number of blocks of a multiprocessor that compute the divisor of a mean: with more, a lane has no registers for all
#: the labels that it loads together.
COUNT_BLOCKS = 4
#: Maximum number of tiles of few contiguous classes, of at most 32 bits, for which there are only WARP_CHUNKS partial
#: sums: adding more would take longer than what idle warps lose.
FEW_TILES = 1 << 15


@dataclass(frozen=True)
class RowStrides:
    """Strides of a tensor of rows, in elements: those of the dimensions of the rows, and that of the classes."""

    strides: tuple[int, ...]
    class_stride: int
    itemsize: int
    misalignment: int


@dataclass(frozen=True)
class RowLayout:
    """Geometry of a launch.

    Attributes:
        kind: One of the layouts of this module.
        vec_size: Elements of a vector, along the classes, or over neighbouring rows of strided classes.
        width: Threads of a block that share a row; for layouts that cut classes into slices, the number of slices.
        threads: Threads of a block.
        chunks: Number of chunks of rows that workers claim, each with one partial sum.
        per_block: Workers of a block; 1 if the worker is a block or a cluster.
        cluster: Blocks of a cluster; 1 without clusters.
        shared: Bytes of dynamic shared memory of a block.
        rank, words: Dimensions that fit into the kernel's ``RowSpace``, and its 64-bit words.
        resident: Threads that a multiprocessor runs at once; half as many with gradients if ``prefetch``.
        streamed: Threads of a block that processes a row without gradients in another way (streamed rows); 0 if there
            is no such way.
        streamed_vectors: Vectors of such a row that a thread loads together.
        prefetch: True if the next row is prefetched into L2.
        per_thread: Classes per thread, if rows are in registers or their number is a compile-time constant; vectors per
            lane of second derivatives in registers that lanes share; vectors, or rows, per lane of a tile of
            log-probabilities; vectors that a thread has in flight in slices.
        warps: Warps that share a row, or a tile of rows.
        shifted: True if rows are aligned differently from their gradients. With class indices, vectors of gradients are
            cut out of the vectors of logits in shared memory. With dense targets, operands are shifted on their way to
            shared memory. In interleaved rows of 16 bits: True if rows begin in the other half of a word than their
            gradients.
        gathered: True if strided classes are gathered in shared memory. In interleaved rows of 16 bits: True if some
            rows begin in the same half of a word as their gradients, and others do not.
        turns: Rows that a warp processes one after another in a chunk of pipelined rows; 0 if rows are not pipelined.
        edges: Maximum number of edge elements of a row per thread.
        partial: True if some lanes have fewer than ``per_thread`` classes or vectors.
        lanes: Threads that read a class, if blocks share rows by their classes.
        step: Class stride, in elements, of logits that a warp copies to shared memory together with their gaps; 0 for
            other layouts. In interleaved rows of 16 bits: 1 if all classes begin in the same half of a word, 2 if every
            second class does.
        padded: True if rows that are copied with their gaps get 16 more bytes in shared memory.
        staggered: True if vectors of neighbouring rows begin at other rows in some classes than in others; in columns,
            if the rows of a lane are a warp apart for that reason.
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
    streamed_vectors: int = 0
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
    staggered: bool = False

    @property
    def slices(self) -> int:
        """Number of slices of the classes of all tiles that blocks share; 0 for other layouts."""
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
    """Returns the layout of rows of a given shape with class indices.

    Args:
        others: Strides of labels, mask and results.
        kept: Bytes per class that stay on chip in rows that one warp processes, if more than those of its logit.
        heavy: True if more is computed than a loss.
        shifts: True if logits may be aligned differently from their gradients where that allows wider vectors, and a
            tile may read logits of another one; False if gradients overwrite the logits.
        capped: True if logits have a cap.
    """
    sizes, strides = merge(shape, [logits.strides, gradients.strides, *others, (0,) * len(shape)])
    rows = prod(shape)
    together = classes == 1 or (logits.class_stride == 1 and gradients.class_stride == 1)
    gathers = not together and shifts and gathered(classes, sizes, (strides[0], strides[1]), (logits, gradients), chip)
    vec_size = vector_size(sizes, strides, logits, gradients, together)
    cluster, shifted, per_thread, each_edges = 1, False, 0, 0
    # Lanes share rows of more classes efficiently if vectors are wide enough without a shift.
    shared_well = together and classes > FEW_CLASSES and vec_size * logits.itemsize >= SHIFTED_BYTES
    if shifts and not shared_well and has_small_gaps(rows, classes, (logits, gradients), sizes, strides, heavy):
        return _packed_layout(rows, classes, logits, gradients, sizes, strides, heavy, logits.class_stride)
    arguments = rows, classes, logits, gradients, together, sizes, strides, vec_size, chip, heavy, shifts
    layout = None if gathers else _in_registers(*arguments)
    if layout is not None:
        return layout
    few = LANE_CLASSES if rows <= LANE_ROWS else FEW_CLASSES
    if gathers or (together and classes > few):
        # In long rows, 8-byte elements are faster one by one than shifted.
        shifted = gathers or (shifts and logits.itemsize < 8 and vec_size * logits.itemsize < 16)
        of_block, size = (SUBWARP_BLOCK_THREADS, BLOCK_THREADS), logits.itemsize
        vec_sizes = (16 // logits.itemsize, *(() if gathers else (vec_size,))) if shifted else (vec_size,)
        for vec_size in vec_sizes:
            # Vectors of gradients are cut out of staged logits, or of numbers of the same size that replace these.
            cuts = shifted and not gathers
            stays = 0 if cuts and size < kept else kept
            alike = ((gradients,), strides[1:2]) if gathers else ((logits, gradients), strides[:2])
            edges = not whole_rows(classes, vec_size, alike[0], sizes, alike[1])
            kind, width, threads, cluster = _on_chip(
                classes, vec_size, vec_size * size, rows, chip, of_block, BLOCK_VECTORS, PART_BYTES,
                edges * (1 if gathers and size > 2 else LANE_EDGES), stays * vec_size,
                WARP_VECTORS_WHOLE if cuts else 0,
            )  # fmt: skip
            if kind != "two_pass":
                of_thread = _stage(classes // vec_size, width * cluster) * vec_size
                of_thread *= max(size, stays) if kind == "subwarp" else size
                # Each of the warps that share a row needs space for one more vector.
                beside = threads // WARP if kind == "block" and cuts else 0
                shared = (threads + beside) * of_thread
                if shared <= chip.shared - DECLARED_BYTES:
                    break
            # Rows that are read twice are not staged in shared memory.
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
    streamed = streamed_vectors = 0
    least = STREAMED_FEW_ROWS if classes * logits.itemsize > STREAMED_LONG else STREAMED_ROWS
    if kind == "block" and rows >= least and width * cluster >= STREAMED_WIDTH and not gathers:
        needed = _stage(classes // vec_size, width * cluster)
        streamed_vectors = next((x for x in STREAMED_THREADS if x >= needed), 0)
        streamed = _streamed_block(rows) if streamed_vectors else 0
    chunks, rank = _chunks(units, _most_chunks(resident)), space_rank(rows, sizes)
    turns = 0
    plain = kind in ("subwarp", "block") and not (shifted or streamed or heavy)
    whole = vec_size * logits.itemsize == 16 and whole_rows(classes, vec_size, (logits,), sizes, strides[:1])
    if rows >= PIPELINED_ROWS and plain and whole and logits.itemsize == 4:
        turns = _turns(kind, width, threads, cluster, classes // vec_size, -(-units // chunks))
    return RowLayout(
        kind, vec_size, width, threads, chunks, per_block, shared, rank, words, cluster, resident, streamed,
        streamed_vectors, prefetch, per_thread=per_thread, shifted=shifted, gathered=gathers, turns=turns,
        edges=each_edges,
    )  # fmt: skip


def _streamed_block(rows: int) -> int:
    """Number of threads of a block that processes a row alone: more if rows are few."""
    threads = BLOCK_THREADS
    while threads > SUBWARP_BLOCK_THREADS and rows * threads > STREAMED_LANES:
        threads //= 2
    return threads


def pipelined_threads(lanes: int) -> int:
    """Threads that a multiprocessor runs at once for pipelined rows, each shared by this many lanes."""
    return PIPELINED_SHARED_THREADS if lanes > WARP else PIPELINED_THREADS


def _turns(kind: str, width: int, threads: int, cluster: int, vectors: int, rows: int) -> int:
    """Rows that a warp processes one after another in a chunk of pipelined rows; 0 if rows are not pipelined.

    A group processes ``rows`` rows of a chunk. A single row has no next one to load meanwhile.
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
    staggers: bool,
) -> RowLayout | None:
    """Returns the layout of many rows that fit into registers, or that warps share as columns; or None."""
    size = logits.itemsize
    if classes < 2:
        return None
    if together:
        follow = strides[1] == strides[0] and without_gaps(classes, sizes, strides[0])
        whole = whole_rows(classes, 16 // size, (logits, gradients), sizes, ())
        most = PACKED_CLASSES_WHOLE if whole else PACKED_CLASSES_NARROW if size == 2 else PACKED_CLASSES
        if rows < MANY_ROWS or classes * max(size, 4) > 4 * most or not follow:
            return None
        return _packed_layout(rows, classes, logits, gradients, sizes, strides, heavy)
    near = _near(sizes, (strides[0], strides[1]))
    if not near and not spread_columns(rows, classes, sizes, (strides[0], strides[1])):
        return None
    anywhere = near and staggers and vec_size == 1
    most = _staggered_rows(rows, logits, gradients, sizes, strides) if anywhere else vec_size
    if near and tiled(rows, classes, size, most > vec_size):
        tile = tile_shape(rows, classes, size, most, chip, heavy)
        if tile:
            staggered = anywhere and tile.vec_size > 1
            return _tile_layout(tile, rows, classes, logits, gradients, sizes, strides, staggered)
        return _slice_layout(rows, classes, vec_size, logits, gradients, sizes, strides)
    if near and sliced(rows, classes, sizes, size):
        return _slice_layout(rows, classes, vec_size, logits, gradients, sizes, strides)
    forward = size > 2 or (logits.class_stride > 0 and min(strides[0]) >= 0)
    if near and vec_size == 1 and forward and interleaved(rows, classes, sizes, strides, size):
        return _interleaved_layout(rows, classes, logits, gradients, sizes, strides)
    lane_rows = _column_rows(rows, classes, size, vec_size)
    if not lane_rows:
        return None
    staggered = near and vec_size == 1 and sizes[0] >= INTERLEAVED_ROWS and size <= 4
    # With smoothing or a cap, four rows of more classes spill or gain nothing.
    staggered = staggered and (classes <= COLUMN_CLASSES or not heavy)
    if staggered:
        lane_rows = ROWS_PER_THREAD
        tiles = _inner_tiles(rows, sizes, WARP * lane_rows)
    else:
        tiles = -(-rows // (WARP * lane_rows))
    resident = column_resident(classes, lane_rows, size)
    light = resident > COLUMN_RESIDENT and rows >= MANY_COLUMNS
    threads, chunks = COLUMN_THREADS, _chunks(tiles, LIGHT_COLUMN_CHUNKS if light else WARP_CHUNKS)
    words = space_words(rows, classes, (logits.class_stride, gradients.class_stride, 0, 0, 0, 0), sizes, strides)
    return RowLayout(
        "columns", lane_rows, 1, threads, chunks, threads // WARP, 0, space_rank(rows, sizes), words,
        resident=resident, per_thread=classes, staggered=staggered,
    )  # fmt: skip


def column_resident(classes: int, rows: int, size: int) -> int:
    """Threads that a multiprocessor has registers for if each lane processes this many rows of columns at once."""
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
    """Returns the layout of many rows of few classes that a warp moves together.

    Logits with gaps have a class stride of ``step``; it is 0 for logits without gaps.
    """
    size, each, buffers = logits.itemsize, packed_rows_of_lane(classes), packed_buffers(classes)
    pitch = strides[0][0] * size if step else 0
    # 16 bytes are inserted after each pitch. They would split a row that is misaligned and fills its pitch.
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
    """Bytes of shared memory for the tiles of a warp that moves rows of few classes together.

    ``pitch`` is the number of bytes from row to row there of logits with gaps; 0 for logits without gaps.
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
    """True if there are many rows of few classes with small gaps, which a warp copies to shared memory as one stretch.

    Gaps may be between rows or between classes; they are in sectors that are read anyway. ``tensors`` are the logits
    and their gradients, which have no gaps. ``strides`` begin with those of both. ``heavy`` rows compute more than a
    loss. With more than FEW_CLASSES classes only 16-bit rows gain, and 32-bit rows of strided classes: other rows are
    read as fast one by one by lanes that share a row.
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
    """True if each row begins ``pitch`` elements after the previous one, over all dimensions.

    The first dimension is the innermost one.
    """
    return all(s == pitch * prod(sizes[:d]) for d, s in enumerate(strides) if sizes[d] > 1)


def interleaved(rows: int, classes: int, sizes: Sequence[int], strides: Sequence[Sequence[int]], size: int) -> bool:
    """True if there are many neighbouring rows that form no vectors, and a thread processes several of them."""
    near = strides[0][0] == strides[1][0] == 1 and sizes[0] >= INTERLEAVED_ROWS
    warps = 2 if size == 2 else 1
    fits = warps * interleaved_bytes(classes, interleaved_rows(rows, classes, size), size) <= SHARED_BYTES
    least = ODD_COLUMN_CLASSES if size == 2 else COLUMN_CLASSES
    return rows >= MANY_ROWS and near and classes > least and fits


def interleaved_rows(rows: int, classes: int, size: int) -> int:
    """Number of interleaved rows per thread.

    In 16 bits there are fewer if there are few tiles, or if a block would have only one warp.
    """
    single = 2 * interleaved_bytes(classes, ROWS_PER_THREAD, size) > SHARED_BYTES
    narrow = size == 2 and (rows < MANY_INTERLEAVED or single)
    return ROWS_PER_THREAD // 2 if narrow else ROWS_PER_THREAD


def interleaved_bytes(classes: int, rows: int, size: int) -> int:
    """Bytes of shared memory of a warp whose threads each have this many interleaved rows.

    In 16 bits a class consists of four-byte words, one more than there are pairs (``kernels/softmax/paired_rows.cuh``).
    """
    return classes * (4 * (rows // 2 * WARP + 1) if size == 2 else rows * WARP * size)


def interleaved_threads(classes: int, rows: int, size: int) -> int:
    """Threads of a block of these warps."""
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
    units = _inner_tiles(rows, sizes, WARP * each)
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
    """Set of 0 and 1, for 16-bit rows that are stored in 4-byte words.

    It is {0} if neighbouring rows begin in the same half of a word in logits and in gradients, {1} if they begin in the
    other half, and both if some do and others do not.
    """
    apart = [a - b for a, b, n in zip(strides[0], strides[1], sizes, strict=True) if n > 1]
    if any([x % 2 for x in (logits.class_stride - gradients.class_stride, *apart)]):
        return {0, 1}
    return {(logits.misalignment - gradients.misalignment) // 2 % 2}


def packed_rows_of_lane(classes: int) -> int:
    """Number of rows of few contiguous classes that a lane processes at once."""
    return min(PACKED_ROWS, power_of_two(max(1, PACKED_VALUES // classes)))


def packed_buffers(classes: int) -> int:
    """Number of buffers in shared memory that a warp has for tiles of rows of few contiguous classes.

    With 2, the next tile is in flight while one is evaluated. For tiles of one row per lane, the second buffer would
    cost more than the wait.
    """
    return 2 if packed_rows_of_lane(classes) > 1 else 1


def rolled(classes: int, heavy: bool, shifted: bool) -> bool:
    """True if a lane reads its contiguous rows from shared memory again, some classes at a time."""
    return heavy and not shifted and classes > PACKED_CLASSES_HEAVY


def packed_registers(classes: int) -> int:
    """Registers of a thread that processes rows of few contiguous classes: an upper bound, as counted.

    More blocks than a multiprocessor has room for would wait, with chunks of their own, until the others have finished.
    """
    rows = packed_rows_of_lane(classes)
    if rows > 1:
        return 124 if rows > 2 else 80 if classes <= 4 else 96
    return 64 if classes <= 8 else 72 if classes <= 12 else 96 if classes <= 33 else 64 + 11 * classes // 10


def packed_pitch(row: int) -> int:
    """Bytes from row to row in shared memory: ``kPitch`` of ``kernels/softmax/packed_rows.cuh``."""
    return row + 16 * (row % 32 == 0)


def _column_rows(rows: int, classes: int, size: int, vec_size: int) -> int:
    """Number of neighbouring rows that a lane reads to registers; 0 if they do not fit.

    ``vec_size`` is the number of rows that can be moved at once.
    """
    most = ODD_COLUMN_CLASSES if size == 2 and vec_size == 1 else COLUMN_CLASSES
    if classes > most or rows < MANY_ROWS:
        return 0
    words = max(1, size // 4)  # of the number that a logit becomes
    return next((x for x in (4, 2, 1) if x <= vec_size and x * classes * words <= COLUMN_REGISTERS), 0)


@dataclass(frozen=True)
class TileShape:
    """Shape of a tile of columns that warps share.

    ``vec_size`` are the neighbouring rows per lane, ``warps`` those of a block, and ``cluster`` the blocks of a
    cluster. ``shared`` and ``exchanged`` are bytes of shared memory for logits and for values that warps exchange.
    """

    vec_size: int
    warps: int
    cluster: int
    shared: int
    exchanged: int


def tiled(rows: int, classes: int, size: int, staggered: bool = False) -> bool:
    """True if warps share rows of strided classes as columns: many rows, with too many classes for one thread."""
    few = rows < TILE_MANY_ROWS or (staggered and size == 2)
    return rows >= TILE_ROWS and classes * size >= (TILE_ROW_BYTES if few else TILE_MANY_ROW_BYTES[size])


def sliced(rows: int, classes: int, sizes: Sequence[int], size: int) -> bool:
    """True if blocks share few rows of strided classes as columns. They read whole sectors of each class."""
    return rows < TILE_ROWS and classes >= SLICE_CLASSES and sizes[0] * size >= SECTOR_BYTES


def exchanged_bytes(lanes: int, warps: int, cluster: int, size: int, heavy: bool) -> int:
    """Bytes of ``TileExchange`` in ``kernels/softmax/column_tiles.cuh``."""
    numbers = max(1, size // 4) * 4
    parts = warps + (2 * cluster if cluster > 1 else 0)
    return WARP * lanes * numbers * (parts * (4 if heavy else 2) + 4)


def tile_shape(rows: int, classes: int, size: int, vec_size: int, chip: Chip, heavy: bool) -> TileShape | None:
    """Returns tiles whose warps read 256 bytes of a class, or else 128; None if rows do not fit into shared memory.

    A multiprocessor runs several of these blocks. For few rows, and in 16 bits, small clusters are tried first.
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
            # In a cluster each warp must have several classes.
            shares = cluster == 1 or classes >= 4 * TILE_WARPS * cluster
            if shares and shared + exchanged + 1024 <= min(limit, chip.shared) and blocks >= least:
                shape = TileShape(lanes, TILE_WARPS, cluster, shared, exchanged)
                return _in_fewer_waves(shape, rows, classes, size, heavy, min(TILE_BYTES[1], chip.shared))
    return None


def _in_fewer_waves(shape: TileShape, rows: int, classes: int, size: int, heavy: bool, room: int) -> TileShape:
    """Returns the shape, or one with clusters of seven instead of eight blocks if that takes less time.

    Slightly more clusters of seven run at once: 32 tiles take two waves of clusters of eight. ``room`` is the maximum
    number of bytes of shared memory of a block.
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
    """Number of blocks that a multiprocessor has room for; each needs 2 KiB besides."""
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
    staggered: bool,
) -> RowLayout:
    words = space_words(rows, classes, (logits.class_stride, gradients.class_stride, 0, 0, 0, 0), sizes, strides)
    units = _column_tiles(rows, sizes, tile.vec_size, staggered)
    resident = _tile_blocks(tile) * tile.warps * WARP
    return RowLayout(
        "column_tiles", tile.vec_size, 1, tile.warps * WARP, _chunks(units), 1, tile.shared, space_rank(rows, sizes),
        words, tile.cluster, resident, warps=tile.warps, staggered=staggered,
    )  # fmt: skip


def _column_tiles(rows: int, sizes: Sequence[int], vec_size: int, staggered: bool) -> int:
    """Number of tiles of vectors of neighbouring rows (``ColumnTiles`` in ``kernels/softmax/column_tiles.cuh``)."""
    if not staggered:
        return -(-rows // (WARP * vec_size))
    return _inner_tiles(rows, sizes, (WARP - 2) * vec_size)


def _inner_tiles(rows: int, sizes: Sequence[int], of_tile: int) -> int:
    """Number of tiles of ``of_tile`` rows that end with the inner dimension (``InnerTiles`` in ``kernels/softmax``)."""
    return rows // sizes[0] * -(-sizes[0] // of_tile)


def _staggered_rows(
    rows: int, logits: RowStrides, gradients: RowStrides, sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> int:
    """Number of neighbouring rows that can be moved at once in each class, wherever it begins; 1 if they should not be.

    Rows of logits and of their gradients must begin at the same place of a vector. At most an eighth of the vectors may
    be past the end of the inner dimension.
    """
    vec_size = _alike(sizes, strides[:2], (logits, gradients))
    while vec_size > 1:
        vectors = _column_tiles(rows, sizes, vec_size, staggered=True) * WARP
        if (logits.class_stride - gradients.class_stride) % vec_size == 0 and 8 * vectors * vec_size <= 9 * rows:
            break
        vec_size //= 2
    return vec_size


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
    # Blocks that share a tile count its parts, and a workspace has one counter per tile.
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
    """Returns the number of threads that read a class of a tile.

    It is ``lanes``, or that of several warps if classes begin within sectors, because a sector that two tiles share is
    moved twice. Larger tiles are rejected if more than an eighth of their rows would be past the last row, beyond those
    that are so anyway.
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
    """Doubles of workspace for the partial sums of tiles, and for the sums of their parts.

    ``number`` is the number of bytes of a number in these sums.
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
    """True if strided logits are gathered class by class, although the classes of their gradients are contiguous.

    Each row must occupy memory of its own and stay on chip. ``strides`` and ``tensors`` are those of the logits and of
    their gradients.
    """
    logits, gradients = tensors
    step = logits.class_stride
    if gradients.class_stride != 1 or step <= 1 or classes <= FEW_CLASSES:
        return False
    alone = all(abs(s) >= classes * step for s, n in zip(strides[0], sizes, strict=True) if n > 1)
    part = min(PART_BYTES, chip.shared - DECLARED_BYTES)
    return alone and classes * max(4, logits.itemsize) <= part * (MAX_CLUSTER if chip.clusters else 1)


def _near(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> bool:
    """True if a warp reads neighbouring rows in whole cache lines."""
    return sizes[0] > 1 and all(x[0] == 1 for x in strides)


def spread_columns(rows: int, classes: int, sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> bool:
    """True if a lane reads rows of few classes to registers although neighbouring logits are a few elements apart.

    There must be many rows. ``strides`` are those of the logits and of their gradients.
    """
    return rows >= MANY_ROWS and 1 < classes <= COLUMN_CLASSES and spread(sizes, strides[:1], strides[1:2])


def spread(sizes: Sequence[int], operands: Sequence[Sequence[int]], gradients: Sequence[Sequence[int]]) -> bool:
    """True if neighbouring rows are contiguous in all gradients, and a few elements apart in an operand."""
    steps = [x[0] for x in operands]
    return sizes[0] > 1 and all([x[0] == 1 for x in gradients]) and min(steps) > 0 and 1 < max(steps) <= NEAR_COLUMNS


def subwarp_blocks(edges: int) -> int:
    """Number of blocks of SUBWARP_BLOCK_THREADS threads that a multiprocessor has registers for.

    A lane has up to ``edges`` edge elements of a row.
    """
    return MANY_EDGES_BLOCKS if edges > 2 else SUBWARP_BLOCKS


def block_blocks(cluster: int, heavy: bool, crowded: bool) -> int:
    """Number of blocks of BLOCK_THREADS threads that a multiprocessor has registers for.

    More ``crowded`` blocks, with a cap or with gathered vectors of 16 bits, would spill.
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
    """True if rows are copied, with their classes contiguous, before kernels process them.

    Rows of strided classes are copied, unless kernels read columns well: neighbouring rows must be contiguous in all
    ``tensors``, operands and gradients, and either warps share them, or a row of the operands, the first ``read``
    tensors, fits into shared memory. So images (N, C, H, W) are read in place, small ones up to C = 192 in float32. A
    single thread would read a longer row several times, at the speed of one thread if rows are few, and would lose
    digits in a long sequential sum. Few rows of moderately many classes are copied for the same reason.

    Args:
        tensors: The operands, then their gradients.
        read: Number of operands, 1 or 2.
        softmax: False for log-probabilities, of which one element per row is read.
        shares: False if a single thread computes a row; ``second`` derivatives of few rows are too slow then.
        chip: Limits of the GPU if rows may be gathered, each in memory of its own; otherwise None.
        second: True for second derivatives.
        room: Maximum bytes of a row that can stay on chip.
        registers: True if lanes read rows of few classes to registers: these are read in place, in whole cache lines.
        columns: True if there are kernels whose warps share rows of more classes, which are then read in place too.
        tile: Maximum bytes of 32 rows of two operands that warps share, which are read in place as well.
        lane: Maximum number of classes of two operands that a lane reads to registers although neighbouring rows are a
            few elements apart. Many rows of more classes are copied in 16 bits, and in 32 bits if they are read
            ``again``.
        again: True if backward reads the rows again. With more than 16 bits, neighbouring rows must then be closer.
        heavy_terms: True if a class takes many instructions.
        writes: False if no gradients are written.
        heavy: True if more is computed than a loss, of one operand.
    """
    rows = prod(shape)
    if not softmax:
        # Only one element of each row is read, so the strides of the operand do not matter.
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
    # 16-bit elements would be read one by one.
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
        # Threads that stage their rows copy 16-bit elements one by one.
        return tensors[0].itemsize == 2
    if second and rows < MANY_ROWS and classes > SECOND_FEW_CLASSES:
        return rows * classes > SECOND_APART
    size = classes * sum(x.itemsize for x in tensors[:read])
    if read == 2 and not second and size * WARP <= tile:
        return False
    return size * THREAD_PER_ROW_THREADS_MIN > SHARED_BYTES


def lanes_share(rows: int, itemsize: int) -> bool:
    """True if lanes that share a row evaluate heavy terms in less time than one thread per row.

    Terms of 16 bits take fewer instructions, those of 64 bits more.
    """
    return rows < HEAVY_TERM_ROWS[itemsize]


def _copied_for_lanes(rows: int, classes: int, itemsize: int, writes: bool) -> bool:
    """True if rows of heavy terms, strided in both operands, are copied so that lanes can share them."""
    if not lanes_share(rows, itemsize):
        return False
    if itemsize == 8:
        return writes or rows < HEAVY_VALUE_ROWS
    return writes and classes > HEAVY_TERM_CLASSES


def _has_words_in_copies_alone(
    shape: Sequence[int], classes: int, tensors: Sequence[RowStrides], lane: int, again: bool
) -> bool:
    """True if lanes move neighbouring rows of two operands in words if they are copied, but one by one in place.

    The operands have gaps, in 16 bits; or in 32 bits if few rows are read ``again``. It is False where many rows of up
    to ``lane`` classes are read to registers in place, and where many rows have neighbours a few elements apart, to
    which other rules apply.
    """
    operands, gradients = tensors[:2], tensors[2:]
    many, widest = prod(shape) >= MANY_ROWS, max(x.itemsize for x in operands)
    if classes < WORD_CLASSES or any(x.class_stride == 1 for x in tensors) or (many and classes <= lane):
        return False
    short = again and not many and not _in_few_tiles(classes, sum(x.itemsize for x in operands))
    if widest > (4 if short else 2):
        return False

    def lies(of: Sequence[RowStrides]) -> tuple[int, bool]:
        """Returns the rows of a word, and True if neighbouring rows are contiguous."""
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
    """True if rows of contiguous classes are copied because of gaps between rows of an operand, but not of a gradient.

    Operands are the first ``read`` tensors. Three cases are copied:

    - Many rows of few classes, which would be read class by class: warps move only rows without gaps together.
    - More classes of two operands, if each lane that shares a row would have a single vector or element; most of all if
      threads exchange more than once per row (``heavy``).
    - 16-bit rows of two operands that do not stay on chip (more than ``room`` bytes), if gaps leave no vectors that are
      aligned equally in both: only rows on chip can be shifted.
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
    """True if tensors have 16 bits, and no vectors that are aligned equally in all of them."""
    return max(x.itemsize for x in tensors) == 2 and _alike(sizes, strides, tensors) == 1


def classes_last(shape: Sequence[int], class_dim: int) -> tuple[int, ...]:
    """Strides without gaps, with contiguous classes, and rows in the order of the shape."""
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
    """Returns the layout of rows of which only the label's class is read.

    If gradients have no gaps, a lane processes some short rows, or a warp writes a tile of longer ones. Otherwise a
    warp writes the gradients of a row if classes are contiguous, and a lane those of neighbouring rows if they are
    strided. Large gradients of many classes are cleared beforehand.
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
    """True if the neighbouring rows of each class begin and end at a sector boundary."""
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
    """Returns the layout of rows with dense targets.

    Args:
        operands: Logits, their gradients, targets and their gradients.
        others: Strides of mask and results.
        affine: True if the term is affine in log p.
        capped: True if logits have a cap.
        shifts: True if operands may be aligned differently from gradients where that allows wider vectors.
        heavy_terms: True if a class takes many instructions.
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
        alike = _alike(sizes, of_operands, operands)
        shifted = shifts and logits.itemsize == targets.itemsize and alike * logits.itemsize < SHIFTED_BYTES
        wide = _alike(sizes, [strides[1], strides[5]], (gradients, target_gradients))
        shifted = shifted and wide * logits.itemsize == 16
        alike = _without_edges(classes, alike, operands, sizes, of_operands, DENSE_EDGES)
        for vec_size in (wide, alike) if shifted else (alike,):
            tensors = (gradients,) if shifted else (logits, targets)
            of_tensors = [strides[1]] if shifted else [strides[0], strides[2]]
            edges = not whole_rows(classes, vec_size, tensors, sizes, of_tensors)
            kind, width, threads, cluster = _on_chip(
                classes, vec_size, vec_size * size, rows, chip, (THREADS, BLOCK_THREADS), DENSE_VECTORS, PART_BYTES,
                int(edges), longest=WARP_VECTORS, at_once=DENSE_BYTES_AT_ONCE,
            )  # fmt: skip
            if kind != "two_pass":
                break
            # Rows that are read again are not shifted on their way to shared memory.
            shifted = False
        held_whole = kind == "subwarp" or shifted or _stays_on_chip(rows, classes * size, widest, affine)
        if kind == "two_pass" or not held_whole:
            kind = "windowed"
            threads, cluster, per_thread = _windowed(rows, classes * size, vec_size * size, affine, chip)
            width, warps = threads, threads // WARP
        held = per_thread if kind == "windowed" else _stage(classes // vec_size, width * cluster)
        shared = held * threads * vec_size * size
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
    in_warps = kind not in ("block", "windowed")
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
    # Kernels with one block per row take up to 64 registers per thread.
    resident = DENSE_REGISTER_RESIDENT if registers else 2048 if in_warps else RESIDENT_THREADS
    if kind == "windowed":
        resident = windowed_blocks(warps) * threads
    elif warps > 1:
        resident = dense_column_blocks(warps, widest) * threads
    chunks = _chunks(units, _most_chunks(resident))
    return RowLayout(
        kind, vec_size, width, threads, chunks, per_block, shared, rank, words, cluster, resident,
        per_thread=per_thread, warps=warps, shifted=shifted,
    )  # fmt: skip


def _stays_on_chip(rows: int, row_bytes: int, widest: int, affine: bool) -> bool:
    """True if a row with dense targets that fits on chip is held there as a whole, and not by a window of it.

    The blocks of a large cluster wait for each other longer than it takes to read a part of the row again.
    """
    if rows < WINDOWED_ROWS or row_bytes <= DENSE_BLOCK_BYTES:
        return True
    full = widest >= 4 or (affine and row_bytes > FULL_CLUSTER * DENSE_CLUSTER_BYTES)
    return full and row_bytes <= DENSE_CLUSTER_BYTES


def _windowed(rows: int, row_bytes: int, vector: int, affine: bool, chip: Chip) -> tuple[int, int, int]:
    """Returns threads of a block, blocks of a cluster, and vectors per thread in the window of rows with dense targets.

    ``row_bytes`` and ``vector`` are the bytes of a row and of a vector of both operands. Three of these blocks fit into
    the shared memory that one block may have.
    """
    threads, window, cluster = THREADS, WINDOW, 1 if rows > WINDOWED_PAIRS else 2
    if rows <= WINDOWED_LARGE_BLOCKS:
        threads, window, cluster = BLOCK_THREADS, WINDOW // 2, 2 if rows <= WINDOWED_LARGE_PAIRS else 1
    elif affine and rows > WINDOWED_FEW:
        cluster = max(2, min(MAX_CLUSTER, power_of_two(-(-row_bytes // WINDOWED_PART_BYTES))))
    while 3 * threads * window * vector > chip.shared and (window > 2 or threads > 2 * WARP):
        window, threads = (window // 2, threads) if window > 2 else (window, threads // 2)
    return threads, cluster if chip.clusters else 1, window


def windowed_blocks(warps: int) -> int:
    """Number of blocks of a multiprocessor that hold windows of rows with dense targets, by the warps of a block."""
    return 3 if warps <= THREADS // WARP else 2


def dense_in_columns(classes: int, size: int, chip: Chip) -> bool:
    """True if the warps of a block share 32 rows with dense targets.

    ``size`` is the number of bytes of a class in both operands. Two of these blocks must fit on a multiprocessor: the
    warps of one compute while those of the other wait for memory.
    """
    return _in_few_tiles(classes, size) and classes * size * WARP <= room_of_tiles(chip)


def _in_few_tiles(classes: int, size: int) -> bool:
    """True if shared memory has room for few tiles of 32 such rows, whose warps then share them."""
    return _room(classes * size * WARP) < DENSE_COLUMN_TILES


def room_of_tiles(chip: Chip) -> int:
    """Maximum bytes of a tile of 32 such rows."""
    return (chip.shared - DECLARED_BYTES) // 2


def _dense_column_warps(classes: int, size: int, double: bool) -> int:
    """Number of warps that share such a tile: enough to keep a multiprocessor busy with its tiles."""
    together = DENSE_COLUMN_DOUBLE_WARPS if double else DENSE_COLUMN_WARPS
    return max(2, min(DENSE_COLUMN_MOST, together // _room(classes * size * WARP)))


def dense_column_blocks(warps: int, itemsize: int) -> int:
    """Number of blocks of a multiprocessor whose warps share such a tile, as registers allow."""
    return DENSE_COLUMN_RESIDENT // (2 if itemsize == 8 else 1) // (warps * WARP)


def dense_register_classes(kind: str, affine: bool, capped: bool) -> int:
    """Maximum number of classes of both operands that a lane holds in registers, in packed rows or columns."""
    if not affine or capped:
        return 0
    return DENSE_PACKED_CLASSES if kind == "packed_rows" else DENSE_COLUMN_CLASSES if kind == "columns" else 0


def _classes_alone(rows: int, classes: int, shared: bool, heavy_terms: bool) -> int:
    """Maximum number of classes of a row with dense targets that a thread processes alone.

    Its time grows with the number of classes. That of lanes that share a row grows with the number of rows, above all
    with ``heavy_terms``. If rows are to be ``shared``, the maximum is small.
    """
    if shared:
        return DENSE_ALONE_FEW
    if rows >= MANY_ROWS:
        return FEW_CLASSES
    return DENSE_ALONE_FEW if rows * classes <= DENSE_FEW_ELEMENTS and not heavy_terms else DENSE_ALONE


def _column_rows_of_lane(sizes: Sequence[int], strides: Sequence[Sequence[int]], tensors: Sequence[RowStrides]) -> int:
    """Number of neighbouring rows that a lane reads to registers, in four-byte words if alignment allows.

    The number is 0 if neighbouring rows are not contiguous in all gradients, or are far apart in an operand.
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
    """Returns the number of neighbouring rows of a class that a lane moves as a word, and whether operands are shifted.

    The number is 1 if words save nothing. Only operands of 16 bits are shifted, to the words of their gradients.
    ``tensors`` are the operands, each followed by its gradient.
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
    """Returns elements of a word, threads of a block and bytes of shared memory; None if rows cannot be packed.

    Only many rows of few contiguous classes with dense targets are packed. If ``registers``, a lane holds several rows
    in registers, and shared memory has room for the next ones too. The last ``tangents`` of the ``operands`` are
    tangents.
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
    """Returns the layout of second derivatives of rows with class indices.

    Tangents (``directions``) may have any strides. Rows that one thread processes stay in shared memory if they fit and
    have no cap; all others are read again. Without a softmax only the label's class is read.
    """
    sizes, strides = merge(shape, [logits.strides, gradients.strides, *others, directions.strides])
    rows = prod(shape)
    together = classes == 1 or (logits.class_stride == 1 and gradients.class_stride == 1)
    # Operands that are aligned differently are shifted, or loaded element by element.
    vec_size = _second_vector(classes, sizes, strides[1:2], (gradients,)) if together and softmax else 1
    edges = not whole_rows(classes, vec_size, (gradients,), sizes, strides[1:2])
    shifted = together and softmax and vector_size(sizes, strides, logits, gradients, together) < vec_size
    class_strides = (logits.class_stride, gradients.class_stride, 0, 0, 0, directions.class_stride)
    words = space_words(rows, classes, class_strides, sizes, strides)
    # Rows that warps can stage: they follow each other without gaps in all arrays.
    word = gcd(16, logits.misalignment, gradients.misalignment, directions.misalignment)
    follow = together and directions.class_stride == 1 and strides[0] == strides[1] == strides[-1]
    follow = follow and without_gaps(classes, sizes, strides[0]) and word >= logits.itemsize
    stages = softmax and not capped and follow and rows >= MANY_ROWS
    many = stages and rows >= SECOND_STAGED_LABEL_ROWS[logits.itemsize]
    few = SECOND_STAGED_LABEL_CLASSES[logits.itemsize] if many else FEW_CLASSES
    large = logits.itemsize == 4 and not capped
    kind, width, threads, cluster = _read_again(rows, classes, vec_size, together, chip, edges, few, large)
    shares = together and vec_size > 1 and directions.class_stride == 1 and kind in ("subwarp", "block")
    if shares and not capped:
        lies = _alike(sizes, [strides[0], strides[1], strides[5]], (logits, gradients, directions))
        arguments = rows, classes, sizes, words, vec_size, logits.itemsize, edges, lies < vec_size
        layout = _register_layout(*arguments, SECOND_LABEL_CLASSES)
        if layout:
            return layout
    least = SECOND_LABEL_COLUMNS[logits.itemsize]
    if softmax and not (together or capped) and second_in_columns(rows, classes, logits.itemsize, least):
        return _second_column_layout(rows, classes, sizes, words, logits.itemsize, heavy)
    row = per_thread = 0  # bytes of a row in shared memory
    alone = softmax and not capped and kind == "thread_per_row_two_pass"
    if alone and stages:
        kind, vec_size, per_thread = "staged_packed_rows", word // logits.itemsize, classes
        row, threads = 2 * packed_pitch(classes * logits.itemsize), PACKED_THREADS
    elif alone and not together:
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
        warps=_warps_of_long_rows(threads),
    )  # fmt: skip


def dense_second_layout(
    shape: Sequence[int],
    classes: int,
    operands: Sequence[RowStrides],
    others: Sequence[Sequence[int]],
    directions: Sequence[RowStrides | None],
    chip: Chip | None = None,
    by_logits: bool = False,
) -> RowLayout:
    """Returns the layout of second derivatives of rows with dense targets.

    ``operands`` are those of `dense_layout`. ``directions`` are the tangents of the logits and of the targets, None for
    an operand without one. ``by_logits``: the kernels are those of second derivatives with respect to the logits only.
    """
    logits, gradients, targets, target_gradients = operands
    rows_of = [logits.strides, gradients.strides, targets.strides, *others, target_gradients.strides]
    sizes, strides = merge(shape, rows_of)
    rows, of_operands = prod(shape), [strides[0], strides[1], strides[2], strides[5]]
    together = classes == 1 or all(x.class_stride == 1 for x in operands)
    # Operands that are aligned differently are shifted, or loaded element by element.
    results = (gradients, target_gradients)
    vec_size = _second_vector(classes, sizes, (strides[1], strides[5]), results) if together else 1
    edges = not whole_rows(classes, vec_size, results, sizes, (strides[1], strides[5]))
    few = SECOND_DENSE_CLASSES
    kind, width, threads, cluster = _read_again(rows, classes, vec_size, together, chip, edges, few, by_logits)
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
        per_thread=per_thread, warps=_warps_of_long_rows(threads),
    )  # fmt: skip


def register_second_layout(
    shape: Sequence[int],
    classes: int,
    operands: Sequence[RowStrides],
    others: Sequence[Sequence[int]],
    directions: RowStrides,
) -> RowLayout | None:
    """Returns the layout of such rows in registers, if only the logits have tangents (``directions``) and gradients.

    None if rows do not fit, or if warps move them together.
    """
    logits, gradients, targets, target_gradients = operands
    rows_of = [logits.strides, gradients.strides, targets.strides, *others, target_gradients.strides]
    sizes, strides = merge(shape, rows_of)
    rows, results, shares = prod(shape), (gradients,), classes > 1
    shares = shares and all(x.class_stride == 1 for x in (logits, gradients, targets, directions))
    vec_size, edges, shifted = 1, False, False
    if shares:
        of_operands = [strides[0], strides[1], strides[2], strides[5]]
        arguments = rows, classes, (*operands, directions), sizes, of_operands
        if classes <= SECOND_STAGED_CLASSES and _packed_dense(*arguments, False, 1):
            return None
        vec_size = min(_second_vector(classes, sizes, strides[1:2], results), 16 // targets.itemsize)
        edges = not whole_rows(classes, vec_size, results, sizes, strides[1:2])
        shifted = _alike(sizes, strides[:3], (logits, gradients, targets, directions)) < vec_size
    apart = [x.class_stride for x in (logits, gradients, targets)]
    words = space_words(rows, classes, (*apart, 0, 0, target_gradients.class_stride), sizes, strides)
    size = max(logits.itemsize, targets.itemsize)
    if not shares and classes > _second_alone(size):
        in_columns = second_in_columns(rows, classes, size, 1)
        return _second_column_layout(rows, classes, sizes, words, size, True) if in_columns else None
    return _register_layout(rows, classes, sizes, words, vec_size, size, edges, shifted, SECOND_LANE_CLASSES, shares)


def second_in_columns(rows: int, classes: int, itemsize: int, least: int) -> bool:
    """True if the warps of a block share rows of at least ``least`` classes in place for second derivatives."""
    most = SECOND_COLUMN_WARPS[itemsize] * SECOND_COLUMN_CLASSES[itemsize]
    return rows >= SECOND_COLUMN_ROWS and least <= classes <= most


def _second_column_layout(
    rows: int, classes: int, sizes: Sequence[int], words: list[int], itemsize: int, heavy: bool
) -> RowLayout:
    """Returns the layout of such rows: with the most resident blocks, and then the fewest warps, which exchange less.

    ``heavy`` rows have smoothed labels or dense targets. Precondition: `second_in_columns`.
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
    """Number of blocks of a multiprocessor whose warps share such rows, each with ``per_thread`` classes of a row."""
    registers = SECOND_COLUMN_REGISTERS[heavy] + SECOND_CLASS_REGISTERS[heavy] * per_thread
    if itemsize == 8:
        registers = SECOND_DOUBLE_REGISTERS
    # Each quarter of a multiprocessor has 512 registers per lane, and allocates them to warps in steps of eight.
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
    """Returns the layout of second derivatives of rows in registers; None if they do not fit.

    Lanes share a row, or process rows alone. A lane has ``few`` classes as long as there are lanes for the rest.
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
    """Maximum number of strided classes of a row of second derivatives that a thread holds in registers alone."""
    return SECOND_APART_CLASSES // max(1, itemsize // 4)


def second_resident(per_thread: int, vec_size: int, itemsize: int) -> int:
    """Threads of a multiprocessor, each with ``per_thread`` vectors of a row in registers, for second derivatives."""
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
    """Elements of a vector, narrowed until a row has at least ``least`` vectors, or consists of vectors only.

    A short row with edge elements takes many lanes, most of which have nothing to do.
    """
    while vec_size > 1 and classes < least * vec_size and not whole_rows(classes, vec_size, tensors, sizes, strides):
        vec_size //= 2
    return vec_size


def _read_again(
    rows: int,
    classes: int,
    vec_size: int,
    together: bool,
    chip: Chip | None,
    edges: bool,
    few: int = FEW_CLASSES,
    large_blocks: bool = False,
) -> tuple[str, int, int, int]:
    """Returns kind, threads that share a row, threads of a block and blocks of a cluster, if nothing stays on chip.

    Few rows are shared by more threads. If rows have ``edges``, a thread has at most one edge element. One thread
    processes a row of at most ``few`` classes alone. If ``large_blocks``, larger blocks may share long rows.
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
    # A cache has no room for the longest rows, however few are in flight.
    if large_blocks and rows >= 4 * MANY_BLOCKS and SECOND_LONG_THREADS <= width <= 2 * SECOND_LONG_THREADS:
        return "block", SECOND_LONG_THREADS, SECOND_LONG_THREADS, 1
    width = min(width, THREADS)
    most = 1 if chip is None or not chip.clusters else MAX_CLUSTER
    while cluster < most and rows * cluster < 4 * MANY_BLOCKS and vectors >= 2 * cluster * width * SECOND_VECTORS:
        cluster *= 2
    return "block", width, width, cluster


def _warps_of_long_rows(threads: int) -> int:
    """Warps of a block that shares a long row for second derivatives; 1 for all other blocks."""
    return threads // WARP if threads > THREADS else 1


def _workers(kind: str, rows: int, width: int, threads: int) -> tuple[int, int]:
    """Number of workers of a block, and of those that all rows need."""
    return (1, rows) if kind == "block" else (threads // WARP, -(-rows // (WARP // width)))


def _chunks(units: int, most: int = MAX_CHUNKS) -> int:
    """Number of partial sums for ``units`` tiles.

    Each partial sum ends with a sum over a warp, and the last block adds them while the rest of the GPU waits.
    """
    return max(1, min(units, most))


def _most_chunks(resident: int) -> int:
    """Maximum number of partial sums if a multiprocessor has this many resident threads."""
    return WARP_CHUNKS if resident <= WARP_CHUNKS_RESIDENT else MAX_CHUNKS


def space_words(
    rows: int, classes: int, class_strides: Sequence[int], sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> list[int]:
    """Words of ``RowSpace`` of ``kernels/softmax/rows.cuh``."""
    rank = space_rank(rows, sizes)
    inverse = inverse_words(sizes[0]) if rank == 2 else []
    return [*inverse, rows, classes, *class_strides, *dimension_words(sizes, strides, rank)]


def space_rank(rows: int, sizes: Sequence[int]) -> int:
    """Number of dimensions that fit into a ``RowSpace``.

    With two dimensions, division is by multiplication (``InnerDivision``).
    """
    return 1 if len(sizes) == 1 else 2 if len(sizes) == 2 and rows < 1 << 31 else MAX_RANK


def inverse_words(size: int) -> list[int]:
    """Multiplier and shift that divide numbers below 2^31 by ``size``."""
    shift = 31 + (size - 1).bit_length()
    return [-(-(1 << shift) // size), shift]


def label_words(
    shape: Sequence[int], classes: int, labels: Sequence[int], mask: Sequence[int]
) -> tuple[int, list[int]]:
    """Rank and words of the space of labels and mask alone, whose dimensions merge where those of logits do not."""
    sizes, strides = merge(shape, [labels, mask])
    nowhere = (0,) * len(sizes)
    streams = [nowhere, nowhere, *strides, nowhere, nowhere]
    return space_rank(prod(shape), sizes), space_words(prod(shape), classes, (0,) * len(streams), sizes, streams)


def blocks(layout: RowLayout, chunks: int, processors: int, gradient: bool = True) -> int:
    """Number of blocks for ``chunks`` chunks: as many as run at once, but no more than there is work for."""
    usable = processors
    if layout.cluster > 2:
        # A cluster stays within a graphics processing cluster (GPC), and each GPC has some multiprocessors left over.
        # The ratios are those of a GPU with 132 multiprocessors.
        usable = max(1, processors * 17 // 20 if layout.cluster == ODD_CLUSTER else processors * 10 // 11)
    at_once = max(1, usable * _at_once(layout, gradient and layout.prefetch) // layout.cluster)
    return max(1, min(layout.slices or -(-chunks // layout.per_block), at_once)) * layout.cluster


def _at_once(layout: RowLayout, half: bool) -> int:
    """Number of blocks that a multiprocessor runs at once, or ``half`` of them, as far as is known without compiling.

    A multiprocessor has some 227 KiB of shared memory.
    """
    return max(1, min(layout.resident // (2 if half else 1) // layout.threads, _room(layout.shared)))


def _room(shared: int) -> int:
    """Number of blocks that a multiprocessor has shared memory for, if each takes ``shared`` bytes."""
    return (227 << 10) // (shared + 3072) if shared else 2048


def thread_per_row_blocks(threads: int, shared: int, crowded: bool = False) -> int:
    """Number of blocks of a multiprocessor whose threads each process neighbouring rows.

    If shared memory has room for few threads only, these may take more registers; so may ``crowded`` ones.
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
    """Number of elements that are moved at once, up to 16 bytes, if logits and gradients are aligned equally.

    Rows may begin anywhere, but the logits of a row and its gradients must be equally far from an aligned address.
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
    """Number of elements that are moved at once in all tensors, up to 16 bytes of the widest.

    In every row all tensors must be equally far from an aligned address.
    """
    for vec_size in (x for x in (8, 4, 2) if x <= 16 // max(y.itemsize for y in tensors)):
        phases = {x.misalignment // x.itemsize % vec_size for x in tensors}
        first, *others = strides
        steps = [(a - b) % vec_size for s in others for a, b, n in zip(first, s, sizes, strict=True) if n > 1]
        if len(phases) == 1 and not any(steps):
            return vec_size
    return 1


def _stage(vectors: int, count: int) -> int:
    """Vectors per thread in shared memory, if ``count`` threads share ``vectors`` vectors; at least 1."""
    return max(1, -(-vectors // count))


def whole_rows(
    classes: int,
    vec_size: int,
    tensors: Sequence[RowStrides],
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
) -> bool:
    """True if all rows begin and end at a vector boundary."""
    starts = [x.misalignment % (vec_size * x.itemsize) for x in tensors]
    steps = [x % vec_size for s in strides for x, n in zip(s, sizes, strict=True) if n > 1]
    return classes % vec_size == 0 and not any(starts + steps)


def row_pitch(classes: int, itemsize: int) -> int:
    """Returns the elements between the starts of two rows in shared memory: ``kernels/softmax/rows_of_warp.cuh``."""
    return 2 * (classes // 2 | 1) if itemsize == 2 and classes % 2 == 0 else classes | 1


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
    at_once: int = 0,
) -> tuple[str, int, int, int]:
    """Returns kind, threads of a block that share a row, threads and blocks of a cluster, for contiguous classes.

    Args:
        vector: Bytes of a vector in shared memory.
        threads: Maximum number of threads of a block whose lanes share rows, and of a block that shares a row.
        each: Vectors per thread of a block that shares a row.
        part: Bytes of a row per block, if other blocks can hold the rest.
        edges: Maximum number of edge elements per thread; 0 if rows have none.
        kept: Bytes per vector in a row that one warp processes, if more than ``vector``.
        longest: Vectors per lane in many rows that are longer than a warp usually processes; 0 for the default.
        at_once: Bytes of a row that its lanes read at once if each has LANE_VECTORS vectors.
    """
    most, at_most = threads[0], min(threads[1], chip.threads)
    # The last of 257 classes does not count as a vector of its own.
    vectors = classes // vec_size if edges > 1 else -(-classes // vec_size)
    # If there are many rows, a warp also processes longer ones.
    usual = WARP_VECTORS_EDGES if edges > 1 else WARP_VECTORS if edges else WARP_VECTORS_WHOLE
    of_lane = WARP_VECTORS if rows < MANY_ROWS or vectors <= WARP * WARP_VECTORS else longest or usual
    width = power_of_two(max(1, -(-2 * (vec_size - 1) // edges) if edges else 0, -(-vectors // of_lane)))
    few, room = rows <= MANY_BLOCKS // 2, chip.shared - DECLARED_BYTES
    if width <= WARP and not (few and vectors > 2 * WARP):
        while width < WARP and vectors > LEAST_VECTORS * width and rows * width < FEW_LANES:
            width *= 2
        while edges and width < 2 * (vec_size - 1) and rows * width < MANY_LANES:
            width *= 2
        while width * vector < at_once and vectors >= 2 * LANE_VECTORS * width:
            width *= 2
        of_thread = _stage(classes // vec_size, width) * max(vector, kept)
        return "subwarp", width, max(WARP, min(most, 1 << (room // of_thread).bit_length() - 1)), 1
    cluster, part = 1, min(part, room)
    while chip.clusters and cluster < MAX_CLUSTER:
        # More blocks per row if rows are few and each thread still has enough to do.
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
    """True if rows of ``classes`` classes follow each other without gaps."""
    return _evenly_apart(classes, sizes, strides)


def thread_per_row_threads(classes: int, vec_size: int, itemsize: int) -> int:
    """Number of threads of a block of which each keeps ``vec_size`` rows in shared memory.

    It is below THREAD_PER_ROW_THREADS_MIN if the rows do not fit.
    """
    fits = SHARED_BYTES // max(1, classes * vec_size * itemsize)
    return min(THREADS if vec_size == 1 else THREAD_PER_ROW_THREADS, power_of_two(fits + 1) // 2)


def _thread_per_row(classes: int, vec_size: int, itemsize: int) -> tuple[int, int, int]:
    """Rows per thread, threads of a block and bytes of shared memory, for strided classes. Precondition: a row fits."""
    vec_size = min(vec_size, ROWS_PER_THREAD)
    while vec_size * itemsize >= 4 or vec_size == 1:
        threads = thread_per_row_threads(classes, vec_size, itemsize)
        if threads >= THREAD_PER_ROW_THREADS_MIN:
            return vec_size, threads, classes * vec_size * itemsize * threads
        if vec_size == 1:
            break
        vec_size //= 2
    raise ValueError(f"cupylosses: rows of {classes} strided classes are copied first")
