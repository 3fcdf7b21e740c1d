"""Launch geometry of log-probabilities: the assignment of rows to threads. Pure functions of integers.

subwarp          consecutive lanes of a warp share a row
block            the threads of a block share a row; in forward with few rows, a cluster of blocks does
thread_per_row   many rows of few classes: each lane processes a row, and its warp copies all its rows together

No row stays on chip between the directions. Forward reads each logit once; backward reads each logit once more, and the
coefficients that forward stored for the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from cupylosses.engines.softmax.layout import (
    MANY_BLOCKS,
    MAX_CLUSTER,
    RowStrides,
    power_of_two,
    row_pitch,
    space_rank,
    space_words,
    vector_size,
    whole_rows,
)
from cupylosses.engines.strides import merge
from cupylosses.jit.gpu import DECLARED_BYTES, WARP, Chip

#: Number of vectors of a row per thread while more threads are available; that of forward in at least MANY_ROWS rows,
#: where fewer threads save more of what a row costs each of them; and number of vectors a thread loads at once.
VECTORS = 8
FORWARD_VECTORS = 16
MANY_ROWS = 4096
TOGETHER = 4
#: Maximum number of edges per lane: single elements at the ends of rows that vectors do not divide.
EDGES = 4
#: Maximum number of classes for which threads read single elements: so short a row is all partial vectors.
FEW_CLASSES = 32
#: Layout "thread_per_row", which needs MANY_ROWS: maximum number of classes, in 16 bits and otherwise, and threads of a
#: block.
LANE_CLASSES = (64, 48)
LANE_THREADS = 128
#: Threads of a block in layout "subwarp", and maximum number of threads of a block in layout "block". Larger
#: blocks process second derivatives of long rows in less time.
SUBWARP_THREADS = 256
BLOCK_THREADS = 256
SECOND_BLOCK_THREADS = 1024


@dataclass(frozen=True)
class Layout:
    """Launch geometry of rows.

    ``words`` is the kernel's ``RowSpace``, ``rank`` its maximum number of dimensions, ``edges`` the maximum number of
    edges per thread, and ``shared`` the bytes of shared memory of a block.
    """

    kind: str
    vec_size: int
    width: int
    threads: int
    cluster: int
    rank: int
    words: list[int]
    rows: int
    classes: int
    edges: int = 0
    shared: int = 0

    @property
    def rows_at_once(self) -> int:
        """Number of rows that a block processes at once."""
        return 1 if self.kind == "block" else self.threads // self.width


def layout(
    shape: Sequence[int],
    classes: int,
    logits: RowStrides,
    gradients: RowStrides,
    others: Sequence[Sequence[int]],
    chip: Chip,
    forward: bool,
) -> Layout:
    """Returns the layout of values or gradients of rows.

    ``others`` are the strides of labels, mask and results. Precondition: classes are contiguous.
    """
    sizes, strides = merge(shape, [logits.strides, gradients.strides, *others, (0,) * len(shape)])
    rows = prod(shape)
    words, rank = space_words(rows, classes, (1, 1, 0, 0, 0, 0), sizes, strides), space_rank(rows, sizes)
    shared = LANE_THREADS * row_pitch(classes, logits.itemsize) * logits.itemsize
    many, few = rows >= MANY_ROWS, classes <= LANE_CLASSES[logits.itemsize > 2]
    if few and many and len(sizes) <= 1 and shared <= chip.shared - DECLARED_BYTES:
        return Layout("thread_per_row", 1, 1, LANE_THREADS, 1, rank, words, rows, classes, 0, shared)
    vec_size = 16 // logits.itemsize
    if classes <= FEW_CLASSES:
        vec_size = 1
    elif not forward:
        vec_size = vector_size(sizes, strides, logits, gradients, True)
    tensors, of_tensors = ((logits,), strides[:1]) if forward else ((logits, gradients), strides[:2])
    edges = 0 if whole_rows(classes, vec_size, tensors, sizes, of_tensors) else 2 * (vec_size - 1)
    vectors_of_thread = FORWARD_VECTORS if forward and many else VECTORS
    kind, width, threads, cluster = _threads(
        rows, -(-classes // vec_size), vectors_of_thread, edges, chip.clusters and forward
    )
    per_thread = 0 if edges == 0 else 1 if edges <= width else EDGES
    return Layout(kind, vec_size, width, threads, cluster, rank, words, rows, classes, per_thread)


def second_layout(
    shape: Sequence[int],
    classes: int,
    logits: RowStrides,
    results: RowStrides,
    others: Sequence[Sequence[int]],
    tangents: RowStrides,
    chip: Chip,
) -> Layout:
    """Returns the layout of second derivatives of rows, along tangents with any strides.

    ``results`` are the gradients; the logits, if none are written. Precondition: their classes are contiguous.
    """
    sizes, strides = merge(shape, [logits.strides, results.strides, *others, tangents.strides])
    rows = prod(shape)
    class_strides = (1, 1, 0, 0, 0, tangents.class_stride)
    words, rank = space_words(rows, classes, class_strides, sizes, strides), space_rank(rows, sizes)
    shared = 2 * LANE_THREADS * row_pitch(classes, logits.itemsize) * logits.itemsize
    fits = len(sizes) <= 1 and tangents.class_stride == 1 and shared <= chip.shared - DECLARED_BYTES
    if classes <= LANE_CLASSES[logits.itemsize > 2] and rows >= MANY_ROWS and fits:
        return Layout("thread_per_row", 1, 1, LANE_THREADS, 1, rank, words, rows, classes, 0, shared)
    vec_size = 1 if classes <= FEW_CLASSES else 16 // logits.itemsize
    edges = 0 if whole_rows(classes, vec_size, (results,), sizes, strides[1:2]) else 2 * (vec_size - 1)
    vectors = -(-classes // vec_size)
    kind, width, threads, cluster = _threads(rows, vectors, VECTORS, edges, chip.clusters, SECOND_BLOCK_THREADS)
    per_thread = 0 if edges == 0 else 1 if edges <= width else EDGES
    return Layout(kind, vec_size, width, threads, cluster, rank, words, rows, classes, per_thread)


def _threads(
    rows: int, vectors: int, per_thread: int, edges: int, clusters: bool, most: int = BLOCK_THREADS
) -> tuple[str, int, int, int]:
    """Returns the kind of layout, the threads per row and per block, and the blocks of a cluster.

    ``most`` is the maximum number of threads of a block that processes one row at a time.
    """
    width = power_of_two(max(1, -(-edges // EDGES), -(-vectors // per_thread)))
    if width <= WARP:
        return "subwarp", width, SUBWARP_THREADS, 1
    cluster = 1
    while clusters and cluster < MAX_CLUSTER and rows * cluster * 2 <= MANY_BLOCKS and vectors > cluster * most:
        cluster *= 2
    threads = max(2 * WARP, min(power_of_two(-(-vectors // (per_thread * cluster))), most))
    return "block", threads, threads, cluster


def resident_threads(kind: str, compute: str, second: bool = False, capped: bool = False) -> int:
    """Returns the number of resident threads per multiprocessor, for a kind of layout.

    It leaves each thread enough registers for the logits that it loads, in dtype ``compute``. ``second`` derivatives of
    ``capped`` logits need more of them.
    """
    if second and kind == "block":
        return SECOND_BLOCK_THREADS
    return 512 if compute == "float64" or (second and capped) else 1024


def blocks(layout: Layout, processors: int, chip: Chip, resident: int) -> int:
    """Returns the number of blocks that run at once, but no more than there are rows for.

    ``resident`` is the number of resident threads per multiprocessor.
    """
    units = -(-layout.rows // layout.rows_at_once)
    per_processor = resident // layout.threads
    if layout.shared:
        per_processor = max(1, min(per_processor, chip.shared // layout.shared))
    at_once = max(1, processors * per_processor // layout.cluster)
    return max(1, min(units, at_once)) * layout.cluster


def slices(layout: Layout, processors: int) -> int:
    """Returns the number of slices that backward cuts each row into: more than 1 if rows are too few to fill a GPU."""
    most = max(1, -(-layout.classes // layout.vec_size) // (layout.width * TOGETHER))
    return max(1, min(most, -(-4 * processors // max(1, layout.rows))))
