"""Checks of the arguments of margin losses, with messages in the style of :mod:`cupylosses.checks`."""

from __future__ import annotations

from collections.abc import Sequence

from cupylosses.checks import FLOATING, INTEGER, dtype_name
from cupylosses.engines.row_margin.call import Rows, without
from cupylosses.engines.row_margin.definition import END, MarginLoss
from cupylosses.engines.softmax import checks as softmax_checks


def arrays(call: Rows) -> None:
    """Checks dtypes and shapes of all arrays, and that the class weights require no gradient."""
    _dtypes(call)
    _shapes(call)
    if getattr(call.weight, "requires_grad", False):
        raise ValueError(f"{call.loss.name}: `weight` has no gradient, but requires one; pass `weight.detach()`.")


def _dtypes(call: Rows) -> None:
    loss, target = call.loss, call.loss.operands[1].name
    for name, x in call.arrays.items():
        dtype = dtype_name(x)
        if name == "mask":
            if dtype != "bool":
                raise TypeError(
                    f"{loss.name}: `mask` must be bool, True where a row counts, got {dtype}. Pass `mask != 0`."
                )
        elif name == target:
            if dtype not in INTEGER:
                raise TypeError(
                    f"{loss.name}: `{name}` must have one of the dtypes {', '.join(INTEGER)}, got {dtype}. Labels are "
                    "class indices: convert them with `.long()` or `.astype('int64')`."
                )
        elif dtype not in FLOATING:
            swapped = name == loss.operands[0].name and dtype_name(call.target) in FLOATING
            hint = (
                f"Are `{name}` and `{target}` swapped?"
                if swapped
                else "Convert it with `.to(torch.float32)` or `.astype('float32')`."
            )
            raise TypeError(
                f"{loss.name}: `{name}` must have one of the dtypes {', '.join(FLOATING)}, got {dtype}. {hint}"
            )


def _shapes(call: Rows) -> None:
    loss, rows, dim = call.loss, call.shape, call.static.class_dim
    first, second = (x.name for x in loss.operands)
    shape, target_shape = tuple(call.input.shape), tuple(call.target.shape)
    if call.classes == 0:
        raise ValueError(f"{loss.name}: `{first}` must have at least one class, got shape {shape}.")
    if loss.several:
        if len(target_shape) != len(shape) or without(target_shape, dim) != rows:
            raise ValueError(
                f"{loss.name}: `{second}` must have the shape of `{first}` except for the number of labels in the "
                f"class dimension {dim}, got `{first}` of shape {shape} and `{second}` of shape {target_shape}. Fill "
                f"lists of labels up with {END}."
            )
    elif target_shape != rows:
        raise ValueError(
            f"{loss.name}: `{second}` must have the shape of `{first}` without its class dimension {dim}, {rows}, got "
            f"`{first}` of shape {shape} and `{second}` of shape {target_shape}. {_hint(shape, target_shape)}"
        )
    if call.weight is not None and tuple(call.weight.shape) != (call.classes,):
        raise ValueError(
            f"{loss.name}: `weight` must have one number per class, shape ({call.classes},) for `{first}` of shape "
            f"{shape} and class dimension {dim}, got {tuple(call.weight.shape)}."
        )
    if call.mask is not None and not _broadcasts(tuple(call.mask.shape), rows):
        raise ValueError(
            f"{loss.name}: `mask` must broadcast to the shape of the rows, {rows}, got {tuple(call.mask.shape)}. It "
            "has one element per row, and no class dimension."
        )


def _hint(shape: tuple[int, ...], target_shape: tuple[int, ...]) -> str:
    fits = [d for d in range(len(shape)) if without(shape, d) == target_shape]
    if fits:
        d = -1 if len(shape) - 1 in fits else fits[0]
        return f"If the classes are in dimension {d}, pass class_dim={d}."
    return "There is one label per row."


def _broadcasts(shape: tuple[int, ...], rows: tuple[int, ...]) -> bool:
    return len(shape) <= len(rows) and all([a in (1, b) for a, b in zip(reversed(shape), reversed(rows), strict=False)])


def bad_label(loss: MarginLoss, position: Sequence[int], value: int, classes: int, alike: bool) -> IndexError:
    """Returns the error for a label that is not a class. ``alike`` is True if all such labels have the same value."""
    if not loss.several:
        return softmax_checks.bad_label(loss, position, value, classes, alike)
    where = f"[{', '.join(map(str, position))}]" if position else ""
    return IndexError(
        f"{loss.name}: `{loss.operands[-1].name}{where}` must be a class index, 0 to {classes - 1}, or {END} after "
        f"the last label of the row, got {value} for {classes} class{'es' * (classes != 1)}."
    )
