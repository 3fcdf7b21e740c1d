"""Facts of GPUs that launches depend on, by compute capability, also of GPUs that are elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from cupylosses import interop

WARP = 32
#: Shared memory that a block gets without asking for more.
SHARED_BYTES = 48 << 10
#: What kernels declare themselves of it, at most.
DECLARED_BYTES = 20 << 10
#: Threads of a block, at most, of any GPU.
MAX_THREADS = 1024


@dataclass(frozen=True)
class Chip:
    """What of a GPU decides how rows are taken: the shared memory that a block can ask for, in bytes, whether there are
    clusters, and the threads of a block, at most, of which every GPU has as many.
    """

    shared: int = SHARED_BYTES
    clusters: bool = False
    threads: int = MAX_THREADS


#: The shared memory that a block can ask for, in KiB, by compute capability (CUDA C++ Programming Guide, "Compute
#: Capabilities"). A driver says the same of its GPU.
SHARED = {
    50: 48, 52: 48, 53: 48, 60: 48, 61: 48, 62: 48, 70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99,
    90: 227, 100: 227, 101: 227, 103: 227, 110: 227, 120: 99, 121: 99,
}  # fmt: skip

#: The first compute capability with clusters of blocks.
CLUSTERS = 90


def chip(capability: int, shared: int | None = None) -> Chip:
    """A GPU of a compute capability (90 for 9.0), with so many bytes of ``shared`` memory for a block where these are
    known otherwise.
    """
    if shared is None:
        if capability not in SHARED:
            raise ValueError(
                f"warmup: how much shared memory sm_{capability} has is not known here, and losses of rows depend on "
                f"it; known are {', '.join(f'sm_{x}' for x in SHARED)}. Warm up on such a GPU instead."
            )
        shared = SHARED[capability] << 10
    return Chip(shared, clusters=capability >= CLUSTERS)


def gpu(index: int) -> tuple[int, Chip]:
    """What of a GPU decides launches: how many multiprocessors it has, and what losses of rows can make use of."""
    found = interop.cupy().cuda.Device(index)
    shared = found.attributes["MaxSharedMemoryPerBlockOptin"]
    return found.attributes["MultiProcessorCount"], chip(int(found.compute_capability), shared)
