"""GPU limits that launches depend on, by compute capability, so that kernels can be planned for absent GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from cupylosses import interop

#: Threads of a warp.
WARP = 32
#: Smallest unit in which memory is read and written, in bytes: one sector.
SECTOR_BYTES = 32
#: Bytes of shared memory that a block may use without opting in to more.
SHARED_BYTES = 48 << 10
#: Upper bound of the static shared memory of a kernel, in bytes.
DECLARED_BYTES = 20 << 10
#: Maximum number of threads of a block, on every GPU.
MAX_THREADS = 1024


@dataclass(frozen=True)
class Chip:
    """Limits of a GPU that decide the layout of rows.

    ``shared``: bytes of shared memory that a block can opt in to. ``clusters``: True if thread block clusters exist.
    ``threads``: maximum number of threads of a block, equal on every GPU.
    """

    shared: int = SHARED_BYTES
    clusters: bool = False
    threads: int = MAX_THREADS


#: Shared memory that a block can opt in to, in KiB, by compute capability (CUDA C++ Programming Guide, "Compute
#: Capabilities"). The driver reports the same number for a GPU that is present.
SHARED = {
    50: 48, 52: 48, 53: 48, 60: 48, 61: 48, 62: 48, 70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99,
    90: 227, 100: 227, 101: 227, 103: 227, 110: 227, 120: 99, 121: 99,
}  # fmt: skip

#: First compute capability with thread block clusters.
CLUSTERS = 90


def chip(capability: int, shared: int | None = None) -> Chip:
    """Returns the limits of a GPU by compute capability (90 means 9.0).

    ``shared`` is the number of bytes of shared memory that the driver reports; without it, the table decides.
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
    """Returns the number of multiprocessors of a GPU and its limits, as the driver reports them."""
    device = interop.cupy().cuda.Device(index)
    shared = device.attributes["MaxSharedMemoryPerBlockOptin"]
    return device.attributes["MultiProcessorCount"], chip(int(device.compute_capability), shared)
