"""What of a GPU decides how losses of rows are taken, by its architecture: also of GPUs that are elsewhere."""

from __future__ import annotations

from cupylosses.row_launch import Chip

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
