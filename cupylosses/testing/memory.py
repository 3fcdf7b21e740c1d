"""Poison: memory that the next allocations get, filled with NaN, so that what a kernel leaves unwritten shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Two bytes of it are a NaN in float16 and bfloat16, four in float32, eight in float64.
NAN_BYTE = 0xFF


def poison(sizes: Sequence[int], device: str, library: str = "torch") -> None:
    """Fills blocks of these sizes, in bytes, with NaN and frees them; without a GPU it does nothing.

    Caching allocators hand a block of the wanted size out again before they ask for new memory, on the same stream and
    without clearing it. All blocks live at once, so that each output finds one.
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
