"""Poison: fills the memory of the next allocations with NaN, so that elements that no kernel writes show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Two such bytes are a NaN in float16 and bfloat16, four in float32, eight in float64.
NAN_BYTE = 0xFF


def poison(sizes: Sequence[int], device: str, library: str = "torch") -> None:
    """Fills blocks of these sizes, in bytes, with NaN and frees them; without a GPU it does nothing.

    Caching allocators reuse a block of the requested size, on the same stream and without clearing it, before they ask
    for new memory. All blocks live at once, so each output gets one.
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
