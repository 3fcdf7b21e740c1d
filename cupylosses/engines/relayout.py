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
from cupylosses.engines.strides import MAX_RANK, dimension_words, merge, power_of_two
from cupylosses.jit.kernel import Kernel

#: Elements from which on a copy is worth a kernel of its own; neighbours that both sides need at least, and bytes of
#: them.
LEAST = 1 << 14
LEAST_SIDE = 4
LEAST_BYTES = 32
#: Part of a tile that is used, at least, as its inverse: two short sides fill none.
LEAST_USED = 4
THREADS = 256
#: Elements of a tile, and its longest side; and those of small arrays, of fewer than so many large tiles: these would
#: leave multiprocessors idle.
TILE, MAX_SIDE = 4096, 64
SMALL_TILE, SMALL_SIDE = 1024, 32
MANY_TILES = 512
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
    ``down`` along the target's, in vectors of ``vec_size``; ``many`` if there are several outer dimensions.
    """

    size: int
    vec_size: int
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
        return f"relayout_{self.size}-bytes_x{self.vec_size}_{tile}{'_many' * self.many}"

    @property
    def entry(self) -> str:
        """The name of the kernel."""
        return "relayout_copy"

    @property
    def arguments(self) -> list[str]:
        return ["const void* from", "void* to"]

    def glue(self) -> str:
        word, rank = _WORDS[self.size], "kMaxRank" if self.many else "1"
        return (
            f"using Outer = Dimensions<2, {rank}>;\n"
            f'extern "C" __global__ void __launch_bounds__({THREADS}) {self.entry}(const void* from, void* to, '
            "int64 count_a, int64 count_b, int64 from_step, int64 to_step, const __grid_constant__ Outer outer) {\n"
            f"  relayout<{word}, {self.vec_size}, {self.across}, {self.down}, {THREADS}>(\n"
            f"      static_cast<const {word}*>(from), static_cast<{word}*>(to), count_a, count_b, from_step, to_step, "
            "outer);\n}\n"
        )


class Tiles(NamedTuple):
    """Geometry of a copy: the kernel, its blocks, and its constant arguments."""

    kernel: RelayoutKernel
    blocks: int
    fixed: tuple[Any, ...]


@lru_cache(maxsize=256)
def tiles(
    shape: tuple[int, ...], source: tuple[int, ...], strides: tuple[int, ...], size: int, misalignment: int
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
    if min(sizes[a], sizes[b]) < max(LEAST_SIDE, LEAST_BYTES // size):
        return None
    rest = [d for d in range(len(sizes)) if d not in (a, b)]
    if len(rest) > MAX_RANK:
        return None
    # A square, or longer along the other dimension where one is short.
    tile, side = (TILE, MAX_SIDE) if prod(shape) >= MANY_TILES * TILE else (SMALL_TILE, SMALL_SIDE)
    most = [min(side, power_of_two(sizes[d])) for d in (a, b)]
    across = max(8, most[0] if most[1] == side else min(512, tile // most[1]))
    down = tile // across
    if min(sizes[a], across) * min(sizes[b], down) * LEAST_USED < tile:
        return None
    steps = [here[b], there[a], sizes[a], sizes[b], *(here[d] for d in rest), *(there[d] for d in rest)]
    vec_size = 2 if size <= 2 and misalignment % (2 * size) == 0 and not any(x % 2 for x in steps) else 1
    count = -(-sizes[a] // across) * -(-sizes[b] // down) * prod(sizes[d] for d in rest)
    if count > MAX_BLOCKS:
        return None
    many = len(rest) > 1
    sizes_of_rest = [sizes[d] for d in rest] or [1]
    streams = [[x[d] for d in rest] or [0] for x in (here, there)]
    words = dimension_words(sizes_of_rest, streams, MAX_RANK if many else 1)
    kernel = RelayoutKernel(size, vec_size, across, down, many)
    return Tiles(kernel, count, (sizes[a], sizes[b], here[b], there[a], tuple(words)))


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
    found = tiles(tuple(shape), tuple(source[1]), tuple(target[1]), size, (source[0] | target[0]) % 16)
    if found is None:
        return False
    launcher = _launcher(device, found.kernel, found.blocks, found.fixed)
    launcher(device.stream(), source[0], target[0])
    return True
