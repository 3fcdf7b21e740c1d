"""Launch geometry of losses of rows of scores: which threads take which rows. Pure functions of integers.

subwarp    neighbouring lanes of a warp share a row; of lists of labels all lanes of a warp
block      a block shares a row

A row is read once, and only its labels stay on chip: their scores in registers, or in shared memory where there may be
more than a warp has lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from cupylosses.engines.softmax.layout import MAX_CHUNKS, RowStrides, power_of_two, space_rank, space_words, vector_size
from cupylosses.engines.strides import merge
from cupylosses.jit.gpu import DECLARED_BYTES, WARP, Chip

#: Vectors of a row that a thread takes, as long as there are threads to take the others: of one label, and of a list.
VECTORS = 8
LIST_VECTORS = 4
#: Vectors that a thread reads together, of one label, and elements of lists.
TOGETHER = 4
LIST_ELEMENTS = 8
#: Classes below which a thread reads single elements: a row would be nothing but edges of vectors.
FEW_CLASSES = 32
#: Threads of a block whose warps take rows of their own, and of one that shares a row: at most, and at most if there
#: are rows for all multiprocessors several times over, whose barriers are then cheaper; and at least.
SUBWARP_THREADS = 128
MAX_BLOCK_THREADS = 512
MANY_ROWS_THREADS = 128
MANY_ROWS = 512
MIN_BLOCK_THREADS = 64
#: Threads that a multiprocessor runs at once, for one label and for lists, by the registers that they are given.
RESIDENT_THREADS = 640
LIST_RESIDENT_THREADS = 512
#: Classes of rows that a warp takes though their lists may be sorted, at most, and labels that are sorted at most.
WARP_CLASSES = 256
MAX_SORTED = 4096


@dataclass(frozen=True)
class Layout:
    """Launch geometry of rows: ``words`` is the kernel's ``RowSpace``; ``rank`` the dimensions that it has room for.
    ``together`` are the vectors that a thread reads at once. ``capacity`` are the labels that shared memory holds of a
    row, ``mask_words`` the words with a bit for each class, and ``shared`` the bytes of a block.
    """

    kind: str
    vec_size: int
    width: int
    threads: int
    chunks: int
    rank: int
    words: list[int]
    together: int
    resident: int
    capacity: int = 0
    mask_words: int = 0
    shared: int = 0

    def blocks(self, processors: int) -> int:
        """Blocks of a launch: as many as run at once, and no more than there are chunks for."""
        per_block = self.threads // WARP if self.kind == "subwarp" else 1
        return max(1, min(-(-self.chunks // per_block), processors * max(1, self.resident // self.threads)))


def layout(
    shape: Sequence[int],
    classes: int,
    scores: RowStrides,
    gradients: RowStrides,
    others: Sequence[Sequence[int]],
    label_stride: int,
    labels: int | None,
    chip: Chip,
) -> Layout:
    """The layout of rows of a given shape, whose classes are contiguous. ``others`` are the strides of labels, mask and
    results. Lists have so many ``labels``, which lie ``label_stride`` apart; None for one label.
    """
    sizes, strides = merge(shape, [scores.strides, gradients.strides, *others, (0,) * len(shape)])
    rows = prod(shape)
    vec_size = 1
    if classes > FEW_CLASSES:
        vec_size = vector_size(sizes, strides, scores, gradients, True)
    vectors = -(-classes // vec_size)
    most_threads = MANY_ROWS_THREADS if rows > MANY_ROWS else MAX_BLOCK_THREADS
    width = power_of_two(max(1, 2 * (vec_size - 1), -(-vectors // VECTORS)))
    kind, resident, together = "subwarp", RESIDENT_THREADS, TOGETHER
    capacity = mask_words = shared = 0
    if labels is None:
        threads = SUBWARP_THREADS
        if width > WARP:
            kind, threads = "block", min(max(width, MIN_BLOCK_THREADS), most_threads)
            width = threads
    else:
        resident, together = LIST_RESIDENT_THREADS, max(1, min(LIST_ELEMENTS // vec_size, 2 * TOGETHER))
        sorted_at_all = labels > WARP
        threads = SUBWARP_THREADS
        if width > WARP or (sorted_at_all and classes > WARP_CLASSES):
            width = power_of_two(-(-vectors // LIST_VECTORS))
            kind, threads = "block", min(max(width, MIN_BLOCK_THREADS), most_threads)
            width = threads
        else:
            width = WARP
        if sorted_at_all:
            of_block = threads // width
            room = (chip.shared - DECLARED_BYTES) // of_block
            mask_words = -(-classes // 32)
            if mask_words * 4 > room // 2:
                mask_words = 0
            most = WARP_CLASSES if kind == "subwarp" else MAX_SORTED
            score = max(4, scores.itemsize)
            fits = (room - 4 * mask_words - 64) // (16 + score)
            capacity = min(labels, most, fits) if mask_words else 0
            shared = of_block * group_bytes(capacity, mask_words, score)
    chunks = max(1, min(-(-rows // (1 if kind == "block" else WARP // width)), MAX_CHUNKS))
    words = space_words(rows, classes, (1, 1, label_stride, 0, 0, 0), sizes, strides)
    return Layout(
        kind,
        vec_size,
        width,
        threads,
        chunks,
        space_rank(rows, sizes),
        words,
        together,
        resident,
        capacity,
        mask_words,
        shared,
    )


def group_bytes(capacity: int, mask_words: int, score: int) -> int:
    """Bytes of ``ListMemory`` of ``kernels/row_margin/row_margin.cuh``, of scores of ``score`` bytes."""
    of_labels = (capacity + 1) * 8 + capacity * score + capacity * 4 + (capacity + 1) * 4 if capacity else 0
    return -(-(of_labels + mask_words * 4) // 8) * 8
