"""Launch geometry of margin losses: which threads process which rows. Pure functions of integers.

subwarp                neighbouring lanes of a warp share a row; with lists of labels, all lanes of a warp do
block                  a block shares a row; if there are few long rows, a cluster of blocks does
warp                   a warp processes a row, unless its list is long: then all warps of the block share the row
thread_per_row         one label, strided classes: a thread processes a row, neighbouring threads neighbouring rows
shared_rows            one label, strided classes: the warps of a block share 32 rows; each processes some classes
thread_per_list        lists, few contiguous classes: a thread processes a row; its warp copies all its rows together
thread_per_list_apart  lists, few strided classes: a thread processes a row, and copies it itself
thread_per_label       one label, few contiguous classes: as thread_per_list
short_lists            lists, some more contiguous classes: lanes of a warp share a row; a warp reads 32 lists together

Vectors are aligned as the gradients are, whose rows may begin at any address. If scores are aligned differently, 16-bit
scores are cut out of two vectors, and other scores are read one by one. Scores with small gaps between classes are read
one by one, too.

Rows with strided classes are read in place in two cases: if there are many rows, adjacent in memory, with one label or
with lists and few classes; and if there are few scores in all. Otherwise scores are first copied, so that their classes
are contiguous.

A row is read once. Only the scores of its labels stay on chip: in registers, or, if there may be more labels than a
warp has lanes, in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

from cupylosses.engines.softmax.layout import (
    MAX_CHUNKS,
    RowStrides,
    power_of_two,
    row_pitch,
    space_rank,
    space_words,
    vector_size,
)
from cupylosses.engines.strides import merge
from cupylosses.jit.gpu import DECLARED_BYTES, WARP, Chip

#: Maximum number of vectors of a row per thread, as long as there are threads for the others: with one label; with one
#: label, in few rows without edges that lanes of a warp share; and with lists. More vectors per thread amortize what a
#: row costs each thread besides its scores.
VECTORS = 8
WHOLE_VECTORS = 4
LIST_VECTORS = 4
#: LONG_VECTORS replaces VECTORS in at least MANY_ROWS rows of one label that WARP threads or more would share. If at
#: most SHARED_BY_WARP threads would share a row, and there are at least ROWS_OF_WARPS rows per such thread, a warp
#: processes each row instead: it waits for no barrier, and other rows keep memory busy.
LONG_VECTORS = 16
ROWS_OF_WARPS = 16
SHARED_BY_WARP = 256
#: Maximum number of edges per thread in many rows of one label; in few rows, a thread has one. Edges are single
#: elements at the ends of rows that vectors do not divide.
EDGES = 4
#: Maximum number of vectors of a row of one label without edges for which each lane processes a single vector.
SINGLE_VECTORS = 8
#: Maximum number of vectors in flight per thread: TOGETHER, or CURVED_TOGETHER if gradients of a nonlinear hinge are
#: written, with registers for one vector less. Maximum number of their elements: with one label, in rows that a warp or
#: a block shares; and with lists (a quarter of LIST_ELEMENTS in float64).
TOGETHER = 8
CURVED_TOGETHER = 7
ELEMENTS = 32
BLOCK_ELEMENTS = 64
LIST_ELEMENTS = 16
#: Maximum number of classes for which vectors must divide a row: otherwise it would consist of nothing but edges.
FEW_CLASSES = 32
#: Threads of a block whose warps process rows of their own; and of such a block if each warp has many rows and sorts no
#: lists: neighbouring rows are then in flight together.
SUBWARP_THREADS = 128
MANY_CHUNKS_THREADS = 512
#: Threads of a block that shares a row: maximum; maximum if there are more than MANY_ROWS rows, which are several for
#: each multiprocessor (barriers of smaller blocks are cheaper; doubled for 16-bit scores with one label); and minimum.
MAX_BLOCK_THREADS = 512
MANY_ROWS_THREADS = 128
MANY_ROWS = 512
MIN_BLOCK_THREADS = 64
#: Threads per multiprocessor, which limits the registers of a thread: by default, and in kernels of a value per row of
#: one label, whose threads have fewer vectors in flight.
RESIDENT_THREADS = 512
RESIDENT_OF_VALUES = 768
#: Maximum number of chunks of a value per row of one label: an H100 runs as many warps.
VALUE_CHUNKS = 3168
#: Threads per multiprocessor in layouts whose threads read strided classes: no more is in flight than what each thread
#: has in flight.
RESIDENT_APART = {"thread_per_row": 1024, "shared_rows": 1024}
#: Threads per multiprocessor in layouts whose threads process rows that their warp has copied to shared memory: nothing
#: else is in flight meanwhile.
RESIDENT_OF_WARPS = {"thread_per_list": 768, "thread_per_list_apart": 768, "thread_per_label": 768, "short_lists": 512}
#: Maximum number of partial sums of such rows, and of the count of rows: the last block adds them alone, and an H100
#: runs a warp for each. If warps had to process a second chunk, the time would double.
CHUNKS_OF_WARPS = 3 << 10
#: Number of chunks that one block of MANY_CHUNKS_THREADS processes at once: a single block needs no ticket.
ONE_BLOCK_CHUNKS = MANY_CHUNKS_THREADS // WARP
#: Maximum number of scores in few rows whose speculative gradients assume that all rows count. If they do not, the
#: gradients are written again.
ASSUMED_ELEMENTS = 1 << 20
#: Maximum number of scores, and of classes, for which lanes read and write strided classes in place: copies of so few
#: scores take longer.
GATHERED_ELEMENTS = 1 << 17
GATHERED_CLASSES = 1024
#: Maximum class stride, in bytes, for which scores of other rows are read one by one into vectors of their gradients.
STEP_BYTES = 16
#: Such scores are copied nevertheless if there are at most FEW_ROWS rows and at least MANY_CLASSES classes: a single
#: block would read each row, but all multiprocessors copy it.
FEW_ROWS = 16
MANY_CLASSES = 1 << 15
#: Minimum number of rows with lists, and minimum bytes of one class of all rows with one label, for which threads read
#: strided classes in place. Reading from a copy and writing through one takes three times the traffic.
APART_LISTS = 8192
APART_BYTES = 8192
#: Rows with strided classes: classes that a thread has in flight; maximum number of warps that share rows; and number
#: of warps up to which rows are shared, as many as an H100 runs.
APART_TOGETHER = 8
SHARING_WARPS = 16
SHARED_UP_TO = 4224
#: Buffers for the rows of a warp in layout "thread_per_label".
BUFFERS = 2
#: Minimum number of rows, maximum number of classes, and maximum number of places for labels, for which one thread
#: processes a row with a list.
THREAD_LISTS = 4096
THREAD_CLASSES = 64
THREAD_PLACES = 64
#: Minimum number of warps whose rows must fit into the shared memory of a multiprocessor in these layouts.
THREAD_WARPS = 6
#: Maximum number of partial sums of rows of one label that lanes share. With short lists and many rows, the number of
#: partial sums is a multiple of it. An H100 runs as many warps, so that each processes the same number of rows.
WARP_CHUNKS = 2112
#: Bytes of a `ListRecord` of ``kernels/row_margin/short_lists.cuh``.
RECORD_BYTES = 240
#: Minimum number of classes of rows with short lists that begin at any address: vectors of a row extend into its
#: neighbours.
SHORT_CLASSES = 16
#: Maximum number of classes for which one thread processes a row of one label: with 16-bit scores, and with others.
LABEL_CLASSES = (64, 32)
#: Maximum number of classes for which a warp processes a row though its list may have to be sorted; and maximum number
#: of labels that are sorted.
WARP_CLASSES = 256
MAX_SORTED = 4096
#: Minimum number of rows for which single warps process rows with short lists, although blocks sort long lists.
MANY_LISTS = 2048
#: Maximum number of blocks of a cluster that shares a row of one label. A cluster grows as long as there are at most
#: CLUSTERED_BLOCKS blocks in all, of MAX_BLOCK_THREADS, and at least CLUSTERED_VECTORS vectors per thread.
MAX_CLUSTER = 8
CLUSTERED_BLOCKS = 64
CLUSTERED_VECTORS = 4
#: Maximum number of vectors of a row per thread in second derivatives, as long as there are threads for the others.
SECOND_VECTORS = 4


@dataclass(frozen=True)
class Layout:
    """Launch geometry of rows.

    Attributes:
        kind: One of the layouts at the top of this module.
        vec_size: Elements of a vector.
        width: Threads that share a row.
        threads: Threads of a block.
        chunks: Number of chunks of rows, each of which leaves a partial sum.
        rank: Number of dimensions of rows that the kernel's ``RowSpace`` has space for.
        words: The kernel's ``RowSpace``.
        together: Vectors that a thread has in flight.
        capacity: Labels of a row that fit into shared memory.
        mask_words: Words of shared memory with a bit for each class; 0 if there are none.
        shared: Bytes of shared memory of a block.
        scores: Placement of scores: one of ScoresOfRows of ``kernels/row_margin/row_margin.cuh``.
        apart: True if the classes of the scores or of the gradients are strided.
        edges: Maximum number of edges of a row per thread.
        cluster: Number of blocks that share a row, if ``kind`` is "block".
    """

    kind: str
    vec_size: int
    width: int
    threads: int
    chunks: int
    rank: int
    words: list[int]
    together: int
    capacity: int = 0
    mask_words: int = 0
    shared: int = 0
    scores: str = "alike"
    apart: bool = False
    edges: int = 1
    cluster: int = 1

    def reader(self, writes: bool, itemsize: int, fewer: bool = False) -> tuple[str, int]:
        """Returns the placement of scores for a kernel, which ``writes`` gradients or not, and the number of vectors
        that a thread has in flight: half as many if ``fewer``.
        """
        if self.kind == "short_lists":
            return self.scores, self.together
        # Without gradients, vectors are aligned as the scores are.
        scores = self.scores if writes or self.apart else "alike"
        # A shifted vector takes the registers of two vectors, and so do 16-bit elements that are read one by one.
        doubled = scores == "shifted" or (scores == "gathered" and itemsize == 2)
        return scores, max(1, self.together // ((2 if doubled else 1) * (2 if fewer else 1)))

    def blocks(self, processors: int, most: int = RESIDENT_THREADS) -> int:
        """Returns the number of blocks of a launch: as many as run at once, but no more than there are chunks for."""
        per_block = 1 if self.kind in ("block", "warp", "shared_rows") else self.threads // WARP
        at_once = processors * resident(self.kind, self.threads, most) // self.cluster
        return max(1, min(-(-self.chunks // per_block), at_once)) * self.cluster

    @property
    def records(self) -> int:
        """Number of recorded ``grad_output`` values: one per chunk and block of a cluster."""
        return self.chunks * self.cluster

    def without_sums(self, rows: int) -> Layout:
        """Returns the layout for a value per row. Without a sum over rows, any number of chunks will do, and one large
        block has no advantage over several.
        """
        warps = -(-rows // (WARP // self.width))
        return replace(self, threads=SUBWARP_THREADS, chunks=max(1, min(warps, VALUE_CHUNKS)))


def resident(kind: str, threads: int, most: int = RESIDENT_THREADS) -> int:
    """Returns the number of blocks per multiprocessor, which runs ``most`` threads, except in kinds with a number of
    their own.
    """
    return max(1, (RESIDENT_OF_WARPS | RESIDENT_APART).get(kind, most) // threads)


def read_apart(shape: Sequence[int], scores: RowStrides, gradients: RowStrides, lists: bool) -> bool:
    """True if threads read strided classes in place: if there are many rows that are adjacent in memory."""
    rows = prod(shape)
    neighbours = [scores.strides[d] == gradients.strides[d] == 1 for d, n in enumerate(shape) if n > 1]
    return (rows >= APART_LISTS if lists else rows * scores.itemsize >= APART_BYTES) and any(neighbours)


def warps_of_row(rows: int, classes: int) -> int:
    """Returns the number of warps that share rows with strided classes."""
    warps = 1
    while warps < SHARING_WARPS and -(-rows // WARP) * warps < SHARED_UP_TO and 2 * warps * APART_TOGETHER <= classes:
        warps *= 2
    return warps


def gathered(shape: Sequence[int], classes: int) -> bool:
    """True if there are so few scores with strided classes that lanes read and write them in place."""
    return classes <= GATHERED_CLASSES and prod(shape) * classes <= GATHERED_ELEMENTS


def reads_steps(shape: Sequence[int], classes: int, scores: RowStrides, gradients: RowStrides, lists: bool) -> bool:
    """True if scores with a small class stride are read one by one, while their gradients are written as vectors. For
    rows with few classes, copies are faster.
    """
    if gradients.class_stride != 1 or not 1 < scores.class_stride <= STEP_BYTES // scores.itemsize:
        return False
    copied = 16 // scores.itemsize * WARP if lists else LABEL_CLASSES[scores.itemsize > 2]
    of_few_blocks = prod(shape) <= FEW_ROWS and classes >= MANY_CLASSES
    return classes > copied and not of_few_blocks and not gathered(shape, classes)


def takes_lists(rows: int, classes: int, labels: int, itemsize: int, linear: bool, chip: Chip) -> int:
    """Returns the threads of a block in which each thread processes a row with a list; 0 if another layout is used."""
    if labels > THREAD_PLACES or not 1 < classes <= THREAD_CLASSES or rows < THREAD_LISTS:
        return 0
    each, room = lane_bytes(classes, labels, itemsize, linear), chip.shared - DECLARED_BYTES - 8
    # A block takes at most a third of shared memory, so that several share a multiprocessor.
    threads = max(WARP, min(SUBWARP_THREADS, power_of_two(room // 3 // each + 1) // 2))
    return threads if THREAD_WARPS * WARP * each <= chip.shared and threads * each <= room else 0


def layout(
    shape: Sequence[int],
    classes: int,
    scores: RowStrides,
    gradients: RowStrides,
    others: Sequence[Sequence[int]],
    label_stride: int,
    labels: int | None,
    linear: bool,
    chip: Chip,
) -> Layout:
    """Returns the layout of rows of a given shape.

    ``others`` are the strides of labels, mask and results over the rows. ``labels`` is the number of places of a list,
    or None if rows have one label; the places of a list have the stride ``label_stride``. ``linear`` is True if the
    hinge is the excess itself. Precondition: classes are contiguous unless they are read in place (`read_apart`,
    `gathered`, `reads_steps`).
    """
    sizes, strides = merge(shape, [scores.strides, gradients.strides, *others, (0,) * len(shape)])
    rows = prod(shape)
    vec_size = 1
    strides_of_classes = (scores.class_stride, gradients.class_stride, label_stride, 0, 0, 0)
    words = space_words(rows, classes, strides_of_classes, sizes, strides)
    apart = classes > 1 and not scores.class_stride == gradients.class_stride == 1
    if apart and labels is None and read_apart(shape, scores, gradients, False):
        chunks, rank = max(1, min(-(-rows // WARP), MAX_CHUNKS)), space_rank(rows, sizes)
        warps = warps_of_row(rows, classes)
        kind, threads = ("shared_rows", warps * WARP) if warps > 1 else ("thread_per_row", SUBWARP_THREADS)
        return Layout(kind, 1, 1, threads, chunks, rank, words, APART_TOGETHER)
    of_lists = 0
    if labels is not None and len(sizes) <= 1 and (not apart or read_apart(shape, scores, gradients, True)):
        of_lists = takes_lists(rows, classes, labels, scores.itemsize, linear, chip)
    if labels is not None and of_lists:
        chunks = max(1, min(-(-rows // WARP), CHUNKS_OF_WARPS))
        rank, shared = space_rank(rows, sizes), of_lists * lane_bytes(classes, labels, scores.itemsize, linear) + 8
        kind = "thread_per_list_apart" if apart else "thread_per_list"
        return Layout(kind, 1, 1, of_lists, chunks, rank, words, 1, labels, 0, shared)
    full, lie = 16 // scores.itemsize, "alike"
    if classes > 1 and not apart:
        vec_size = vector_size(sizes, strides, scores, gradients, True)
        if vec_size < full and classes > FEW_CLASSES and all([x > 0 for x in strides[0]]):
            vec_size, lie = full, "shifted" if scores.itemsize == 2 else "gathered"
    elif apart and reads_steps(shape, classes, scores, gradients, labels is not None):
        vec_size, lie = full, "gathered"
    whole = _whole(classes, vec_size, strides[:2], (scores, gradients))
    if apart and lie == "gathered":
        whole = _whole(classes, vec_size, strides[1:2], (gradients,))
    few = 1 < classes <= LABEL_CLASSES[scores.itemsize > 2]
    if labels is None and few and not apart and rows >= THREAD_LISTS and len(sizes) <= 1:
        each, threads = BUFFERS * row_pitch(classes, scores.itemsize) * scores.itemsize, SUBWARP_THREADS
        while threads > WARP and threads * each > chip.shared - DECLARED_BYTES:
            threads //= 2
        chunks = max(1, min(-(-rows // WARP), CHUNKS_OF_WARPS))
        rank = space_rank(rows, sizes)
        return Layout("thread_per_label", 1, 1, threads, chunks, rank, words, 1, 0, 0, threads * each)
    while classes <= FEW_CLASSES and not whole:
        vec_size //= 2
        whole = _whole(classes, vec_size, strides[:2], (scores, gradients))
    vectors = -(-classes // vec_size)
    most_threads = MANY_ROWS_THREADS if rows > MANY_ROWS else MAX_BLOCK_THREADS
    edges = least = 2 * (vec_size - 1)
    many = labels is None and rows >= THREAD_LISTS
    if many:
        least = 0 if whole else -(-edges // EDGES)
    width = power_of_two(max(1, least, -(-vectors // VECTORS)))
    if labels is None and vec_size == full and width >= WARP and rows >= MANY_ROWS:
        of_warp = WARP < width <= SHARED_BY_WARP and rows >= ROWS_OF_WARPS * width
        width = WARP if of_warp else power_of_two(max(least, -(-vectors // LONG_VECTORS)))
    if whole and not many and width <= WARP // 4:
        width = power_of_two(max(1, -(-vectors // WHOLE_VECTORS)))
    single = labels is None and whole and classes > 1 and vectors <= SINGLE_VECTORS
    if single:
        width = power_of_two(vectors)
    kind, elements = "subwarp", ELEMENTS if labels is None else LIST_ELEMENTS * 16 // max(4, scores.itemsize) ** 2
    capacity = mask_words = shared = 0
    cluster = 1
    if labels is None:
        threads = SUBWARP_THREADS
        if width > WARP:
            if rows > MANY_ROWS and scores.itemsize == 2:
                most_threads *= 2
            kind, threads = "block", min(max(width, MIN_BLOCK_THREADS), most_threads)
            width, elements, cluster = threads, BLOCK_ELEMENTS, _cluster(rows, vectors, threads, chip)
    else:
        sorted_at_all = labels >= WARP
        threads = SUBWARP_THREADS
        if width > WARP or (sorted_at_all and classes > WARP_CLASSES):
            width = power_of_two(-(-vectors // LIST_VECTORS))
            kind, threads = "block", min(max(width, MIN_BLOCK_THREADS), most_threads)
            width = threads
            if sorted_at_all and rows >= MANY_LISTS:
                kind, width = "warp", WARP
        else:
            width = WARP
        if sorted_at_all:
            of_block = 1 if kind == "warp" else threads // width
            room = (chip.shared - DECLARED_BYTES) // of_block
            mask_words = -(-classes // 32)
            if mask_words * 4 > room // 2:
                mask_words = 0
            most = WARP_CLASSES if kind == "subwarp" else MAX_SORTED
            score = max(4, scores.itemsize)
            fits = (room - 4 * mask_words - 64) // (16 + score)
            capacity = min(labels, most, fits) if mask_words else 0
            shared = of_block * group_bytes(capacity, mask_words, score)
    lists = None
    if labels is not None and linear and not apart and rows >= THREAD_LISTS and len(sizes) <= 1:
        lists = _short_lists(classes, lie, strides, scores, gradients)
    if lists is not None:
        lie_of_lists, lanes, words_of_row = lists
        needed = -(-shared // 16) * 16 + threads * (RECORD_BYTES + 4 * words_of_row)
        # If fewer warps fit into shared memory, one warp per row is as fast.
        if RESIDENT_THREADS // threads * needed <= chip.shared:
            chunks = min(-(-rows // (WARP * WARP_CHUNKS)) * WARP_CHUNKS, MAX_CHUNKS, rows)
            rank, kind = space_rank(rows, sizes), "short_lists"
            sizes_of = (lanes, capacity, mask_words, needed)
            return Layout(kind, full, 1, threads, chunks, rank, words, *sizes_of, lie_of_lists)
    at_once = {"subwarp": WARP // width, "block": 1, "warp": threads // WARP}[kind]
    most_chunks = WARP_CHUNKS if labels is None and kind == "subwarp" else MAX_CHUNKS
    chunks = max(1, min(-(-rows // at_once), most_chunks))
    one_block = threads // WARP < chunks <= ONE_BLOCK_CHUNKS
    if kind == "subwarp" and not shared and (chunks == most_chunks or one_block):
        threads = MANY_CHUNKS_THREADS
    rank, together = space_rank(rows, sizes), 1 if single else min(elements // vec_size, TOGETHER)
    memory = (capacity, mask_words, shared)
    edges = 1 if whole else -(-edges // width) or 1
    return Layout(kind, vec_size, width, threads, chunks, rank, words, together, *memory, lie, apart, edges, cluster)


def second_layout(
    shape: Sequence[int],
    classes: int,
    scores: RowStrides,
    gradients: RowStrides,
    tangents: RowStrides,
    others: Sequence[Sequence[int]],
    chip: Chip,
) -> Layout:
    """Returns the layout of second derivatives of rows of one label, for any strides. ``others`` are the strides of
    labels, mask and results.
    """
    rows, read = prod(shape), (scores, gradients, tangents)
    sizes, strides = merge(shape, [scores.strides, gradients.strides, *others, tangents.strides])
    words = space_words(
        rows, classes, (scores.class_stride, gradients.class_stride, 0, 0, 0, tangents.class_stride), sizes, strides
    )
    of_scores, rank = (strides[0], strides[1], strides[-1]), space_rank(rows, sizes)
    vec_size = 1
    if all([x.class_stride == 1 for x in read]):
        vec_size = max(1, 16 // scores.itemsize)
        while vec_size > 1 and (
            classes % vec_size
            or any([x.misalignment % (vec_size * x.itemsize) for x in read])
            or any([step % vec_size for s in of_scores for step in s])
        ):
            vec_size //= 2
    elif classes > 1:
        # A thread processes a row, and neighbouring threads process neighbouring rows.
        chunks = max(1, min(-(-rows // WARP), MAX_CHUNKS))
        return Layout("subwarp", 1, 1, SUBWARP_THREADS, chunks, rank, words, 1)
    vectors = -(-classes // vec_size)
    width, kind, threads = min(WARP, power_of_two(-(-vectors // SECOND_VECTORS))), "subwarp", SUBWARP_THREADS
    cluster = 1
    if vectors > SECOND_VECTORS * WARP and (rows < MANY_ROWS or vectors > 4 * SECOND_VECTORS * WARP):
        kind = "block"
        width = threads = min(MAX_BLOCK_THREADS, power_of_two(-(-vectors // SECOND_VECTORS)))
        cluster = _cluster(rows, vectors, threads, chip)
    chunks = max(1, min(rows if kind == "block" else -(-rows // (WARP // width)), MAX_CHUNKS))
    return Layout(kind, vec_size, width, threads, chunks, rank, words, 1, cluster=cluster)


def lane_bytes(classes: int, labels: int, itemsize: int, linear: bool) -> int:
    """Returns the bytes of shared memory of a lane that processes a row and its list: the scores in ``PackedRows`` of
    ``kernels/softmax/rows_of_warp.cuh``, and a ``LaneList`` of ``kernels/row_margin/thread_per_list.cuh``.
    """
    return row_pitch(classes, itemsize) * itemsize + -(-classes // 32) * 4 + labels * (2 if linear else 9)


def _cluster(rows: int, vectors: int, threads: int, chip: Chip) -> int:
    """Returns the number of blocks that share a row: with few rows, one block per row would leave multiprocessors
    idle.
    """
    cluster = 1
    while (
        chip.clusters
        and threads == MAX_BLOCK_THREADS
        and cluster < MAX_CLUSTER
        and 2 * cluster * rows <= CLUSTERED_BLOCKS
        and 2 * cluster * threads * CLUSTERED_VECTORS <= vectors
    ):
        cluster *= 2
    return cluster


def _whole(classes: int, vec_size: int, strides: Sequence[Sequence[int]], tensors: Sequence[RowStrides]) -> bool:
    """True if all rows of these tensors begin and end at the boundary of a vector."""
    starts = [x.misalignment % (vec_size * x.itemsize) for x in tensors]
    return not (classes % vec_size or any(starts) or any(x % vec_size for s in strides for x in s))


def _short_lists(
    classes: int, lie: str, strides: Sequence[Sequence[int]], scores: RowStrides, gradients: RowStrides
) -> tuple[str, int, int] | None:
    """Returns the geometry of layout "short_lists": the placement of scores, the lanes that share a row, and the words
    with a bit for each element of its vectors. Returns None if the layout does not support these rows.
    """
    most, before, outside = 16 // scores.itemsize, 0, 0
    if scores.itemsize > 4:
        return None
    if _whole(classes, most, strides[:2], (scores, gradients)):
        lie = "whole"
    else:
        if classes < SHORT_CLASSES or any(abs(x) < classes for x in strides[0]):
            return None
        # Up to a multiple of ``step``, all rows begin at the same distance from the boundary of a vector. ``before`` is
        # the largest such distance.
        step = gcd(most, *strides[1])
        before = most - step + gradients.misalignment // gradients.itemsize % step
        outside = 2 * (most - 1)
    vectors = -(-(before + classes) // most)
    return (lie, power_of_two(vectors), -(-(classes + outside) // 32)) if vectors <= WARP else None


def group_bytes(capacity: int, mask_words: int, score: int) -> int:
    """Returns the bytes of ``ListMemory`` of ``kernels/row_margin/row_margin.cuh`` for scores of ``score`` bytes."""
    of_labels = (capacity + 1) * 8 + capacity * score + capacity * 4 + (capacity + 1) * 4 if capacity else 0
    return -(-(of_labels + mask_words * 4) // 8) * 8
