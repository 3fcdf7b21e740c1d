"""Launch geometry of losses of rows of scores: which threads take which rows. Pure functions of integers.

subwarp         neighbouring lanes of a warp share a row; of lists of labels all lanes of a warp
block           a block shares a row, or a cluster of blocks a long one where rows are few
warp            a warp takes a row, unless its list is long: then all warps of the block share it
thread_per_row  a thread takes a row of one label whose classes lie apart, and its neighbours the rows next to it
shared_rows     likewise, but the warps of a block share 32 rows: each takes some of the classes
thread_per_list a thread takes a row of a list and few contiguous classes; its warp moves all its rows together
short_lists     lanes of a warp share a row of a list and some more classes; the warp reads 32 lists together
thread_per_list_apart likewise, of classes that lie apart, which each thread moves itself
thread_per_label likewise, of one label

Vectors are those of the gradients, whose rows may begin anywhere. Where scores lie otherwise, those of 16 bits are cut
out of two vectors; others, and those whose classes lie a little apart, are read one by one.

Rows of classes that lie apart are read in place where there are many, next to each other, with one label or with lists
of few classes, and where there are few scores in all; all others are first copied with their classes contiguous.

A row is read once, and only its labels stay on chip: their scores in registers, or in shared memory where there may be
more than a warp has lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

from cupylosses.engines.softmax.layout import (
    MAX_CHUNKS,
    RowStrides,
    power_of_two,
    space_rank,
    space_words,
    vector_size,
)
from cupylosses.engines.strides import merge
from cupylosses.jit.gpu import DECLARED_BYTES, WARP, Chip

#: Vectors of a row that a thread takes, as long as there are threads to take the others: of one label, also in few rows
#: without edges that a warp shares, and of a list. What a row costs besides its scores is paid by each thread.
VECTORS = 8
WHOLE_VECTORS = 4
LIST_VECTORS = 4
#: Vectors of a thread in MANY_ROWS rows of one label that WARP threads or more would share. If there are ROWS_OF_WARPS
#: rows for each thread that would share one, and no more than SHARED_BY_WARP of these, a warp takes the row: it waits
#: for no barrier, and other rows keep memory busy.
LONG_VECTORS = 16
ROWS_OF_WARPS = 16
SHARED_BY_WARP = 256
#: Edges of a row of one label that a thread takes, at most.
EDGES = 4
#: The most vectors of a row of one label without edges whose lanes take a single vector each.
SINGLE_VECTORS = 8
#: Vectors that a thread reads together, at most, and their elements: of one label in rows that a warp shares and in
#: those that a block does, and of lists (a quarter in float64). Gradients of a hinge that is not linear have registers
#: for one vector less.
TOGETHER = 8
CURVED_TOGETHER = 7
ELEMENTS = 32
BLOCK_ELEMENTS = 64
LIST_ELEMENTS = 16
#: Classes below which vectors must divide a row: it would be nothing but edges.
FEW_CLASSES = 32
#: Threads of a block whose warps take rows of their own, and of such a block where each warp has many rows and sorts no
#: lists: neighbouring rows are then under way together. Threads of a block that shares a row: at most, and at most if
#: there are rows for all multiprocessors several times over, whose barriers are then cheaper (twice as many if scores
#: have 16 bits, and one label); and at least.
SUBWARP_THREADS = 128
MANY_CHUNKS_THREADS = 512
MAX_BLOCK_THREADS = 512
MANY_ROWS_THREADS = 128
MANY_ROWS = 512
MIN_BLOCK_THREADS = 64
#: Threads that a multiprocessor runs at once, by the registers that they are given; and those of a value per row of one
#: label, with fewer vectors in flight each.
RESIDENT_THREADS = 512
RESIDENT_OF_VALUES = 768
#: Chunks of these, at most: an H100 has as many warps.
VALUE_CHUNKS = 3168
#: Threads where each takes classes of a row that lie apart: what is under way is what it has in flight.
RESIDENT_APART = {"thread_per_row": 1024, "shared_rows": 1024}
#: Threads where each takes a row that its warp has moved to shared memory: nothing else is under way meanwhile.
RESIDENT_OF_WARPS = {"thread_per_list": 768, "thread_per_list_apart": 768, "thread_per_label": 768, "short_lists": 512}
#: Partial sums of such rows, and of the number of rows that count, at most: the last block adds them up alone, and an
#: H100 has a warp for each. A warp that takes a second chunk would double the time.
CHUNKS_OF_WARPS = 3 << 10
#: Chunks that one block of so many threads takes at once: a block that waits for no other saves the ticket.
ONE_BLOCK_CHUNKS = MANY_CHUNKS_THREADS // WARP
#: Scores of few rows, at most, whose gradients assume that all rows count. If that is wrong they are written again.
ASSUMED_ELEMENTS = 1 << 20
#: Scores of rows whose classes lie apart, at most, that lanes read and write in place, and classes: copies of so few
#: take longer.
GATHERED_ELEMENTS = 1 << 17
GATHERED_CLASSES = 1024
#: Bytes between neighbouring classes of other rows, at most, that are read one by one to vectors of their gradients.
STEP_BYTES = 16
#: Rows with such a step that are copied, at most, and classes of them, at least: a block reads each of them alone, all
#: multiprocessors copy them.
FEW_ROWS = 16
MANY_CLASSES = 1 << 15
#: Rows of lists from which on threads take them in place, and bytes of a class of rows of one label. The copies that
#: others are read from and written to take three times the traffic.
APART_LISTS = 8192
APART_BYTES = 8192
#: Classes that a thread reads together, warps that share rows at most, and warps up to which rows are shared: an H100
#: runs as many.
APART_TOGETHER = 8
SHARING_WARPS = 16
SHARED_UP_TO = 4224
#: Places for the rows of a warp where a thread takes each and has one label.
BUFFERS = 2
#: Rows of lists from which on a thread takes each of them, classes and places for labels that it takes, at most.
THREAD_LISTS = 4096
THREAD_CLASSES = 64
THREAD_PLACES = 64
#: Warps of a multiprocessor that take such rows, at least: of longer rows fewer have room in shared memory.
THREAD_WARPS = 6
#: Partial sums of rows of one label that lanes share, at most; those of rows of short lists are a multiple of it, if
#: there are so many. An H100 has as many warps, which take the same number of rows. Bytes of a `ListRecord` of
#: ``kernels/row_margin/short_lists.cuh``.
WARP_CHUNKS = 2112
RECORD_BYTES = 240
#: Classes of such rows, at least, if they begin anywhere: vectors of a row reach into its neighbours.
SHORT_CLASSES = 16
#: Classes of rows of one label that a thread takes, at most: of 16 bits, and of others.
LABEL_CLASSES = (64, 32)
#: Classes of rows that a warp takes though their lists may be sorted, at most, and labels that are sorted at most.
WARP_CLASSES = 256
MAX_SORTED = 4096
#: Rows from which on warps take those of short lists, though blocks sort long ones.
MANY_LISTS = 2048
#: Blocks of a cluster that shares a row of one label, at most: as long as there are so many blocks in all, of
#: MAX_BLOCK_THREADS, and so many vectors for each thread.
MAX_CLUSTER = 8
CLUSTERED_BLOCKS = 64
CLUSTERED_VECTORS = 4
#: Vectors of a row of second derivatives that a thread takes, as long as there are threads to take the others.
SECOND_VECTORS = 4


@dataclass(frozen=True)
class Layout:
    """Launch geometry of rows: ``words`` is the kernel's ``RowSpace``; ``rank`` the dimensions that it has room for.
    ``together`` are the vectors that a thread reads at once. ``capacity`` are the labels that shared memory holds of a
    row, ``mask_words`` the words with a bit for each class, and ``shared`` the bytes of a block. ``scores`` is
    one of ScoresOfRows of ``kernels/row_margin/row_margin.cuh``; ``apart`` if their classes lie apart. A row of a block
    is shared by a ``cluster`` of so many.
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
        """The placement of scores for a kernel that may write gradients, and vectors that a thread reads together, half
        as many if ``fewer``.
        """
        if self.kind == "short_lists":
            return self.scores, self.together
        # Without gradients, vectors are those of the scores.
        scores = self.scores if writes or self.apart else "alike"
        # A shifted vector takes the registers of two, as do elements of 16 bits that are read one by one.
        doubled = scores == "shifted" or (scores == "gathered" and itemsize == 2)
        return scores, max(1, self.together // ((2 if doubled else 1) * (2 if fewer else 1)))

    def blocks(self, processors: int, most: int = RESIDENT_THREADS) -> int:
        """Blocks of a launch: as many as run at once, and no more than there are chunks for."""
        per_block = 1 if self.kind in ("block", "warp", "shared_rows") else self.threads // WARP
        at_once = processors * resident(self.kind, self.threads, most) // self.cluster
        return max(1, min(-(-self.chunks // per_block), at_once)) * self.cluster

    @property
    def records(self) -> int:
        """Records of the scale of gradients: one for each chunk and block of a cluster."""
        return self.chunks * self.cluster

    def without_sums(self, rows: int) -> Layout:
        """The layout of a value per row. Nothing is added up, so that any number of chunks will do, and one block is no
        better than several.
        """
        warps = -(-rows // (WARP // self.width))
        return replace(self, threads=SUBWARP_THREADS, chunks=max(1, min(warps, VALUE_CHUNKS)))


def resident(kind: str, threads: int, most: int = RESIDENT_THREADS) -> int:
    """Blocks of a multiprocessor, by their threads, of which it runs so many but for some kinds."""
    return max(1, (RESIDENT_OF_WARPS | RESIDENT_APART).get(kind, most) // threads)


def read_apart(shape: Sequence[int], scores: RowStrides, gradients: RowStrides, lists: bool) -> bool:
    """True if threads read rows whose classes lie apart in place: many, next to each other."""
    rows = prod(shape)
    neighbours = [scores.strides[d] == gradients.strides[d] == 1 for d, n in enumerate(shape) if n > 1]
    return (rows >= APART_LISTS if lists else rows * scores.itemsize >= APART_BYTES) and any(neighbours)


def warps_of_row(rows: int, classes: int) -> int:
    """Warps that share rows whose classes lie apart."""
    warps = 1
    while warps < SHARING_WARPS and -(-rows // WARP) * warps < SHARED_UP_TO and 2 * warps * APART_TOGETHER <= classes:
        warps *= 2
    return warps


def gathered(shape: Sequence[int], classes: int) -> bool:
    """True if rows whose classes lie apart are so few that lanes read and write them in place."""
    return classes <= GATHERED_CLASSES and prod(shape) * classes <= GATHERED_ELEMENTS


def reads_steps(shape: Sequence[int], classes: int, scores: RowStrides, gradients: RowStrides, lists: bool) -> bool:
    """True if vectors of gradients are read one by one from scores whose classes lie a little apart; of rows of few
    classes copies are faster.
    """
    if gradients.class_stride != 1 or not 1 < scores.class_stride <= STEP_BYTES // scores.itemsize:
        return False
    copied = 16 // scores.itemsize * WARP if lists else LABEL_CLASSES[scores.itemsize > 2]
    of_few_blocks = prod(shape) <= FEW_ROWS and classes >= MANY_CLASSES
    return classes > copied and not of_few_blocks and not gathered(shape, classes)


def takes_lists(rows: int, classes: int, labels: int, itemsize: int, linear: bool, chip: Chip) -> int:
    """Threads of a block in which each takes a row of a list; 0 if others take the rows."""
    if labels > THREAD_PLACES or not 1 < classes <= THREAD_CLASSES or rows < THREAD_LISTS:
        return 0
    each, room = lane_bytes(classes, labels, itemsize, linear), chip.shared - DECLARED_BYTES - 8
    # Several blocks share a multiprocessor.
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
    """The layout of rows of a given shape, whose classes are contiguous unless they are `read_apart`. ``others`` are
    the strides of labels, mask and results. Lists have so many ``labels``, which lie ``label_stride`` apart; None for
    one label. ``linear`` if the hinge is the excess itself.
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
        # With fewer warps, those that have a row each are as fast.
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
    """The layout of second derivatives of rows of one label, of any strides. ``others`` are the strides of labels, mask
    and results.
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
        # Neighbouring threads take neighbouring rows.
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


def row_pitch(classes: int, itemsize: int) -> int:
    """Elements between the beginnings of two rows in shared memory: ``kernels/softmax/rows_of_warp.cuh``."""
    return 2 * (classes // 2 | 1) if itemsize == 2 and classes % 2 == 0 else classes | 1


def lane_bytes(classes: int, labels: int, itemsize: int, linear: bool) -> int:
    """Bytes of a lane that takes a row and its list: scores in ``PackedRows`` of ``kernels/softmax/rows_of_warp.cuh``,
    and those of ``LaneList`` of ``kernels/row_margin/thread_per_list.cuh``.
    """
    return row_pitch(classes, itemsize) * itemsize + -(-classes // 32) * 4 + labels * (2 if linear else 9)


def _cluster(rows: int, vectors: int, threads: int, chip: Chip) -> int:
    """Blocks that share a row of so many vectors: a block alone would leave multiprocessors idle."""
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
    """True if all rows of these tensors begin and end with a vector."""
    starts = [x.misalignment % (vec_size * x.itemsize) for x in tensors]
    return not (classes % vec_size or any(starts) or any(x % vec_size for s in strides for x in s))


def _short_lists(
    classes: int, lie: str, strides: Sequence[Sequence[int]], scores: RowStrides, gradients: RowStrides
) -> tuple[str, int, int] | None:
    """The placement of scores, the lanes of a row, and the words with a bit for each place of its vectors, if lanes of
    a warp share rows that are short enough.
    """
    most, before, outside = 16 // scores.itemsize, 0, 0
    if scores.itemsize > 4:
        return None
    if _whole(classes, most, strides[:2], (scores, gradients)):
        lie = "whole"
    else:
        if classes < SHORT_CLASSES or any(abs(x) < classes for x in strides[0]):
            return None
        # Rows begin as far behind a vector as the first one, but for a multiple of this.
        step = gcd(most, *strides[1])
        before = most - step + gradients.misalignment // gradients.itemsize % step
        outside = 2 * (most - 1)
    vectors = -(-(before + classes) // most)
    return (lie, power_of_two(vectors), -(-(classes + outside) // 32)) if vectors <= WARP else None


def group_bytes(capacity: int, mask_words: int, score: int) -> int:
    """Bytes of ``ListMemory`` of ``kernels/row_margin/row_margin.cuh``, of scores of ``score`` bytes."""
    of_labels = (capacity + 1) * 8 + capacity * score + capacity * 4 + (capacity + 1) * 4 if capacity else 0
    return -(-(of_labels + mask_words * 4) // 8) * 8
