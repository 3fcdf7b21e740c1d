"""Checks, with their error messages, of the arguments that a linear layer adds to a softmax loss.

They follow the conventions of :mod:`cupylosses.checks`.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from cupylosses.checks import FLOATING, dtype_name


def operands(loss: Any, input: Any, weight: Any, bias: Any, target: Any) -> None:
    """Checks the shapes of input, weight and bias, which determine the shapes of all other arrays."""
    of_input, of_weight = tuple(input.shape), tuple(weight.shape)
    if not of_input:
        raise ValueError(f"{loss.name}: `input` needs a last dimension of features, got no dimensions.")
    if len(of_weight) < 2:
        raise ValueError(
            f"{loss.name}: `linear_weight` must have shape (C, D), as `torch.nn.Linear.weight`, got {of_weight}."
        )
    if of_input[-1] != of_weight[-1]:
        hint = " Is it transposed?" if len(of_weight) == 2 and of_input[-1] == of_weight[0] else ""
        raise ValueError(
            f"{loss.name}: `input` and `linear_weight` must have the same last dimension, got {of_input} and "
            f"{of_weight}.{hint}"
        )
    if len(of_weight) > 2 and len(of_input) != 2:
        raise ValueError(
            f"{loss.name}: `linear_weight` of shape {of_weight} needs an `input` of shape (N, D), got {of_input}."
        )
    if bias is not None and tuple(bias.shape) != of_weight[:-1]:
        raise ValueError(
            f"{loss.name}: `linear_bias` must have the shape of `linear_weight` without its last dimension, "
            f"{of_weight[:-1]}, got {tuple(bias.shape)}."
        )


def dtypes(loss: Any, layer: Mapping[str, Any]) -> None:
    """Checks that input, weight and bias have one floating dtype. ``layer`` maps their names to the arrays."""
    layer_dtypes = {name: dtype_name(x) for name, x in layer.items()}
    for name, dtype in layer_dtypes.items():
        if dtype not in FLOATING:
            raise TypeError(
                f"{loss.name}: `{name}` must have one of the dtypes {', '.join(FLOATING)}, got {dtype}. Convert "
                "it with `.to(torch.float32)` or `.astype('float32')`."
            )
    if len(set(layer_dtypes.values())) > 1:
        got = ", ".join(f"`{name}` of {dtype}" for name, dtype in layer_dtypes.items())
        raise TypeError(
            f"{loss.name}: the operands of the layer must have one dtype, got {got}. Convert them, or use "
            "`torch.autocast`."
        )


def token_weight(loss: Any, array: Any, rows: tuple[int, ...]) -> None:
    """Checks that `token_weight` is floating, broadcasts to one number per row and requires no gradient."""
    dtype, shape = dtype_name(array), tuple(array.shape)
    if dtype not in FLOATING:
        raise TypeError(f"{loss.name}: `token_weight` must have one of the dtypes {', '.join(FLOATING)}, got {dtype}.")
    if len(shape) > len(rows) or any(a not in (1, b) for a, b in zip(shape[::-1], rows[::-1], strict=False)):
        raise ValueError(f"{loss.name}: `token_weight` must broadcast to the shape of the rows, {rows}, got {shape}.")
    if getattr(array, "requires_grad", False):
        raise ValueError(
            f"{loss.name}: `token_weight` has no gradient, but requires one; pass `token_weight.detach()`, or multiply "
            "the result of reduction='none'."
        )


def main_grad(loss: Any, array: Any, weight: Any, library: str) -> None:
    """Checks the library, dtype, shape and strides of `main_grad`, and that it requires no gradient."""
    if library != "torch":
        raise TypeError(
            f"{loss.name}: `main_grad` is added to by torch's backward, got operands of {library}. Add up what "
            "`value_and_grad` returns."
        )
    dtype = "float64" if dtype_name(weight) == "float64" else "float32"
    if dtype_name(array) != dtype:
        raise TypeError(
            f"{loss.name}: `main_grad` must be {dtype} for operands of {dtype_name(weight)}, got {dtype_name(array)}."
        )
    if tuple(array.shape) != tuple(weight.shape):
        raise ValueError(
            f"{loss.name}: `main_grad` must have the shape of `linear_weight`, {tuple(weight.shape)}, got "
            f"{tuple(array.shape)}."
        )
    if not array.is_contiguous():
        raise ValueError(
            f"{loss.name}: `main_grad` must be contiguous, got strides {tuple(array.stride())}. Allocate it with "
            "`torch.zeros(linear_weight.shape, ...)`."
        )
    if array.requires_grad:
        raise ValueError(f"{loss.name}: `main_grad` has no gradient, but requires one; pass `main_grad.detach()`.")


def not_transformed(loss: Any, static: Any) -> None:
    """Raises if a call with `main_grad` is transformed.

    A transform may call a function several times, or only once for a graph; nothing may be added to a buffer there.
    """
    if static.adds:
        raise NotImplementedError(
            f"{loss.name}: `main_grad` is for backward in eager mode, not for transforms, graphs of torch.compile or "
            "create_graph=True. Leave it out, and add up the gradient of `linear_weight`."
        )


def settings(loss: Any, arguments: Mapping[str, Any], dtype: str) -> tuple[str | None, str | None, int | None, bool]:
    """Returns the checked settings of the layer.

    These are the dtype of the logits (None for the operands'), the dtype in which the weight's gradient is accumulated,
    the maximum number of bytes of a chunk, and a flag that is True if ignored rows are skipped.
    """
    logits = _wider(loss, "logits_dtype", arguments["logits_dtype"], dtype)
    accumulate = _wider(loss, "accumulate_dtype", arguments["accumulate_dtype"], dtype)
    memory = arguments["max_memory"]
    if memory is not None:
        if isinstance(memory, bool) or not isinstance(memory, numbers.Integral):
            raise TypeError(f"{loss.name}: `max_memory` must be a number of bytes or None, got {memory!r}.")
        if memory <= 0:
            raise ValueError(f"{loss.name}: `max_memory` must be a number of bytes > 0, got {memory!r}.")
        memory = int(memory)
    skip = arguments["skip_ignored"]
    if skip is not True and skip is not False:
        raise TypeError(f"{loss.name}: `skip_ignored` must be True or False, got {skip!r}.")
    return None if logits == dtype else logits, accumulate, memory, skip


def skips(loss: Any, static: Any, skip: bool) -> None:
    """Raises if ``skip`` is set but results per row are requested, or if every row counts."""
    if skip and (static.lse or static.accuracy):
        name = "return_lse" if static.lse else "return_accuracy"
        raise ValueError(f"{loss.name}: `{name}` needs all rows, got skip_ignored=True. Leave out one of them.")
    if skip and static.kind != "indices" and not static.masked:
        raise ValueError(
            f"{loss.name}: `skip_ignored` needs class indices or a `mask`, got class probabilities, which all count."
        )


def _wider(loss: Any, name: str, value: Any, dtype: str) -> str | None:
    """Returns the name of a dtype that must be the operands' own or float32; None stays None."""
    if value is None:
        return None
    requested = getattr(value, "__name__", None) or getattr(value, "name", None) or str(value).removeprefix("torch.")
    if requested not in (dtype, "float32") or (requested == "float32" and dtype == "float64"):
        accepted = " or ".join(dict.fromkeys([repr(dtype), *["'float32'"] * (dtype != "float64")]))
        raise ValueError(f"{loss.name}: `{name}` must be {accepted} for operands of {dtype}, got {value!r}.")
    return requested


def broadcasts(mask: Any, logits: tuple[Any, ...], class_dim: int) -> bool:
    """True if a mask differs in shape from the rows and broadcasts to them."""
    rows, shape = logits[:class_dim] + logits[class_dim + 1 :], tuple(mask.shape)
    if shape == rows or len(shape) > len(rows):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(rows), strict=False))
