"""Checks of the arguments of row-statistics losses, with messages in the style of :mod:`cupylosses.checks`."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from cupylosses.checks import FLOATING, INTEGER, dtype_name
from cupylosses.engines.row_statistics.call import Static, has_features, names
from cupylosses.engines.row_statistics.definition import StatisticsLoss


def feature_dimension(loss: StatisticsLoss, value: Any, rank: int) -> int:
    """Checks the feature dimension of operands of ``rank`` dimensions, and returns it counted from the end."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{loss.name}: `{loss.dimension}` must be an integer, got {value!r}.")
    if rank == 0:
        raise ValueError(
            f"{loss.name}: `{loss.operands[0].name}` needs a dimension of features, got no dimensions. Pass shape "
            "(1, D) or (D,)."
        )
    if not -rank <= int(value) < rank:
        raise ValueError(
            f"{loss.name}: `{loss.dimension}` must be within {-rank} to {rank - 1} for operands of {rank} "
            f"dimension{'s' * (rank != 1)}, got {value}."
        )
    return int(value) if value < 0 else int(value) - rank


def dtypes(loss: StatisticsLoss, static: Static, arrays: Sequence[Any]) -> None:
    """Checks that each array has a dtype that its operand accepts: a mask bool, vectors floating."""
    integer = {x.name for x in loss.operands if x.integer}
    for name, x in zip(names(loss, static), arrays, strict=False):
        dtype = dtype_name(x)
        if name == "mask":
            if dtype != "bool":
                raise TypeError(
                    f"{loss.name}: `mask` must be bool, True where a row counts, got {dtype}. Pass `mask != 0`."
                )
            continue
        allowed = (*FLOATING, *INTEGER) if name in integer else FLOATING
        if dtype not in allowed:
            raise TypeError(
                f"{loss.name}: `{name}` must have one of the dtypes {', '.join(allowed)}, got {dtype}. "
                "Convert it with `.to(torch.float32)` or `.astype('float32')`."
            )


def shapes(
    loss: StatisticsLoss, static: Static, array_shapes: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Checks the shapes of the arrays. Returns the broadcast shape of the operands with features, and the shape of the
    rows: the same without the feature dimension. All other arrays broadcast to the shape of the rows.
    """
    named = [*zip(names(loss, static), has_features(loss, static), array_shapes, strict=False)]
    features = [(name, tuple(shape)) for name, has, shape in named if has]
    full = _broadcast(loss, features)
    rows = without(full, static.feature_dim)
    for name, has, shape in named:
        if not has and not _fits(tuple(shape), rows):
            raise ValueError(
                f"{loss.name}: `{name}` must have the shape {rows} of the rows, or broadcast to it, got "
                f"{tuple(shape)}. It has one value per row, and no dimension of features."
            )
    return full, rows


def _broadcast(loss: StatisticsLoss, named: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[int, ...]:
    rank = max(len(s) for _, s in named)
    result = []
    for d in range(-rank, 0):
        # Comparisons instead of a set, because sizes may be symbols under torch.compile.
        sizes = [s[d] for _, s in named if -d <= len(s) and s[d] != 1]
        if any([n != sizes[0] for n in sizes]):
            got = " and ".join(f"`{name}` of shape {s}" for name, s in named)
            raise ValueError(
                f"{loss.name}: the shapes do not broadcast, got {got}. Shapes are aligned at the last dimension; "
                "reshape one with `.reshape(...)`."
            )
        result.append(sizes[0] if sizes else 1)
    return tuple(result)


def _fits(shape: tuple[int, ...], rows: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(rows), strict=False)
    return len(shape) <= len(rows) and all([a == 1 or a == b for a, b in pairs])


def without(x: Sequence[int], dim: int) -> tuple[int, ...]:
    """Returns a sequence without its entry ``dim``, a negative index."""
    return (*x[: len(x) + dim], *x[len(x) + dim + 1 :])
