"""Copies by tiles: results, partial tiles, accesses out of bounds, and the copies for which tiles are used."""

from __future__ import annotations

import pytest
import torch
from devices import KERNELS
from grids import in_turn

from cupylosses.backends.torch import device as torch_device
from cupylosses.engines import relayout
from cupylosses.engines.strides import dense_strides

#: Shapes, and the order in memory of the copy's dimensions: transposed, many dimensions, a short side, a dimension
#: between the two, odd sizes, and an image.
COPIES = (
    ((130, 70), (1, 0)),
    ((3, 5, 66, 67), (1, 0, 3, 2)),
    ((4, 5000), (1, 0)),
    ((301, 7, 64), (2, 1, 0)),
    ((2, 3, 2, 5, 33, 65), (5, 3, 2, 1, 0, 4)),
    ((2, 19, 32, 64), (0, 2, 3, 1)),
)
DTYPES = ("float32", "bfloat16", "float64", "bool")


def strides_in(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Returns strides without gaps for dimensions in this order in memory, the fastest one last."""
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d], step = step, step * shape[d]
    return tuple(strides)


def numbers(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Numbers that differ from their neighbours in every dimension."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 7919 % 251 % 2 ** (1 if dtype == "bool" else 8)).view(shape).to(getattr(torch, dtype))


@pytest.mark.kernels
@pytest.mark.addresses
@pytest.mark.parametrize(("copy", "dtype", "many_tiles"), in_turn(COPIES, DTYPES, (0, relayout.MANY_TILES)), ids=str)
def test_copies(
    copy: tuple[tuple[int, ...], tuple[int, ...]], dtype: str, many_tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies by large and by small tiles have the numbers of their source, and so have copies back."""
    for name, limit in (("LEAST", 1), ("LEAST_BYTES", 1), ("LEAST_USED", 1 << 12), ("MANY_TILES", many_tiles)):
        monkeypatch.setattr(relayout, name, limit)
    relayout.tiles.cache_clear()
    shape, order = copy
    x, strides = numbers(shape, dtype).to(KERNELS), strides_in(shape, order)
    misaligned = x.new_empty(x.numel() + 1)[1:].view(shape).copy_(x)
    for source in (x, misaligned):
        assert relayout.tiles(shape, source.stride(), strides, x.element_size(), source.data_ptr() % 16)
        found = torch_device.copied(source, strides)
        assert found.stride() == strides and torch.equal(found, x)
    back = torch_device.copied(found, x.stride())
    assert back.stride() == x.stride() and torch.equal(back, x)


@pytest.mark.parametrize(
    ("shape", "source", "strides", "by_tiles"),
    [
        ((256, 256), (256, 1), (1, 256), True),
        # The fastest dimension stays the same.
        ((256, 256), (512, 1), (256, 1), False),
        # Few elements: a kernel of its own is not worthwhile.
        ((64, 64), (64, 1), (1, 64), False),
        # A short side beside a long one.
        ((1 << 16, 2), (2, 1), (1, 1 << 16), True),
        ((1 << 12, 100, 2), (200, 2, 1), (200, 1, 100), False),
        # Both sides are short.
        ((1 << 10, 15, 12), (180, 12, 1), (180, 1, 15), False),
        # No dimension of the source is contiguous.
        ((256, 256), (512, 2), (1, 256), False),
        # An expanded dimension is copied for each of its indices.
        ((256, 64, 4), (64, 1, 0), (1, 1024, 256), True),
    ],
)
def test_which_copies_go_by_tiles(
    shape: tuple[int, ...], source: tuple[int, ...], strides: tuple[int, ...], by_tiles: bool
) -> None:
    assert dense_strides(shape, strides) == strides
    assert (relayout.tiles(shape, source, strides, 4, 0) is not None) is by_tiles


def test_sides_of_few_bytes_are_copied_plainly() -> None:
    for size, least in ((1, 6), (2, 3), (4, 2), (8, 2)):
        for side in range(1, 8):
            found = relayout.tiles((1 << 16, side), (side, 1), (1, 1 << 16), size, 0)
            assert (found is not None) is (side >= least)


@pytest.mark.parametrize("size", [1, 2])
def test_vectors_only_where_every_row_begins_at_one(size: int) -> None:
    def vectors(shape: tuple[int, int], step: int, misalignment: int = 0) -> tuple[int, int]:
        found = relayout.tiles(shape, (step, 1), (1, shape[0]), size, misalignment)
        assert found is not None
        return found.kernel.read, found.kernel.written

    assert vectors((256, 256), 256) == (2, 2)
    assert vectors((256, 256), 257) == vectors((256, 256), 256, size) == (1, 2)
    assert vectors((255, 256), 256) == (2, 1)
