"""Poisoned memory: the next allocations hold NaN, so that elements that no kernel writes are noticed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Byte of which two are a NaN in float16 and bfloat16, four in float32, and eight in float64.
NAN_BYTE = 0xFF


def poison(sizes: Sequence[int], device: str, library: str = "torch") -> None:
    """Fills blocks of these sizes, in bytes, with NaN and frees them; does nothing without a GPU.

    Before caching allocators request new memory, they reuse a freed block of the same size on the same stream, without
    clearing it. All blocks exist at once, so each output gets one.
    """
    if not device.startswith("cuda"):
        return
    blocks = [_filled(size, device, library) for size in sizes if size]
    del blocks


def _filled(size: int, device: str, library: str) -> Any:
    if library == "cupy":
        import cupy

        return cupy.full(size, NAN_BYTE, dtype=cupy.uint8)
    import torch

    return torch.full((size,), NAN_BYTE, dtype=torch.uint8, device=device)
