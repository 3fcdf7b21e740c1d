"""Named memory layouts: the shapes and storage of operands for a loss of a given shape, and the resulting plan.

A layout determines the shape and the storage of each operand from the shape of the loss. Memory around and between the
elements of a view holds NaN, so that kernels that read outside the view are noticed.

``kind`` is the layout that the pointwise engine chooses for the value; ``vector`` is True if a thread processes several
adjacent elements at once. Both apply to :data:`SHAPE`, whose sizes are not multiples of any vector, warp or chunk.
Names that end in ``_aligned`` round the last size up to a multiple of the widest vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    from torch import Tensor

    from cupylosses.engines.pointwise.definition import Loss

Shape = tuple[int, ...]

SHAPE: Shape = (67, 129)

#: Number of elements of the widest vector.
WIDEST = 8


def _keep(x: Tensor, position: int, shape: Shape) -> Tensor:
    return x


def _same(shape: Shape, operands: int) -> list[Shape]:
    return [shape] * operands


@dataclass(frozen=True)
class Layout:
    """Named memory layout.

    ``shapes(shape, operands)`` returns the shapes to sample; ``store(x, position, shape)`` puts an operand in memory.
    ``reaches`` describes what the layout tests. ``rank`` is the lowest rank of a shape for which it is meaningful.
    """

    name: str
    reaches: str
    kind: str
    vector: bool
    shapes: Callable[[Shape, int], list[Shape]] = _same
    store: Callable[[Tensor, int, Shape], Tensor] = _keep
    rank: int = 0

    def shapes_of(self, loss: Loss, shape: Shape) -> list[Shape]:
        """Returns the shapes of the operands of a loss; an operand with one value per row keeps all dimensions."""
        shapes = self.shapes(shape, len(loss.operands))
        rank = max(map(len, shapes))
        return [
            (*(1,) * (rank - len(s)), *s) if operand.per_row and s else s
            for operand, s in zip(loss.operands, shapes, strict=True)
        ]

    def place(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Stores operands of the sampled shapes in this layout."""
        shape = numpy.broadcast_shapes(*(tuple(x.shape) for x in operands))
        return [self.store(x, position, shape) for position, x in enumerate(operands)]


# ----------------------------------------------------------------------------------------------------------------------
# Storage


def _surrounded(x: Tensor, shape: Sequence[int], view: Callable[[Tensor], Tensor]) -> Tensor:
    """Copies ``x`` into a view of a larger buffer whose other elements are NaN."""
    buffer = x.new_full(tuple(shape), float("nan") if x.is_floating_point() else 1)
    return view(buffer).copy_(x)


def _transposed(x: Tensor, position: int = 0, shape: Shape = ()) -> Tensor:
    backwards = tuple(reversed(range(x.dim())))
    return x.permute(backwards).contiguous().permute(backwards)


def _sliced(x: Tensor, position: int = 0, shape: Shape = ()) -> Tensor:
    inside = tuple(slice(1, 1 + n) for n in x.shape)
    return _surrounded(x, [n + 2 for n in x.shape], lambda buffer: buffer[inside])


def _strided(x: Tensor, position: int = 0, shape: Shape = ()) -> Tensor:
    return _surrounded(x, (*x.shape[:-1], 2 * x.shape[-1]), lambda buffer: buffer[..., ::2])


def _misaligned(x: Tensor, position: int = 0, shape: Shape = ()) -> Tensor:
    return _surrounded(x, (x.numel() + 1,), lambda buffer: buffer[1:].view(x.shape))


def _channels_last(x: Tensor, position: int = 0, shape: Shape = ()) -> Tensor:
    import torch

    return x.contiguous(memory_format=torch.channels_last)


def _expanded(x: Tensor, position: int, shape: Shape) -> Tensor:
    return x.expand(shape)


