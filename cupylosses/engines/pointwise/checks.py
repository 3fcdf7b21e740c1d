"""Checks of the arguments of element-wise losses: dtypes, broadcasting and dimensions, each with its message."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from cupylosses.checks import FLOATING, INTEGER
from cupylosses.definition.base import MASK, WEIGHT
from cupylosses.engines.pointwise.definition import Loss


def dimensions(loss: Loss, value: Any, reduction: str) -> tuple[int, ...]:
    """Checks the dimensions to reduce over, and returns them as a tuple, otherwise as they were passed."""
    dims = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(d, numbers.Integral) and not isinstance(d, bool) for d in dims):
        raise TypeError(f"{loss.name}: `dim` must be an integer or a tuple of integers, got {value!r}.")
    if reduction in ("none", "batchmean"):
        raise ValueError(
            f"{loss.name}: `dim` needs the reduction 'mean', 'sum' or 'weighted_mean', got {reduction!r}. Leave `dim` "
            "out, or choose one of these."
        )
    return tuple(int(d) for d in dims)


def reduced_dimensions(loss: Loss, dims: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the dimensions counted from 0, each once, in order; an empty ``dims`` means all of them, as in torch."""
    rank = len(shape)
    for d in dims:
        if not -rank <= d < rank:
            raise ValueError(
                f"{loss.name}: `dim` must be within {-rank} to {rank - 1} for the shape {tuple(shape)}, got {d}."
            )
    positions = [d % rank for d in dims]
    if len(set(positions)) != len(positions):
        raise ValueError(f"{loss.name}: `dim` must name each dimension once, got {tuple(dims)}.")
    return tuple(sorted(positions)) if positions else tuple(range(rank))


def dtypes(loss: Loss, names: Sequence[str]) -> None:
    """Checks that each operand has a dtype that it accepts, and that at least one is floating."""
    for operand, name in zip(loss.operands, names, strict=True):
        if operand is MASK and name != "bool":
            raise TypeError(
                f"{loss.name}: `mask` must be bool, True where an element counts, got {name}. Pass `mask != 0`."
            )
        allowed = (*FLOATING, *INTEGER) if operand.integer else FLOATING
        if name not in allowed:
            raise TypeError(
                f"{loss.name}: `{operand.name}` must have one of the dtypes {', '.join(allowed)}, got {name}. "
                "Convert it with `.to(torch.float32)` or `.astype('float32')`."
            )
    if not any(name in FLOATING for name in names) and any(x is not MASK for x in loss.operands):
        got = " and ".join(f"`{x.name}` of {name}" for x, name in zip(loss.operands, names, strict=True))
        raise TypeError(
            f"{loss.name}: at least one operand must be floating, got {got}. "
            "Convert the prediction with `.float()` or `.astype('float32')`."
        )


def broadcast(loss: Loss, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the broadcast shape by NumPy's rules."""
    rank = max(len(s) for s in shapes)
    result = []
    for d in range(-rank, 0):
        # Sizes are compared instead of collected in a set: while torch.compile traces, they may be symbols.
        sizes = [s[d] for s in shapes if -d <= len(s) and s[d] != 1]
        if any([n != sizes[0] for n in sizes]):
            raise ValueError(_broadcast_message(loss, shapes))
        result.append(sizes[0] if sizes else 1)
    return tuple(result)


def _broadcast_message(loss: Loss, shapes: Sequence[Sequence[int]]) -> str:
    got = " and ".join(f"`{x.name}` of shape {tuple(s)}" for x, s in zip(loss.operands, shapes, strict=True))
    hint = "Shapes are aligned at the last dimension; reshape one with `.reshape(...)` or `[:, None]`."
    first = shapes[0]
    row = next((x.name for x, s in zip(loss.operands, shapes, strict=True) if len(s) == 1 and s[0] == first[0]), None)
    if row is not None and len(first) > 1:
        name, index = row, ", ".join([":", *["None"] * (len(first) - 1)])
        hint = f"A 1-d `{name}` belongs to the last dimension; for one value per row use `{name}[{index}]`."
    return f"{loss.name}: the shapes do not broadcast, got {got}. {hint}"


def broadcast_warning(loss: Loss, shapes: Sequence[Sequence[int]]) -> str | None:
    """Returns a warning about operands that broadcast, or None.

    Every loss warns if no operand has the shape of the result, as with (N, 1) and (N,), which is mostly a mistake.
    Losses whose counterparts in torch warn of any difference between two operands do so, too.
    """
    named_shapes = [
        (x.name, tuple(s)) for x, s in zip(loss.operands, shapes, strict=True) if x is not WEIGHT and x is not MASK
    ]
    if all([s == named_shapes[0][1] for _, s in named_shapes]):
        return None
    (first, shape), *others = named_shapes
    result = broadcast(loss, [*[s for _, s in named_shapes], *[()] * (len(shapes) - len(named_shapes))])
    if all([s != result for _, s in named_shapes]):
        got = " and ".join([f"`{name}` of shape {s}" for name, s in named_shapes])
        return (
            f"{loss.name}: no operand has the shape {result} of the result, got {got}, which may not be what you want; "
            "reshape or expand one to silence this."
        )
    if not loss.warn_broadcast or others[0][1] == shape:
        return None
    second, other = others[0]
    return (
        f"{loss.name}: `{second}` of shape {other} is broadcast against `{first}` of shape {shape}, which may not be "
        "what you want; reshape or expand one to silence this."
    )


def per_row(loss: Loss, name: str, x: Any, shape: Sequence[int], common: Sequence[int]) -> Any:
    """Returns an operand that may have one value per row, viewed so that it broadcasts with the first operand.

    ``shape`` is that of the first operand. As torch documents for its variance, the operand has the same shape, or size
    1 in some dimensions, or lacks the last dimension.
    """
    operand_shape, shape = tuple(x.shape), tuple(shape)
    if operand_shape in ((), shape):
        return x
    if operand_shape == shape[:-1]:
        return x[..., None]
    if len(operand_shape) == len(common) and all(
        [n == m or n == 1 for n, m in zip(operand_shape, common, strict=True)]
    ):
        return x
    raise ValueError(
        f"{loss.name}: `{name}` must have the shape {shape} of `{loss.operands[0].name}`, with 1 for "
        f"dimensions that share a value, or {shape[:-1]} for one value per row, got {operand_shape}. Reshape it with "
        "`.reshape(...)` or `[None]`."
    )
