"""Launch geometry of region losses, as pure functions of integers.

The loss, sizes and dtypes determine which voxels a thread processes, and with it the order of additions; GPUs with
little shared memory may add up in another order. Strides only decide if a vector of voxels is read at once (``wide``)
or element by element. The distribution of gradients over blocks depends on the GPU: writing them adds nothing up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, isqrt, prod

from cupylosses.engines.strides import MAX_RANK, dimension_words, merge
from cupylosses.jit.gpu import WARP

#: Threads per block of ``kernels/regions/``.
THREADS = 256
#: Threads per block that writes gradients: small blocks hide each other's first loads.
GRADIENT_THREADS = 128
#: Threads of the single block that evaluates all groups with their tangents.
GROUP_THREADS = 512
#: Voxels per tile whose logits stay in global memory (``kTile`` of ``sum_in_tiles``).
TILE = 512
#: Maximum number of classes that a thread keeps in registers, by bytes of an arithmetic number: with labels, and with
#: dense targets, which take as many registers again.
IN_REGISTERS = {4: (20, 20), 8: (6, 4)}
#: Maximum for labels that are handled apart (``kLabelApart``), by bytes of an arithmetic number: without and with a
#: voxel loss of every class. The columns of the sums of two blocks must fit in shared memory.
APART_IN_REGISTERS = {4: (48, 40), 8: (6, 6)}
#: Maximum number of lanes of a warp that share the classes of a voxel (``LaneGroup``).
LANES = 16
#: Maximum number of classes that each of these lanes keeps in registers, by bytes of an arithmetic number: in losses,
#: and in second derivatives.
OF_LANES = {4: (20, 12), 8: (4, 2)}
#: Maximum with labels that are handled apart: in losses without a loss of every class, and in others if with the usual
#: number more than WIDE_LANES lanes would share a voxel. With fewer lanes, those of a warp read longer stretches.
APART_OF_LANES = {4: 28, 8: 4}
#: Maximum number of lanes whose vectors of two voxels fill whole sectors of 4-byte logits; single voxels fill half.
WIDE_LANES = 8
#: Maximum number of registers for the logits of such a lane in second derivatives, with labels and with dense targets.
SECOND_LANE_VECTOR_REGISTERS = (14, 20)
#: Maximum number of voxels in a vector that lanes share.
LANE_MAX_VECTOR = 2
#: Maximum number of 4-byte registers for the logits of a thread.
VECTOR_REGISTERS = 20
#: Maximum for logits of 4 bytes or more if a voxel has at most the loss of its label, which leaves registers free.
WIDE_VECTOR_REGISTERS = 28
#: Maximum for more classes than IN_REGISTERS, if a voxel has at most the loss of its label.
MANY_VECTOR_REGISTERS = 33
#: Maximum with dense targets, and for lanes that share voxels.
DENSE_VECTOR_REGISTERS = 32
#: Maximum for WIDE_LANES lanes and more that share voxels with labels: without and with a voxel loss of every class.
WIDE_LANE_REGISTERS = (56, 40)
#: Maximum number of voxels in a vector.
MAX_VECTOR = 4
#: Minimum and maximum number of voxels of a chunk that a thread processes.
PER_THREAD = (8, 64)
#: Number of multiprocessors that chunks are sized for: each resident block gets one, if the bounds above allow it.
#: Chunks determine the order of additions, so this is the number of an H100 on every GPU.
PROCESSORS = 132
#: Maximum number of classes for which logits of 4 bytes or more are put into tiles if the loss needs only the softmax
#: and the label of a voxel. Lanes share voxels of more classes.
TILED_CLASSES = 63
#: Maximum and minimum number of voxels per tile in shared memory.
SHARED_TILE = (256, 32)
#: Maximum number of bytes of such a tile and the sums of the lanes.
TILE_BYTES = 60 << 10
#: Maximum number (when sums are added up) and minimum number of voxels per tile whose logits are in shared memory as
#: they are stored (``StoredTile``).
STORED_TILES = (256, 32)
#: Maximum number of bytes of a tile above the minimum, with all that belongs to it, when sums are added up.
STORED_BYTES = 60 << 10
#: The corresponding maximum when gradients are written.
STORED_GRADIENT_BYTES = 36 << 10
#: Blocks per multiprocessor that registers are limited for, with such tiles.
STORED_BLOCKS = 3
#: Minimum number of chunks of a sample that are added up by segments, and maximum number that form a single segment.
SEGMENTED_CHUNKS = (4, 32)
#: Maximum number of segments, each of which uses one of the ``COUNTERS`` of a workspace.
SEGMENTS = 64
#: Approximate number of all chunks that consist of tiles, except those of ``StoredTile``.
TILE_CHUNKS = 528
#: Minimum number of input elements whose gradients a thread writes.
GRADIENT_NUMBERS = 28
#: Maximum number of blocks that write gradients per multiprocessor, over all waves of the launch.
GRADIENT_BLOCKS = 64
#: Doubles per record of a group (``GroupRecord``).
RECORD = 6
#: Doubles per record in second derivatives, where numbers have tangents.
SECOND_RECORD = 10
#: Maximum number of classes that a thread keeps in registers in second derivatives, by bytes of an arithmetic number:
#: with labels that are handled apart (``kLabelApart``), with other labels or a loss of every class, and with dense
#: targets.
SECOND_IN_REGISTERS = {4: (14, 20, 16), 8: (6, 3, 2)}
#: Blocks per multiprocessor that registers are limited for when products of second derivatives are written in float32.
SECOND_BLOCKS = 3
#: Maximum number of registers for the logits of a thread in second derivatives, without and with a voxel loss. Tangents
#: take as many again.
SECOND_VECTOR_REGISTERS = (14, 14)
#: Minimum number of words in a packed vector (one with contiguous classes) for which the lanes of a warp move their
#: vectors together (``PackedStretch``), by bytes of a logit.
PACKED_WORDS = {2: 6, 4: 5, 8: 5}
#: Minimum number in second derivatives, where lanes never move 16-bit logits together.
SECOND_PACKED_WORDS = {4: 8, 8: 8}
#: Maximum shared memory that the kernels declare statically.
DECLARED_BYTES = 24 << 10
#: Shared memory of a block besides what it requests: declarations of the kernels that add up classes in registers, and
#: what CUDA reserves.
RESERVED_BYTES = 6 << 10
#: Pairs of a maximum number of classes in registers and the blocks per multiprocessor that then fit; otherwise 2 fit.
RESIDENT = ((2, 4), (5, 3))
#: Pairs of a maximum number of logits per thread and the blocks per multiprocessor that fit in second derivatives.
SECOND_RESIDENT = ((6, 4),)
#: Maximum number of double logits per thread with which two blocks fit.
FEW_DOUBLES = 4


@dataclass(frozen=True)
class VoxelStream:
    """Strides, element size in bytes and address modulo 16 of one array.

    ``strides`` are those of samples and voxels, ``classes`` is that of classes. ``vector`` is False for masks, which
    are read element by element, and for absent arrays.
    """

    strides: tuple[int, ...]
    classes: int = 0
    itemsize: int = 1
    misalignment: int = 0
    vector: bool = True


@dataclass(frozen=True)
class Layout:
    """Launch geometry of a region loss.

    ``words`` has the words of the kernel's ``VoxelSpace``. ``held`` is the number of classes that a thread keeps in
    registers, or 0; ``lanes`` is the number of threads that share a voxel. ``many`` is True if voxels have several
    dimensions. A sample has ``chunks`` chunks of ``per_chunk`` vectors, or tiles. ``tile`` is the number of voxels per
    tile in shared memory, or 0, and ``gradient_tile`` the number when gradients are written. If ``word`` is not 0,
    tiles keep logits as they are stored (``StoredTile``), copied in words of ``word`` elements. ``packed`` has a flag
    for the input and one for its gradients: True if the classes of a voxel are contiguous, and voxels follow each other
    without gaps.
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
        """Number of coefficients that a block keeps for its sample when it writes gradients (``SharedCoeffs``)."""
        return 3 * (self.held * self.lanes or self.classes)

    @property
    def per_segment(self) -> int:
        """Number of chunks per segment, which one block adds up (``add_up_segment``)."""
        least, one = SEGMENTED_CHUNKS
        if not self.word or self.chunks < least or self.samples > SEGMENTS:
            return 1
        if self.chunks <= one:
            return self.chunks
        return -(-self.chunks // min(SEGMENTS // self.samples, isqrt(self.chunks)))

    @property
    def numbers(self) -> int:
        """Number of sums of a chunk."""
        return 3 * self.classes + 3


def classes_in_registers(number: int, dense: bool, apart: bool, heavy: bool, shared: int) -> int:
    """Returns the maximum number of classes that a thread keeps in registers in losses.

    ``apart`` is True for labels that are handled apart. ``shared`` is the number of bytes of shared memory of a
    multiprocessor; the other arguments are those of :func:`layout`.
    """
    usual = IN_REGISTERS[number][dense]
    if not apart:
        return usual
    of_block = shared // 2 - RESERVED_BYTES
    return max(usual, min(APART_IN_REGISTERS[number][heavy], of_block // (2 * THREADS * number)))


def _of_lanes(classes: int, number: int, apart: bool, heavy: bool, second: bool) -> int:
    """Returns the maximum number of classes that each of the lanes that share a voxel keeps in registers."""
    usual = OF_LANES[number][second]
    if apart and not second and (not heavy or classes > usual * WIDE_LANES):
        return APART_OF_LANES[number]
    return usual


def layout(
    shape: Sequence[int],
    classes: int,
    streams: Sequence[VoxelStream],
    number: int,
    dense: bool,
    room: int,
    most: int,
    heavy: bool = False,
    second: int = 0,
    stored: bool = False,
    shared: bool = False,
    apart: bool = False,
) -> Layout:
    """Returns the layout for voxels of ``shape``, samples first.

    ``streams`` are input, target, mask, and the gradients of input and target, in the order of the kernel. ``number``
    is the size of an arithmetic number in bytes. ``room`` is the number of bytes of shared memory that a block may
    request. ``most`` is the maximum number of classes that a thread keeps in registers. ``heavy`` is True for smoothed
    labels, and for voxel losses of every class. ``second`` is given for second derivatives: the maximum number of
    registers for the logits of a thread. There, the gradient of the input and its tangent share a stream. With
    ``stored``, tiles may keep logits in shared memory as they are stored. With ``shared``, lanes may share a voxel, and
    there are no tiles. ``apart`` is True for labels that a thread with all classes of a voxel handles apart.
    """
    samples, *voxel_shape = shape
    voxels, lanes = prod(voxel_shape), 1
    of_lane = _of_lanes(classes, number, apart, heavy, bool(second))
    if shared and most < classes <= of_lane * LANES:
        most, lanes = of_lane, 2
        while most * lanes < classes:
            lanes *= 2
    held = -(-classes // lanes) if classes <= most * lanes else 0
    roomy = streams[0].itemsize >= 4 and not (dense or heavy)
    registers = WIDE_VECTOR_REGISTERS if roomy else VECTOR_REGISTERS
    if apart and not heavy and held > IN_REGISTERS[number][dense]:
        registers = MANY_VECTOR_REGISTERS
    if second:
        registers = SECOND_LANE_VECTOR_REGISTERS[dense] if lanes > 1 else second
    elif dense or lanes > 1:
        registers = WIDE_LANE_REGISTERS[heavy] if apart and lanes >= WIDE_LANES else DENSE_VECTOR_REGISTERS
    widest = LANE_MAX_VECTOR if lanes > 1 else MAX_VECTOR
    vec_size = _vec_size(voxels, held, streams[: 1 + dense], registers, widest) if held else 1
    sizes, strides = merge(voxel_shape, [x.strides[1:] for x in streams])
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
    geometry = Layout(samples, voxels, classes, held, vec_size, wide, many, chunks, per_chunk, words, tile, packed)
    return replace(geometry, gradient_tile=gradient_tile, word=word, lanes=lanes)


def _vec_size(voxels: int, held: int, streams: Sequence[VoxelStream], room: int, widest: int) -> int:
    """Returns the number of voxels per vector: as many as fit in registers and divide the number of voxels."""
    size = widest
    while size > 1 and (
        voxels % size
        or sum([held * max(1, size * x.itemsize // 4) for x in streams]) > room
        or any([size * x.itemsize > 16 for x in streams])
    ):
        size //= 2
    return size


def _is_wide(x: VoxelStream, step: int, vec_size: int) -> bool:
    """True if vectors are contiguous and aligned, or if the stream is read element by element anyway."""
    if not x.vector:
        return True
    word = min(16, vec_size * x.itemsize)
    places = (x.misalignment, x.classes * x.itemsize, x.strides[0] * x.itemsize)
    return step == 1 and all([y % word == 0 for y in places])


def _is_packed(x: VoxelStream, step: int, classes: int, vec_size: int) -> bool:
    """True if each sample is one contiguous stretch of voxels with ``classes`` classes, aligned for ``PackedVector``.

    Its words are the widest that divide ``vec_size`` voxels.
    """
    word = gcd(16, vec_size * classes * x.itemsize)
    places = (x.misalignment, x.strides[0] * x.itemsize)
    return x.classes == 1 and step == classes and all([y % word == 0 for y in places])


def packed_words(held: int, vec_size: int, itemsize: int) -> tuple[int, int]:
    """Returns the number of words of a packed vector, and of elements of a word (``kEach`` of ``PackedVector``)."""
    elements = held * vec_size
    each = gcd(elements, 16 // itemsize)
    return elements // each, each


def packed_bytes(held: int, vec_size: int, itemsize: int) -> int:
    """Returns the bytes of shared memory per thread for a packed vector that passes through it (``PackedStretch``)."""
    words, each = packed_words(held, vec_size, itemsize)
    return (words | 1) * each * itemsize


def _word(voxels: int, streams: Sequence[tuple[VoxelStream, int]]) -> int:
    """Returns the number of voxels per word, of at most 16 bytes, in which logits and tangents are copied to a tile."""
    itemsize = streams[0][0].itemsize
    word = max(1, 16 // itemsize)
    while word > 1 and (voxels % word or not all([_is_wide(x, s, word) for x, s in streams])):
        word //= 2
    return word if word * itemsize >= 4 else 1


def stored_tiles(
    samples: int, voxels: int, classes: int, itemsize: int, number: int, second: bool, room: int
) -> tuple[int, int]:
    """Returns the number of voxels per ``StoredTile`` when sums are added up, and when gradients are written.

    Both are 0 if either does not fit in shared memory. Few voxels are spread over all multiprocessors.
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
    """Returns the maximum number of bytes of a ``StoredTile``."""
    return classes * (tile * itemsize + 16) * (1 + second)


def stored_sums_bytes(classes: int, itemsize: int, number: int, second: bool, tile: int) -> int:
    """Returns the number of bytes of ``memory`` of ``sum_in_stored_tiles``."""
    of_labels = WARP if second or tile >= STORED_TILES[0] else WARP // 2
    totals, lanes = -(-3 * classes // 2) * 16 * (1 + second), classes * number * (of_labels + (1 + second) * WARP // 4)
    return totals + lanes + _stored_bytes(classes, itemsize, second, tile)


def stored_gradient_bytes(classes: int, itemsize: int, number: int, second: bool, tile: int) -> int:
    """Returns the number of bytes of ``numbers`` of ``write_stored_tiles``."""
    return -(-3 * classes // 4) * 4 * number * (1 + second) + _stored_bytes(classes, itemsize, second, tile)


def shared_tile(classes: int, number: int, room: int) -> int:
    """Returns the number of voxels per tile in shared memory when sums are added up; 0 if no tile fits.

    GPUs with less than 99 KiB of shared memory may add up in another order.
    """
    most, least = SHARED_TILE
    if tile_gradient_bytes(classes, number) > room:
        return 0
    while most >= least and sums_bytes(classes, number, most) > min(TILE_BYTES, room):
        most //= 2
    return most if most >= least else 0


def sums_bytes(classes: int, number: int, tile: int) -> int:
    """Returns the number of bytes of ``memory`` of ``sum_in_shared_tiles``."""
    return -(-24 * classes // 16) * 16 + classes * number * (3 * WARP + tile + 1)


def tile_gradient_bytes(classes: int, number: int) -> int:
    """Returns the number of bytes of ``numbers`` of ``write_tile_gradients``."""
    return (-(-3 * classes // 4) * 4 + classes * (GRADIENT_THREADS + 1)) * number


def _chunks(samples: int, voxels: int, threads: int, vec_size: int, wave: int, tile: int) -> tuple[int, int]:
    """Returns the number of chunks of a sample, and of vectors or tiles per chunk.

    Chunks are sized so that each of ``wave`` blocks gets one. ``threads`` is the number of vectors that a block
    processes at a time, or 0 if chunks consist of tiles.
    """
    if not threads:
        tiles = -(-voxels // (tile or TILE))
        per_chunk = max(1, -(-samples * tiles // wave))
        return max(1, -(-tiles // per_chunk)), per_chunk
    # Chunks are multiples of a warp, not of a block, so that with few samples no chunk is left for a second wave.
    vectors = voxels // vec_size
    least, most = (threads * -(-x // vec_size) for x in PER_THREAD)
    few = 0 < 4 * samples <= wave
    wanted = -(-vectors // (wave // samples if few else -(-wave // max(1, samples))))
    per_chunk = WARP * -(-min(max(wanted, least), most) // WARP)
    return max(1, -(-vectors // per_chunk)), per_chunk


def columns_of_sums(held: int, label_apart: bool, lanes: int = 1) -> int:
    """Returns the number of columns of shared memory by which a block adds up its threads' sums of ``held`` classes.

    A block adds up to 32 columns at a time, or fewer if more than four lanes share a voxel. If the label is handled
    apart, which lanes that share a voxel never do, the sums of I and FN of each class are in columns from the start.
    """
    if label_apart and lanes == 1:
        return max(2 * held, min(WARP, held + 3))
    return min(WARP * min(lanes, 4) // lanes, 3 * held + 3)


def gradient_chunks(x: Layout, processors: int) -> tuple[int, int]:
    """Returns the number of chunks of a sample, one per block, when gradients are written, and of vectors per chunk."""
    vectors, tile = x.voxels // x.vec_size, x.gradient_tile or GRADIENT_THREADS // x.lanes
    tiles = max(1, -(-vectors // tile))
    least = -(-GRADIENT_NUMBERS // ((x.held or x.classes) * x.vec_size))
    turns = min(tiles, max(least, -(-x.samples * tiles // (processors * GRADIENT_BLOCKS))))
    return -(-tiles // turns), turns * tile


def staged_bytes(held: int, vec_size: int, logits: int, labels: int) -> int:
    """Returns the shared memory in bytes of two vectors of a thread (``StagedVectors``), from logit and label sizes."""
    return 2 * (held * vec_size * logits + max(4, vec_size * labels))


def has_room(columns: int, staged: int, shared: int) -> bool:
    """True if ``shared`` bytes of shared memory suffice for two blocks that add up sums.

    Each of their threads needs ``columns`` bytes of columns and ``staged`` bytes of vectors.
    """
    return 2 * (THREADS * (columns + staged) + RESERVED_BYTES) <= shared


def staged_gradient_blocks(held: int) -> int:
    """Returns the blocks per multiprocessor that write gradients of logits staged through shared memory."""
    return 6 if held <= 14 else 5


def gradient_piece(x: Layout, processors: int) -> int:
    """Returns the number of vectors of a chunk per block of staged gradients. All blocks together form two waves."""
    pieces = max(1, 2 * staged_gradient_blocks(x.held) * processors // (x.samples * x.chunks))
    return GRADIENT_THREADS * -(-x.per_chunk // (pieces * GRADIENT_THREADS))


def resident(held: int, number: int, heavy: bool) -> int:
    """Returns the number of blocks of :data:`THREADS` threads per multiprocessor that registers are limited for.

    ``heavy`` is True with a voxel loss.
    """
    if held == 0 and number == 4:
        return 3 - heavy
    if number == 8:
        return 2
    count = next((blocks for classes, blocks in RESIDENT if held <= classes), 2)
    return max(2, count - heavy)


def second_resident(logits: int, number: int, heavy: bool) -> int:
    """Returns the number of blocks that registers are limited for, as :func:`resident`, in second derivatives.

    A thread has ``logits`` logits and their tangents in registers. If these are few, their loads are short, and
    there are more blocks. ``heavy`` is that of :func:`layout`.
    """
    if number == 8:
        return 2 if 0 < logits <= FEW_DOUBLES and not heavy else 1
    return 2 if heavy else next((blocks for most, blocks in SECOND_RESIDENT if 0 < logits <= most), 2)