def _unmergeable(x: Tensor, position: int = 0, shape: Shape = ()) -> Tensor:
    """Stores dimensions in the order (..., 2, 0, 3, 1), with a gap in each, so that no two of them merge."""
    order = (*range(1, x.dim(), 2), *range(0, x.dim(), 2))
    back = tuple(order.index(d) for d in range(x.dim()))
    return _sliced(x.permute(order)).permute(back)


def _others(store: Callable[..., Tensor]) -> Callable[[Tensor, int, Shape], Tensor]:
    """Returns a function that keeps the first operand as it is, and stores the others by ``store``."""
    return lambda x, position, shape: store(x, position, shape) if position else x


# ----------------------------------------------------------------------------------------------------------------------
# Shapes


def _aligned(shape: Shape) -> Shape:
    return (*shape[:-1], -(-shape[-1] // WIDEST) * WIDEST)


def _first_and(
    rest: Callable[[Shape], Shape], first: Callable[[Shape], Shape] = lambda shape: shape
) -> Callable[[Shape, int], list[Shape]]:
    """Returns a function of shapes: the first operand has ``first`` of the wanted shape, the others ``rest`` of it."""
    return lambda shape, operands: [first(shape), *[rest(shape)] * (operands - 1)]


def _row(shape: Shape) -> Shape:
    return shape[-1:]


def _column(shape: Shape) -> Shape:
    return (*shape[:-1], 1)


def _every(change: Callable[[Shape], Shape]) -> Callable[[Shape, int], list[Shape]]:
    return lambda shape, operands: [change(shape)] * operands


def _eight(shape: Shape) -> Shape:
    return (2, 3, 2, 2, 2, 2, max(2, shape[0] // 96), shape[-1])


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("contiguous", "one merged dimension, 16-byte vectors, a partial one at the end", "flat", True),
        Layout("transposed", "reordering: dense in another order is as good", "flat", True, store=_transposed, rank=2),
        Layout(
            "channels_last",
            "reordering of four dimensions, as convolutions store them",
            "flat",
            True,
            _every(lambda s: (2, 3, max(1, s[0] // 6), s[-1])),
            _channels_last,
            rank=2,
        ),
        Layout("misaligned", "addresses off by one element: vectors shifted", "flat", True, store=_misaligned),
        Layout("mixed", "operands that disagree about the order", "tiles", False, store=_others(_transposed), rank=2),
        Layout("sliced", "rows with gaps and an offset", "matrix", False, store=_sliced, rank=2),
        Layout("strided", "every second element: no unit stride at all", "linear", False, store=_strided, rank=1),
        Layout(
            "expanded",
            "stride 0 under a full shape: read again and again, gradient of the full shape",
            "matrix",
            False,
            _first_and(lambda s: (1, *s[1:])),
            _others(_expanded),
            rank=2,
        ),
        Layout("row", "one value per column: gradient summed over rows", "strips", False, _first_and(_row), rank=2),
        Layout(
            "row_aligned",
            "the same in vectors: rows are whole vectors",
            "strips",
            True,
            _first_and(lambda s: _row(_aligned(s)), _aligned),
            rank=2,
        ),
        Layout("column", "one value per row: gradient summed along rows", "strips", False, _first_and(_column), rank=2),
        Layout(
            "column_aligned",
            "the same in vectors: one value for all lanes",
            "strips",
            True,
            _first_and(_column, _aligned),
            rank=2,
        ),
        Layout(
            "outer", "no operand is full: every gradient is a sum", "strips", False, _first_and(_row, _column), rank=2
        ),
        Layout("scalar", "one value for all: gradient summed over everything", "flat", True, _first_and(lambda s: ())),
        Layout("zero_d", "a single element without dimensions", "flat", True, _every(lambda s: ())),
        Layout("empty", "nothing is launched", "flat", True, _every(lambda s: (0, *s[1:]))),
        Layout(
            "eight_d", "eight dimensions of which no two merge", "rows", False, _every(_eight), _unmergeable, rank=2
        ),
    )
}
