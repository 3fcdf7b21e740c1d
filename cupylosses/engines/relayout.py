"""Tiled copies of arrays into strides with another fastest dimension (``kernels/core/relayout.cuh``).

Array libraries copy such arrays element by element, at a tenth of the speed of a plain copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from cupylosses.engines.base import Machine
from cupylosses.engines.device import Device
from cupylosses.engines.strides import MAX_RANK, dimension_words, merge
from cupylosses.jit.gpu import WARP
from cupylosses.jit.kernel import Kernel

#: Minimum number of elements for which a tiled copy pays; minimum length of the fastest dimension of source and target,
#: in elements and in bytes.
LEAST = 1 << 14
LEAST_SIDE = 2
LEAST_BYTES = 6
#: Reciprocal of the minimum share of a tile that is used. A tile with a side of `MAX_LONG_SIDE` is exempt; two short
#: dimensions fill no tile.
LEAST_USED = 4
THREADS = 256
#: Blocks per multiprocessor for which registers suffice: for elements of up to 4 bytes, and of 8 bytes.
RESIDENT, RESIDENT_WIDE = 6, 4
#: Number of elements of a tile, and its side if both dimensions are long; then the same for small arrays. An array is
#: small if it has fewer than `MANY_TILES` large tiles, which would leave multiprocessors idle.
TILE, MAX_SIDE = 4096, 64
SMALL_TILE, SMALL_SIDE = 1024, 32
MANY_TILES = 512
#: Maximum number of bytes of a dimension that a tile covers completely; maximum side of a tile whose other dimension is
#: short; maximum number of parts of a dimension that are made equal.
WHOLE_BYTES = 320
MAX_LONG_SIDE = 256
MANY_PARTS = 16
#: Maximum number of blocks of a launch.
MAX_BLOCKS = (1 << 31) - 1

_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}


class _Owner(NamedTuple):
    """Name, in error messages, of a kernel that belongs to no loss."""

    name: str


_COPY = _Owner("copy")


@dataclass(frozen=True)
class RelayoutKernel(Kernel):
    """A tiled copy of elements of ``size`` bytes.

    A tile has ``across`` elements along the source's fastest dimension and ``down`` along the target's. Vectors have
    ``read`` elements in loads and ``written`` elements in stores. ``many`` is True if there are several outer
    dimensions.
    """

    size: int
    read: int
    written: int
    across: int
    down: int
    many: bool

    loss: Any = _COPY
    compute = "float32"
    storage: tuple[str, ...] = ()
    narrow = False
    files = ("core/relayout.cuh",)

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        tile = f"{self.across}-across_{self.down}-down"
        return f"relayout_{self.size}-bytes_x{self.read}_x{self.written}_{tile}{'_many' * self.many}"

    @property
    def entry(self) -> str:
        """Name of the kernel function."""
        return "relayout_copy"

    @property
    def arguments(self) -> list[str]:
        return ["const void* from", "void* to"]

    def glue(self) -> str:
        word, rank = _WORDS[self.size], "kMaxRank" if self.many else "1"
        blocks = RESIDENT_WIDE if self.size == 8 else RESIDENT
        return (
            f"using Outer = Dimensions<2, {rank}>;\n"
            f'extern "C" __global__ void __launch_bounds__({THREADS}, {blocks}) {self.entry}('
            "const void* from, void* to, int64 count_a, int64 count_b, int64 from_step, int64 to_step, "
            "const __grid_constant__ Outer outer) {\n"
            f"  relayout<{word}, {self.read}, {self.written}, {self.across}, {self.down}, {THREADS}>(\n"
            f"      static_cast<const {word}*>(from), static_cast<{word}*>(to), count_a, count_b, from_step, to_step, "
            "outer);\n}\n"
        )


class Tiles(NamedTuple):
    """Geometry of a copy: the kernel, its number of blocks, and its constant arguments."""

    kernel: RelayoutKernel
    blocks: int
    fixed: tuple[Any, ...]

    @property
    def sides(self) -> tuple[int, int]:
        """Lengths of the fastest dimensions of the source and of the target."""
        return self.fixed[:2]


@lru_cache(maxsize=256)
def tiles(
    shape: tuple[int, ...],
    source: tuple[int, ...],
    strides: tuple[int, ...],
    size: int,
    misalignment: int,
    target_misalignment: int = 0,
) -> Tiles | None:
    """Returns the geometry of a copy of elements of ``size`` bytes from strides ``source`` to ``strides``.

    Returns None if a plain copy is as fast: the fastest dimension stays the same, or is short in one of the two.
    """
    if prod(shape) < LEAST or size not in _WORDS or min((*source, *strides), default=0) < 0:
        return None
    sizes, (there, here) = merge(shape, [strides, source])
    inner = [d for d, x in enumerate(here) if x == 1 and sizes[d] > 1]
    outer = [d for d, x in enumerate(there) if x == 1 and sizes[d] > 1]
    if len(inner) != 1 or len(outer) != 1 or inner == outer:
        return None
    (a,), (b,) = inner, outer
    if min(sizes[a], sizes[b]) < max(LEAST_SIDE, -(-LEAST_BYTES // size)):
        return None
    others = [d for d in range(len(sizes)) if d not in (a, b)]
    if len(others) > MAX_RANK:
        return None
    # Tiles are square, or longer along one dimension if the other is short.
    most = TILE if prod(shape) >= MANY_TILES * TILE else SMALL_TILE
    across, down = sides(sizes[a], sizes[b], most, size)
    used = min(sizes[a], across) * min(sizes[b], down)
    if used * LEAST_USED < most and max(across, down) < MAX_LONG_SIDE:
        return None
    pair = 2 if size <= 2 else 1

    def vector(misalignment: int, *steps: int) -> int:
        return 1 if misalignment % (pair * size) or any(x % pair for x in steps) else pair

    read = vector(misalignment, sizes[a], here[b], *(here[d] for d in others))
    written = vector(target_misalignment, sizes[b], there[a], *(there[d] for d in others))
    count = -(-sizes[a] // across) * -(-sizes[b] // down) * prod(sizes[d] for d in others)
    if count > MAX_BLOCKS:
        return None
    many = len(others) > 1
    other_sizes = [sizes[d] for d in others] or [1]
    streams = [[x[d] for d in others] or [0] for x in (here, there)]
    words = dimension_words(other_sizes, streams, MAX_RANK if many else 1)
    kernel = RelayoutKernel(size, read, written, across, down, many)
    return Tiles(kernel, count, (sizes[a], sizes[b], here[b], there[a], tuple(words)))


def sides(count_a: int, count_b: int, most: int, size: int) -> tuple[int, int]:
    """Returns the sides of tiles of about ``most`` elements of ``size`` bytes.

    Tiles are square, or longer along one dimension if the other is short. A short dimension is covered completely or
    cut into equal parts, since a partial tile takes as long as a full one.
    """
    side = MAX_SIDE if most == TILE else SMALL_SIDE
    whole = max(side, min(WHOLE_BYTES // size, THREADS))
    down = _part(count_b, whole if count_b <= whole else side)
    across = _part(count_a, max(side, min(MAX_LONG_SIDE, most // down // WARP * WARP)))
    if across < side:
        down = _part(count_b, max(side, min(MAX_LONG_SIDE, most // across // WARP * WARP)))
    return across, down


def _part(count: int, longest: int) -> int:
    """Returns the even length, at most ``longest``, of equal parts of a dimension; ``longest`` if there are many."""
    parts = -(-count // longest)
    return longest if parts > MANY_PARTS else -(-count // (2 * parts)) * 2


@lru_cache(maxsize=256)
def _launcher(device: Device, kernel: RelayoutKernel, blocks: int, fixed: tuple[Any, ...]) -> Any:
    *numbers, words = fixed
    return Machine.of(device).launcher(kernel, blocks, THREADS, (*numbers, list(words)))


def copy(
    device: Device,
    shape: Sequence[int],
    source: tuple[int, Sequence[int]],
    target: tuple[int, Sequence[int]],
    size: int,
) -> bool:
    """Copies elements of ``size`` bytes between arrays of one shape, each given by address and strides in elements.

    Returns False and copies nothing if a plain copy is as fast.
    """
    geometry = tiles(tuple(shape), tuple(source[1]), tuple(target[1]), size, source[0] % 16, target[0] % 16)
    if geometry is None:
        return False
    launcher = _launcher(device, geometry.kernel, geometry.blocks, geometry.fixed)
    launcher(device.stream(), source[0], target[0])
    return True
