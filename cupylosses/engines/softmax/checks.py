"""Argument checks that only losses of rows need, with their messages, in the style of :mod:`cupylosses.checks`.

Labels out of range raise ``IndexError``; only reading the labels finds them.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from math import inf
from typing import Any

from cupylosses import checks
from cupylosses.checks import FLOATING, INTEGER, dtype_name
from cupylosses.definition.base import Definition, Parameter
from cupylosses.engines.softmax.call import Rows
from cupylosses.engines.softmax.definition import CHECKS, IGNORED, SoftmaxLoss


def kind(loss: SoftmaxLoss, target: Any) -> str:
    """Returns the kind of a target. If the loss has several, the dtype decides, never the shape."""
    if len(loss.targets) == 1:
        return loss.targets[0]
    return str(loss.dense) if dtype_name(target) in FLOATING else "indices"


def class_dimension(loss: SoftmaxLoss, value: Any, shape: Sequence[int]) -> int:
    """Returns the class dimension counted from 0; None stands for torch's default: 1, or 0 for a single row."""
    rank, name = len(shape), loss.operands[0].name
    if rank == 0:
        raise ValueError(
            f"{loss.name}: `{name}` needs a class dimension, got no dimensions. Pass shape (1, C) or (C,)."
        )
    if value is None:
        return 1 if rank > 1 else 0
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{loss.name}: `class_dim` must be an integer, got {value!r}.")
    if not -rank <= int(value) < rank:
        raise ValueError(
            f"{loss.name}: `class_dim` must be within {-rank} to {rank - 1} for `{name}` of shape {tuple(shape)}, got "
            f"{value}."
        )
    return int(value) % rank


def scale(loss: SoftmaxLoss, name: str, value: Any) -> float:
    """Checks a factor or divisor of the logits: finite and above 0."""
    value = checks.parameter(loss, Parameter(name, 1.0, "", minimum=0.0, exclusive=True), value)
    if value == inf:
        raise ValueError(f"{loss.name}: `{name}` must be finite, got inf.")
    return value


def softcap(loss: SoftmaxLoss, value: Any) -> float:
    """Checks the bound of capped logits; returns 0 for None."""
    return 0.0 if value is None else scale(loss, "softcap", value)


