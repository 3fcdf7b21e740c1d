"""Launch geometry of log-probabilities: the assignment of rows to threads. Pure functions of integers.

subwarp    consecutive lanes of a warp share a row
block      the threads of a block share a row; in forward with few rows, a cluster of blocks does

No row stays on chip. Forward reads each logit once; backward reads each logit once more, and the coefficients that
forward stored for the row.
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
    space_rank,
    space_words,
    vector_size,
)
from cupylosses.engines.strides import merge
from cupylosses.jit.gpu import WARP, Chip

#: Number of vectors of a row per thread while more threads are available, and number of vectors a thread loads at once.
VECTORS = 8
TOGETHER = 4
#: Maximum number of classes for which threads read single elements: so short a row is all partial vectors.
FEW_CLASSES = 32
#: Threads of a block in layout "subwarp", and maximum number of threads of a block in layout "block".
SUBWARP_THREADS = 256
BLOCK_THREADS = 256


@dataclass(frozen=True)
class Layout:
    """Launch geometry of rows. ``words`` is the kernel's ``RowSpace``, ``rank`` its maximum number of dimensions."""

    kind: str
    vec_size: int
    width: int
    threads: int
    cluster: int
    rank: int
    words: list[int]
    rows: int
    classes: int

    @property
    def rows_at_once(self) -> int:
        """Number of rows that a block processes at once."""
        return self.threads // self.width if self.kind == "subwarp" else 1


def layout(
    shape: Sequence[int],
    classes: int,
    logits: RowStrides,
    gradients: RowStrides,
    others: Sequence[Sequence[int]],
    chip: Chip,
    forward: bool,
) -> Layout:
    """Chooses the layout for rows of a given shape.

    ``others`` are the strides of labels, mask and results. Precondition: classes are contiguous.
    """
    sizes, strides = merge(shape, [logits.strides, gradients.strides, *others, (0,) * len(shape)])
    rows = prod(shape)
    vec_size = 16 // logits.itemsize
    if classes <= FEW_CLASSES:
        vec_size = 1
    elif not forward:
        vec_size = vector_size(sizes, strides, logits, gradients, True)
    kind, width, threads, cluster = _threads(rows, classes, vec_size, chip.clusters and forward)
    words = space_words(rows, classes, (1, 1, 0, 0, 0, 0), sizes, strides)
    return Layout(kind, vec_size, width, threads, cluster, space_rank(rows, sizes), words, rows, classes)


def _threads(rows: int, classes: int, vec_size: int, clusters: bool) -> tuple[str, int, int, int]:
    vectors = -(-classes // vec_size)
    width = power_of_two(max(1, 2 * (vec_size - 1), -(-vectors // VECTORS)))
    if width <= WARP:
        return "subwarp", width, SUBWARP_THREADS, 1
    cluster = 1
    while (
        clusters and cluster < MAX_CLUSTER and rows * cluster * 2 <= MANY_BLOCKS and vectors > cluster * BLOCK_THREADS
    ):
        cluster *= 2
    threads = max(2 * WARP, min(power_of_two(-(-vectors // (VECTORS * cluster))), BLOCK_THREADS))
    return "block", threads, threads, cluster


def resident_threads(compute: str) -> int:
    """Returns the number of resident threads per multiprocessor.

    It leaves each thread enough registers for the logits that it loads, in dtype ``compute``.
    """
    return 512 if compute == "float64" else 1024


def blocks(layout: Layout, processors: int, compute: str) -> int:
    """Returns the number of blocks of forward: as many as run at once, but no more than there are rows for."""
    units = -(-layout.rows // layout.rows_at_once)
    at_once = max(1, processors * (resident_threads(compute) // layout.threads) // layout.cluster)
    return max(1, min(units, at_once)) * layout.cluster


def slices(layout: Layout, processors: int) -> int:
    """Returns the number of slices that backward cuts each row into: more than 1 if rows are too few to fill a GPU."""
    most = max(1, -(-layout.classes // layout.vec_size) // (layout.width * TOGETHER))
    return max(1, min(most, -(-4 * processors // max(1, layout.rows))))
