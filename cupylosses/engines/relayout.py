"""Copies of arrays into other strides where the fastest dimension changes, by tiles (``kernels/core/relayout.cuh``).

The array libraries copy such arrays element by element, at a tenth of the speed of a plain copy.
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

#: Elements from which on a copy is worth a kernel of its own; neighbours that both sides need at least, and bytes of
#: them.
LEAST = 1 << 14
LEAST_SIDE = 2
LEAST_BYTES = 6
#: Part of a tile that is used, at least, as its inverse, unless one of its sides is the longest: two short ones fill
#: none.
LEAST_USED = 4
THREADS = 256
#: Blocks that a multiprocessor has registers for, of elements of up to 4 bytes, and of 8.
RESIDENT, RESIDENT_WIDE = 6, 4
#: Elements of a tile, and its longest side; and those of small arrays, of fewer than so many large tiles: these would
#: leave multiprocessors idle.
TILE, MAX_SIDE = 4096, 64
SMALL_TILE, SMALL_SIDE = 1024, 32
MANY_TILES = 512
#: Bytes of a dimension that a tile takes whole, at most; the longest side beside a short one; and parts of a dimension
#: that are made equal, at most.
WHOLE_BYTES = 320
MAX_LONG_SIDE = 256
MANY_PARTS = 16
#: Blocks of a launch.
MAX_BLOCKS = (1 << 31) - 1

_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}


class _Owner(NamedTuple):
    """The name that error messages give to a kernel of no loss."""

    name: str


_COPY = _Owner("copy")


@dataclass(frozen=True)
class RelayoutKernel(Kernel):
    """A copy of elements of ``size`` bytes by tiles of ``across`` of them along the source's fastest dimension and
    ``down`` along the target's, read in vectors of ``read`` elements and written in vectors of ``written``; ``many`` if
    there are several outer dimensions.
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
        """The kernel in words, for error messages and file names."""
        tile = f"{self.across}-across_{self.down}-down"
        return f"relayout_{self.size}-bytes_x{self.read}_x{self.written}_{tile}{'_many' * self.many}"

    @property
    def entry(self) -> str:
        """The name of the kernel."""
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
    """Geometry of a copy: the kernel, its blocks, and its constant arguments."""

    kernel: RelayoutKernel
    blocks: int
    fixed: tuple[Any, ...]

    @property
    def sides(self) -> tuple[int, int]:
        """Neighbours of the source and of the target."""
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
    """The geometry of a copy of elements of so many bytes from strides ``source`` to ``strides``; None if a plain copy
    is as good: the fastest dimension stays, or is short in one of them.
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
    rest = [d for d in range(len(sizes)) if d not in (a, b)]
    if len(rest) > MAX_RANK:
        return None
    # A square, or longer along the other dimension where one is short.
    most = TILE if prod(shape) >= MANY_TILES * TILE else SMALL_TILE
    across, down = sides(sizes[a], sizes[b], most, size)
    used = min(sizes[a], across) * min(sizes[b], down)
    if used * LEAST_USED < most and max(across, down) < MAX_LONG_SIDE:
        return None
    pair = 2 if size <= 2 else 1

    def vector(misalignment: int, *steps: int) -> int:
        return 1 if misalignment % (pair * size) or any(x % pair for x in steps) else pair

    read = vector(misalignment, sizes[a], here[b], *(here[d] for d in rest))
    written = vector(target_misalignment, sizes[b], there[a], *(there[d] for d in rest))
    count = -(-sizes[a] // across) * -(-sizes[b] // down) * prod(sizes[d] for d in rest)
    if count > MAX_BLOCKS:
        return None
    many = len(rest) > 1
    sizes_of_rest = [sizes[d] for d in rest] or [1]
    streams = [[x[d] for d in rest] or [0] for x in (here, there)]
    words = dimension_words(sizes_of_rest, streams, MAX_RANK if many else 1)
    kernel = RelayoutKernel(size, read, written, across, down, many)
    return Tiles(kernel, count, (sizes[a], sizes[b], here[b], there[a], tuple(words)))


def sides(count_a: int, count_b: int, most: int, size: int) -> tuple[int, int]:
    """Sides of tiles of about ``most`` elements of ``size`` bytes: a square, or longer along one dimension where the
    other is short. A short dimension is taken whole, or cut into equal parts, since a tile that is not full takes as
    long as a full one.
    """
    side = MAX_SIDE if most == TILE else SMALL_SIDE
    whole = max(side, min(WHOLE_BYTES // size, THREADS))
    down = _part(count_b, whole if count_b <= whole else side)
    across = _part(count_a, max(side, min(MAX_LONG_SIDE, most // down // WARP * WARP)))
    if across < side:
        down = _part(count_b, max(side, min(MAX_LONG_SIDE, most // across // WARP * WARP)))
    return across, down


def _part(count: int, longest: int) -> int:
    """The length of equal parts of few at most ``longest`` ones, an even number."""
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
    """Copies elements of ``size`` bytes between arrays of one shape, each an address and strides in elements. False,
    and nothing is done, if a plain copy is as good.
    """
    found = tiles(tuple(shape), tuple(source[1]), tuple(target[1]), size, source[0] % 16, target[0] % 16)
    if found is None:
        return False
    launcher = _launcher(device, found.kernel, found.blocks, found.fixed)
    launcher(device.stream(), source[0], target[0])
    return True