def ignore_index(loss: SoftmaxLoss, value: Any, target_kind: str) -> int:
    """Checks the label of ignored rows. Dense targets have none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{loss.name}: `ignore_index` must be an integer, got {value!r}.")
    if not -(2**63) <= int(value) < 2**63:
        raise ValueError(f"{loss.name}: `ignore_index` must fit into 64 bits, as labels do, got {value!r}.")
    if target_kind != "indices" and value != IGNORED:
        raise ValueError(
            f"{loss.name}: `ignore_index` needs class indices, got a floating target, which holds probabilities. Leave "
            "rows out with `mask`."
        )
    return int(value)


def without_probabilities(loss: SoftmaxLoss, target_kind: str, parameters: Sequence[float], accuracy: bool) -> None:
    """Raises if dense targets are combined with an argument that only class indices support."""
    if target_kind == "indices":
        return
    for spec, value in zip(loss.parameters, parameters, strict=True):
        if spec.name in loss.only_of_indices and value != spec.default:
            raise ValueError(
                f"{loss.name}: `{spec.name}` needs class indices, got {value!r} and a floating target, which holds "
                f"probabilities. Leave it at {spec.default!r}, or pass `target.argmax(class_dim)`."
            )
    if accuracy:
        raise ValueError(
            f"{loss.name}: `return_accuracy` needs class indices, got a floating target, which holds probabilities."
        )


def switch(loss: SoftmaxLoss, name: str, value: Any) -> bool:
    """Checks that an argument is a bool, and returns it."""
    if value is not True and value is not False:
        raise TypeError(f"{loss.name}: `{name}` must be True or False, got {value!r}.")
    return value


def check_of_targets(loss: SoftmaxLoss, value: Any) -> str:
    """Checks the moment at which a label out of range raises."""
    if value not in CHECKS:
        expected = ", ".join(map(repr, CHECKS))
        raise ValueError(f"{loss.name}: `check_targets` must be one of {expected}, got {value!r}.")
    return value


def dtypes(call: Rows) -> None:
    """Raises if an array has an unsupported dtype."""
    loss = call.loss
    for name, x in call.arrays.items():
        dtype = dtype_name(x)
        if name == "mask" and dtype != "bool":
            raise TypeError(
                f"{loss.name}: `mask` must be bool, True where a row counts, got {dtype}. Pass `mask != 0`."
            )
        labels = x is call.operands[1] and call.kind == "indices"
        if labels and dtype not in INTEGER:
            raise TypeError(
                f"{loss.name}: `{name}` must have one of the dtypes {', '.join(INTEGER)}, got {dtype}. Class indices "
                "are integers: convert them with `.long()` or `.astype('int64')`."
            )
        if not labels and name != "mask" and dtype not in FLOATING:
            swapped = name == loss.operands[0].name and dtype_name(call.operands[1]) in FLOATING
            hint = (
                f"Are `{name}` and `{loss.operands[1].name}` swapped?"
                if swapped
                else "Convert it with `.to(torch.float32)` or `.astype('float32')`."
            )
            raise TypeError(
                f"{loss.name}: `{name}` must have one of the dtypes {', '.join(FLOATING)}, got {dtype}. {hint}"
            )


def shapes(call: Rows) -> None:
    """Raises if shapes do not match.

    The target must have the rows of the logits, class weights must have one number per class, and a mask must broadcast
    to the rows.
    """
    loss, rows, classes = call.loss, call.shape, call.classes
    first, second = (x.name for x in loss.operands)
    shape, target_shape = (tuple(x.shape) for x in call.operands)
    if call.kind == "indices" and target_shape != rows:
        raise ValueError(
            f"{loss.name}: `{second}` must have the shape of `{first}` without its class dimension {call.class_dim}, "
            f"{rows}, got `{first}` of shape {shape} and `{second}` of shape {target_shape}. "
            f"{_hint(call, shape, target_shape)}"
        )
    if call.kind != "indices" and target_shape != shape:
        hint = "Expand or reshape one of them."
        if target_shape == rows and "indices" in loss.targets:
            hint = "A floating target holds probabilities; convert class indices with `.long()` or `.astype('int64')`."
        raise ValueError(
            f"{loss.name}: `{second}` must have the shape of `{first}`, {shape}, got {target_shape}. {hint}"
        )
    if call.weight is not None and tuple(call.weight.shape) != (classes,):
        raise ValueError(
            f"{loss.name}: `{loss.weights}` must have one number per class, shape ({classes},) for `{first}` of shape "
            f"{shape} and class dimension {call.class_dim}, got {tuple(call.weight.shape)}."
        )
    if call.mask is not None and not _broadcasts(tuple(call.mask.shape), rows):
        raise ValueError(
            f"{loss.name}: `mask` must broadcast to the shape of the rows, {rows}, got {tuple(call.mask.shape)}. It "
            "has one element per row, and no class dimension."
        )


def _hint(call: Rows, shape: tuple[int, ...], target_shape: tuple[int, ...]) -> str:
    if target_shape == shape:
        return (
            f"Class indices have no class dimension; pass `{call.loss.operands[1].name}.argmax({call.class_dim})`"
            + (", or convert probabilities with `.float()`." if call.loss.dense == "probabilities" else ".")
        )
    fits = [d for d in range(len(shape)) if shape[:d] + shape[d + 1 :] == target_shape]
    if fits:
        d = -1 if len(shape) - 1 in fits else fits[0]
        return f"If the classes are in dimension {d}, pass class_dim={d}."
    if (
        len(target_shape) == len(shape)
        and target_shape[: call.class_dim] + target_shape[call.class_dim + 1 :] == call.shape
    ):
        return f"Drop its dimension of size {target_shape[call.class_dim]} with `.squeeze({call.class_dim})`."
    return "There is one label per row."


def _broadcasts(shape: tuple[int, ...], rows: tuple[int, ...]) -> bool:
    return len(shape) <= len(rows) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(rows), strict=False))


def without_gradients(call: Rows) -> None:
    """Raises if class weights require a gradient with class indices.

    As in torch, they are constants there. With dense targets, the formula has a gradient with respect to them.
    """
    if call.kind == "indices" and getattr(call.weight, "requires_grad", False):
        name = call.loss.weights
        raise ValueError(f"{call.loss.name}: `{name}` has no gradient, but requires one; pass `{name}.detach()`.")


def arrays(call: Rows) -> None:
    """Runs all checks of dtypes and shapes."""
    dtypes(call)
    shapes(call)
    without_gradients(call)


def bad_label(loss: Definition, position: Sequence[int], value: int, classes: int, alike: bool) -> IndexError:
    """Returns the error for a label that is neither a class nor the ignored one.

    ``alike`` is True if all such labels are equal. Labels are the last operand.
    """
    where = f"[{', '.join(map(str, position))}]" if position else ""
    hint = f"; did you mean ignore_index={value}?" if alike else "."
    allowed = f"a class index, 0 to {classes - 1}, or `ignore_index`"
    if classes == 0:
        allowed = "`ignore_index`, as there are no classes"
    return IndexError(
        f"{loss.name}: `{loss.operands[-1].name}{where}` must be {allowed}, "
        f"got {value} for {classes} class{'es' * (classes != 1)}{hint}"
    )
