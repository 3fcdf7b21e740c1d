"""Division of large index spaces into pieces, so that float64 copies and temporaries of a huge loss fit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Number of elements to process at a time.
LIMIT = 1 << 24


def pieces(shape: Sequence[int], limit: int = LIMIT) -> Iterator[tuple[slice, ...]]:
    """Yields indices that cut ``shape`` along its longest dimension into parts of about ``limit`` elements."""
    everything = (slice(None),) * len(shape)
    elements = prod(shape)
    if elements <= limit:
        yield everything
        return
    axis = max(range(len(shape)), key=lambda d: shape[d])
    step = max(1, limit * shape[axis] // elements)
    for start in range(0, shape[axis], step):
        yield (*everything[:axis], slice(start, start + step), *everything[axis + 1 :])


def part(x: torch.Tensor, index: Sequence[slice]) -> torch.Tensor:
    """Returns the part of ``x`` that belongs to a piece; ``x`` broadcasts to the indexed shape."""
    index = index[len(index) - x.dim() :]
    return x[tuple(slice(None) if size == 1 else i for size, i in zip(x.shape, index, strict=True))]
