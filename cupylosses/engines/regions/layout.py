"""Launch geometry of region losses. Pure functions of integers.

Which voxels a thread takes, and with it the order of additions, follows from the loss, sizes and dtypes alone: strides
decide only if a vector of voxels is read at once (``wide``) or element by element. Who writes which gradients adds
nothing up, and depends on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, isqrt, prod

from cupylosses.engines.strides import MAX_RANK, dimension_words, merge
from cupylosses.jit.gpu import WARP

#: Threads of a block of ``kernels/regions/``, and voxels of a tile whose logits stay in memory (``kTile`` of
#: ``sum_in_tiles``).
THREADS = 256
#: Threads of a block that writes gradients: blocks of few threads hide each other's first loads.
GRADIENT_THREADS = 128
#: Threads of the one block that evaluates all groups with their tangents.
GROUP_THREADS = 512
TILE = 512
#: Classes that a thread keeps in registers, by the bytes of a number of the arithmetic: of labels, and of a target per
#: class, which takes as many registers again.
IN_REGISTERS = {4: (20, 20), 8: (6, 4)}
#: Lanes of a warp that share the classes of a voxel, at most (``LaneGroup``); and classes that each has in registers at
#: most, by the bytes of a number: of losses, and of second derivatives.
LANES = 16
OF_LANES = {4: (20, 12), 8: (4, 2)}
#: Registers for the logits of such a lane in second derivatives, with labels and with targets per class, at most; and
#: voxels of a vector, at most.
SECOND_LANE_VECTOR_REGISTERS = (14, 20)
LANE_MAX_VECTOR = 2
#: Registers of 4 bytes for the logits of a thread, at most; those of logits of 4 bytes or more if a voxel has no more
#: than the loss of its label, which leaves other registers free; those with a target per class, of lanes that share
#: voxels too; and voxels of a vector, at most.
VECTOR_REGISTERS = 20
WIDE_VECTOR_REGISTERS = 28
DENSE_VECTOR_REGISTERS = 32
MAX_VECTOR = 4
#: Voxels that a thread takes from a chunk, at least and at most.
PER_THREAD = (8, 64)
#: Multiprocessors whose blocks all have one chunk if the bounds above allow it. Chunks decide the order of additions,
#: so this is the number of an H100 on every GPU.
PROCESSORS = 132
#: Classes up to which logits of four bytes and more lie in tiles if a voxel has a label alone: lanes share more.
TILED_CLASSES = 63
#: Voxels of a tile in shared memory, at most and at least, and bytes that it may take with the sums of the lanes.
SHARED_TILE = (256, 32)
TILE_BYTES = 60 << 10
#: Voxels of a tile whose logits lie in shared memory as they are stored (``StoredTile``), at most, when sums are added
#: up, and at least; and bytes that it may take with all that belongs to it, above the least number of voxels, when sums
#: are added up and when gradients are written.
STORED_TILES = (256, 32)
STORED_BYTES = 60 << 10
STORED_GRADIENT_BYTES = 36 << 10
#: Blocks of a multiprocessor that registers are limited for, with such tiles.
STORED_BLOCKS = 3
#: Chunks of a sample from which on they are added up by segments, and up to which these are one segment; and segments,
#: at most, each of which takes one of the ``COUNTERS`` of a workspace.
SEGMENTED_CHUNKS = (4, 32)
SEGMENTS = 64
#: Chunks of tiles, about.
TILE_CHUNKS = 528
#: Numbers of the input that a thread writes the gradients of, at least, and blocks of a multiprocessor, at most.
GRADIENT_NUMBERS = 28
GRADIENT_BLOCKS = 64
#: Doubles of a group's record (``GroupRecord``).
RECORD = 6
#: Doubles of such a record in second derivatives, whose numbers have tangents.
SECOND_RECORD = 10
#: Classes that a thread keeps in registers in second derivatives, by the bytes of a number of the arithmetic: of labels
#: that are kept apart (``kLabelApart``), of other labels or with a loss of every class besides, and of a target per
#: class. Blocks of a multiprocessor that write products of these.
SECOND_IN_REGISTERS = {4: (14, 20, 16), 8: (6, 3, 2)}
SECOND_BLOCKS = 3
#: Registers for the logits of a thread in second derivatives, at most, without a loss of voxels and with one; tangents
#: take as many again.
SECOND_VECTOR_REGISTERS = (14, 14)
#: Words of a vector whose classes lie side by side, from which on the lanes of a warp move their vectors together
#: (``PackedStretch``), by the bytes of a logit; and the same of second derivatives, where those of 16 bits never are.
PACKED_WORDS = {2: 6, 4: 5, 8: 5}
SECOND_PACKED_WORDS = {4: 8, 8: 8}
#: Shared memory that the kernels declare, at most.
DECLARED_BYTES = 24 << 10
#: Shared memory of a block beside that which it asks for: what the kernels declare that add up classes in registers,
#: and what CUDA keeps.
RESERVED_BYTES = 6 << 10
#: Blocks of a multiprocessor, by the number of classes in registers up to which so many have room; of others 2.
RESIDENT = ((2, 4), (5, 3))
#: Blocks of a multiprocessor, by the number of logits of a thread up to which so many have room in second derivatives.
SECOND_RESIDENT = ((6, 4),)
#: Logits of a thread in double up to which two blocks have room.
FEW_DOUBLES = 4


@dataclass(frozen=True)
class VoxelStream:
    """One array: strides of its samples, its voxels, its classes; bytes per element, address modulo 16. ``vector`` is
    False for masks, which are read element by element.
    """

    strides: tuple[int, ...]
    classes: int = 0
    itemsize: int = 1
    misalignment: int = 0
    vector: bool = True


@dataclass(frozen=True)
class Layout:
    """Launch geometry: ``words`` is the kernel's ``VoxelSpace``; ``held`` the number of classes that a thread has in
    registers, or 0, and ``lanes`` that of threads that share a voxel; ``many`` if voxels have several dimensions; a
    sample has ``chunks`` of ``per_chunk`` vectors, or tiles. ``tile`` is the number of voxels of a tile in shared
    memory, or 0, and ``gradient_tile`` that of one when gradients are written; with ``word`` > 0 logits lie there as
    they are stored, and are copied in words of so many. ``packed`` says for input and gradients if a voxel's classes
    lie side by side, and its neighbours behind them.
    """

    samples: int
    voxels: int
    classes: int
    held: int
    vec_size: int
    wide: bool
    many: bool
    chunks: int
    per_chunk: int
    words: list[int]
    tile: int = 0
    packed: tuple[bool, bool] = (False, False)
    gradient_tile: int = 0
    word: int = 0
    lanes: int = 1

    @property
    def coefficients(self) -> int:
        """Numbers that a block keeps of its sample when gradients are written (``SharedCoeffs``)."""
        return 3 * (self.held * self.lanes or self.classes)

    @property
    def per_segment(self) -> int:
        """Chunks of a segment, which a block adds up (``add_up_segment``)."""
        least, one = SEGMENTED_CHUNKS
        if not self.word or self.chunks < least or self.samples > SEGMENTS:
            return 1
        if self.chunks <= one:
            return self.chunks
        return -(-self.chunks // min(SEGMENTS // self.samples, isqrt(self.chunks)))

    @property
    def numbers(self) -> int:
        """Sums of a chunk."""
        return 3 * self.classes + 3


def layout(
    shape: Sequence[int],
    classes: int,
    streams: Sequence[VoxelStream],
    number: int,
    dense: bool,
    room: int,
    heavy: bool = False,
    second: tuple[int, int] | None = None,
    stored: bool = False,
    shared: bool = False,
) -> Layout:
    """The layout of voxels of ``shape``, samples first. ``streams`` are input, target, mask and the gradients of the
    first two, in the order of the kernel; ``number`` is the size of a number of the arithmetic; ``room`` the bytes of
    shared memory that a block may ask for; ``heavy`` if voxels have losses of every class, or smoothed labels. Of
    second derivatives, ``second`` are the classes that a thread keeps in registers and the registers for its logits, at
    most, and the gradient of the input has one stream with its tangent. ``stored`` if a tile's logits may lie in shared
    memory as they are stored; ``shared`` if lanes may share a voxel, of which there are no tiles.
    """
    samples, *rest = shape
    voxels = prod(rest)
    most, lanes = second[0] if second else IN_REGISTERS[number][dense], 1
    if shared and most < classes <= OF_LANES[number][bool(second)] * LANES:
        most, lanes = OF_LANES[number][bool(second)], 2
        while most * lanes < classes:
            lanes *= 2
    held = -(-classes // lanes) if classes <= most * lanes else 0
    roomy = streams[0].itemsize >= 4 and not (dense or heavy)
    registers = WIDE_VECTOR_REGISTERS if roomy else VECTOR_REGISTERS
    if second:
        registers = SECOND_LANE_VECTOR_REGISTERS[dense] if lanes > 1 else second[1]
    elif dense or lanes > 1:
        registers = DENSE_VECTOR_REGISTERS
    widest = LANE_MAX_VECTOR if lanes > 1 else MAX_VECTOR
    vec_size = _vec_size(voxels, held, streams[: 1 + dense], registers, widest) if held else 1
    sizes, strides = merge(rest, [x.strides[1:] for x in streams])
    packed = False, False
    if len(sizes) == 1 and lanes == 1 and (held or stored or not second):
        places = (streams[0], strides[0][0]), (streams[3], strides[3][0])
        of_input, of_gradients = (_is_packed(x, s, classes, vec_size) for x, s in places)
        packed = (of_input and of_gradients,) * 2 if second else (of_input, of_gradients)
    others = [(x, s[0]) for i, (x, s) in enumerate(zip(streams, strides)) if not (packed[0] and i in (0, 3))]
    wide = vec_size == 1 or (len(sizes) == 1 and all([_is_wide(x, s, vec_size) for x, s in others]))
    tile = gradient_tile = word = 0
    if stored and not held:
        tile, gradient_tile = stored_tiles(samples, voxels, classes, streams[0].itemsize, number, bool(second), room)
        copied = [(streams[i], strides[i][0]) for i in (0, 3)]
        word = _word(voxels, copied) if tile and len(sizes) == 1 and not packed[0] else min(1, tile)
    elif not (held or second or shared):
        tile = shared_tile(classes, number, room)
        gradient_tile = GRADIENT_THREADS if tile else 0
    if not tile and not (held and wide and all(packed)):
        packed = False, False
    blocks = second_resident(held * vec_size, number, heavy) if second else resident(held, number, heavy=True)
    wave = PROCESSORS * (STORED_BLOCKS if word else blocks)
    threads = THREADS // lanes if held else 0
    chunks, per_chunk = _chunks(samples, voxels, threads, vec_size, wave if held or word else TILE_CHUNKS, tile)
    many = len(sizes) > 1
    words = [samples, voxels, classes, *(x.classes for x in streams), *(x.strides[0] for x in streams)]
    words += dimension_words(sizes, strides, MAX_RANK if many else 1)
    found = Layout(samples, voxels, classes, held, vec_size, wide, many, chunks, per_chunk, words, tile, packed)
    return replace(found, gradient_tile=gradient_tile, word=word, lanes=lanes)


def _vec_size(voxels: int, held: int, streams: Sequence[VoxelStream], room: int, widest: int) -> int:
    """Voxels of a thread at a time: as many as registers hold and divide the number of voxels."""
    size = widest
    while size > 1 and (
        voxels % size
        or sum([held * max(1, size * x.itemsize // 4) for x in streams]) > room
        or any([size * x.itemsize > 16 for x in streams])
    ):
        size //= 2
    return size


def _is_wide(x: VoxelStream, step: int, vec_size: int) -> bool:
    """True if vectors are contiguous and aligned."""
    if not x.vector:
        return True
    word = min(16, vec_size * x.itemsize)
    places = (x.misalignment, x.classes * x.itemsize, x.strides[0] * x.itemsize)
    return step == 1 and all([y % word == 0 for y in places])


def _is_packed(x: VoxelStream, step: int, classes: int, vec_size: int) -> bool:
    """True if a sample is one contiguous stretch of voxels of ``classes``, aligned to the words that divide
    ``vec_size`` of them (``PackedVector``).
    """
    word = gcd(16, vec_size * classes * x.itemsize)
    places = (x.misalignment, x.strides[0] * x.itemsize)
    return x.classes == 1 and step == classes and all([y % word == 0 for y in places])


def packed_words(held: int, vec_size: int, itemsize: int) -> tuple[int, int]:
    """Words of a vector whose classes lie side by side, and elements of a word (``kEach`` of ``PackedVector``)."""
    elements = held * vec_size
    each = gcd(elements, 16 // itemsize)
    return elements // each, each


def packed_bytes(held: int, vec_size: int, itemsize: int) -> int:
    """Bytes of shared memory of a thread whose vectors pass through there (``PackedStretch``)."""
    words, each = packed_words(held, vec_size, itemsize)
    return (words | 1) * each * itemsize


def _word(voxels: int, streams: Sequence[tuple[VoxelStream, int]]) -> int:
    """Voxels of a word in which the logits of a class are copied to a tile, and their tangents: 16 bytes at most."""
    itemsize = streams[0][0].itemsize
    word = max(1, 16 // itemsize)
    while word > 1 and (voxels % word or not all([_is_wide(x, s, word) for x, s in streams])):
        word //= 2
    return word if word * itemsize >= 4 else 1


def stored_tiles(
    samples: int, voxels: int, classes: int, itemsize: int, number: int, second: bool, room: int
) -> tuple[int, int]:
    """Voxels of a tile of stored logits when sums are added up, and when gradients are written; 0 if there is no room.
    Few voxels are spread over all multiprocessors.
    """
    most, least = STORED_TILES
    needed = classes, itemsize, number, second

    def chosen(tile: int, bytes_of: Callable[..., int], limit: int) -> int:
        while tile > least and (bytes_of(*needed, tile) > limit or samples * -(-voxels // tile) < PROCESSORS):
            tile //= 2
        return tile if bytes_of(*needed, tile) <= room else 0

    sums = chosen(most, stored_sums_bytes, min(STORED_BYTES, room))
    gradients = chosen(GRADIENT_THREADS, stored_gradient_bytes, min(STORED_GRADIENT_BYTES, room))
    return (sums, gradients) if sums and gradients else (0, 0)


def _stored_bytes(classes: int, itemsize: int, second: bool, tile: int) -> int:
    """Bytes of a ``StoredTile``, at most."""
    return classes * (tile * itemsize + 16) * (1 + second)


def stored_sums_bytes(classes: int, itemsize: int, number: int, second: bool, tile: int) -> int:
    """Bytes of ``memory`` of ``sum_in_stored_tiles``."""
    of_labels = WARP if second or tile >= STORED_TILES[0] else WARP // 2
    totals, lanes = -(-3 * classes // 2) * 16 * (1 + second), classes * number * (of_labels + (1 + second) * WARP // 4)
    return totals + lanes + _stored_bytes(classes, itemsize, second, tile)


def stored_gradient_bytes(classes: int, itemsize: int, number: int, second: bool, tile: int) -> int:
    """Bytes of ``numbers`` of ``write_stored_tiles``."""
    return -(-3 * classes // 4) * 4 * number * (1 + second) + _stored_bytes(classes, itemsize, second, tile)


def shared_tile(classes: int, number: int, room: int) -> int:
    """Voxels of a tile in shared memory when sums are added up; 0 if there is no room. GPUs with less than 99 KiB of
    shared memory may add up in another order.
    """
    most, least = SHARED_TILE
    if tile_gradient_bytes(classes, number) > room:
        return 0
    while most >= least and sums_bytes(classes, number, most) > min(TILE_BYTES, room):
        most //= 2
    return most if most >= least else 0


def sums_bytes(classes: int, number: int, tile: int) -> int:
    """Bytes of ``memory`` of ``sum_in_shared_tiles``."""
    return -(-24 * classes // 16) * 16 + classes * number * (3 * WARP + tile + 1)


def tile_gradient_bytes(classes: int, number: int) -> int:
    """Bytes of ``numbers`` of ``write_tile_gradients``."""
    return (-(-3 * classes // 4) * 4 + classes * (GRADIENT_THREADS + 1)) * number


def _chunks(samples: int, voxels: int, threads: int, vec_size: int, wave: int, tile: int) -> tuple[int, int]:
    """Chunks of a sample, and vectors, or tiles, of each: of ``wave`` blocks, each has one. ``threads`` of a block have
    a vector each, or none.
    """
    if not threads:
        tiles = -(-voxels // (tile or TILE))
        per_chunk = max(1, -(-samples * tiles // wave))
        return max(1, -(-tiles // per_chunk)), per_chunk
    # Chunks are a multiple of warps, not of blocks: of few samples no chunk is left for a second wave.
    vectors = voxels // vec_size
    least, most = (threads * -(-x // vec_size) for x in PER_THREAD)
    few = 0 < 4 * samples <= wave
    wanted = -(-vectors // (wave // samples if few else -(-wave // max(1, samples))))
    per_chunk = WARP * -(-min(max(wanted, least), most) // WARP)
    return max(1, -(-vectors // per_chunk)), per_chunk


def columns_of_sums(held: int, label_apart: bool, lanes: int = 1) -> int:
    """Columns of shared memory by which a block adds up its threads' sums of ``held`` classes: up to 32 at a time, and
    fewer of more than four lanes that share a voxel. If labels are kept apart, which such lanes do not, hits and misses
    of each class are there from the start.
    """
    if label_apart and lanes == 1:
        return max(2 * held, min(WARP, held + 3))
    return min(WARP * min(lanes, 4) // lanes, 3 * held + 3)


def gradient_chunks(x: Layout, processors: int) -> tuple[int, int]:
    """Chunks of a sample, each of one block, when gradients are written, and vectors of each."""
    vectors, tile = x.voxels // x.vec_size, x.gradient_tile or GRADIENT_THREADS // x.lanes
    tiles = max(1, -(-vectors // tile))
    least = -(-GRADIENT_NUMBERS // ((x.held or x.classes) * x.vec_size))
    turns = min(tiles, max(least, -(-x.samples * tiles // (processors * GRADIENT_BLOCKS))))
    return -(-tiles // turns), turns * tile


def staged_bytes(held: int, vec_size: int, logits: int, labels: int) -> int:
    """Bytes of shared memory for two vectors of a thread (``StagedVectors``), by the sizes of logits and labels."""
    return 2 * (held * vec_size * logits + max(4, vec_size * labels))


def has_room(columns: int, staged: int, shared: int) -> bool:
    """True if shared memory has room for two blocks that add up, with so many bytes of columns and vectors of each
    thread.
    """
    return 2 * (THREADS * (columns + staged) + RESERVED_BYTES) <= shared


def staged_gradient_blocks(held: int) -> int:
    """Blocks of a multiprocessor that write gradients of logits which come through shared memory."""
    return 6 if held <= 14 else 5


def gradient_piece(x: Layout, processors: int) -> int:
    """Vectors of a chunk that one of these blocks writes the gradients of: in all, the blocks are two waves."""
    pieces = max(1, 2 * staged_gradient_blocks(x.held) * processors // (x.samples * x.chunks))
    return GRADIENT_THREADS * -(-x.per_chunk // (pieces * GRADIENT_THREADS))


def resident(held: int, number: int, heavy: bool) -> int:
    """Blocks of :data:`THREADS` that registers are limited for, of a multiprocessor; ``heavy`` with a loss of voxels
    besides.
    """
    if held == 0 and number == 4:
        return 3 - heavy
    if number == 8:
        return 2
    found = next((blocks for classes, blocks in RESIDENT if held <= classes), 2)
    return max(2, found - heavy)


def second_resident(logits: int, number: int, heavy: bool) -> int:
    """Blocks of :data:`THREADS` that registers are limited for, of a multiprocessor, when ``logits`` of a thread and
    their tangents are in registers: more if these are few, whose loads are short. ``heavy`` as in :func:`layout`.
    """
    if number == 8:
        return 2 if 0 < logits <= FEW_DOUBLES and not heavy else 1
    return 2 if heavy else next((blocks for most, blocks in SECOND_RESIDENT if 0 < logits <= most), 2)
