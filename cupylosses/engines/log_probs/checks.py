"""Checks of calls for log-probabilities, with their error messages.

They follow the conventions of :mod:`cupylosses.checks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from cupylosses import checks
from cupylosses.checks import FLOATING, INTEGER, dtype_name
from cupylosses.definition.base import Parameter
from cupylosses.engines.softmax import checks as softmax_checks


def scalars(loss: Any, by_name: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the checked scale and softcap of the logits, both divided by the temperature. A softcap of 0 is none."""

    def number(name: str) -> float:
        value = checks.parameter(loss, Parameter(name, 1.0, "", minimum=0.0, exclusive=True), by_name[name])
        if value == inf:
            raise ValueError(f"{loss.name}: `{name}` must be finite, got inf.")
        return value

    temperature = number("temperature")
    cap = 0.0 if by_name["softcap"] is None else number("softcap")
    return number("logit_scale") / temperature, cap / temperature


def settings(loss: Any, by_name: Mapping[str, Any]) -> tuple[bool, int, str]:
    """Returns the checked settings `return_entropy`, `ignore_index` and `check_targets`."""
    return (
        softmax_checks.switch(loss, "return_entropy", by_name["return_entropy"]),
        softmax_checks.ignore_index(loss, by_name["ignore_index"], "indices"),
        softmax_checks.check_of_targets(loss, by_name["check_targets"]),
    )


def several_labels(loss: Any, logits: Sequence[int], index: Any) -> bool:
    """True if the index has one more dimension than the rows, for several labels per row. Raises on other shapes."""
    shape, rank, name = tuple(index.shape), len(logits), loss.operands[0].name
    if rank == 0:
        raise ValueError(
            f"{loss.name}: `{name}` needs a class dimension, got no dimensions. Pass shape (1, C) or (C,)."
        )
    if len(shape) in (rank - 1, rank) and shape[: rank - 1] == tuple(logits[:-1]):
        return len(shape) == rank
    hint = ""
    if len(shape) > 1 and shape[: rank - 1] != tuple(logits[:-1]):
        hint = " Expand the index to the rows."
    raise ValueError(
        f"{loss.name}: `index` must have the shape of the rows of `{name}`, {tuple(logits[:-1])}, and may have one "
        f"more dimension of several labels per row, got `{name}` of shape {tuple(logits)} and `index` of shape "
        f"{shape}.{hint}"
    )


def weight(loss: Any, weight: Any) -> None:
    """Checks that the weight has shape (C, D): one dimension of classes."""
    if len(weight.shape) != 2:
        raise ValueError(
            f"{loss.name}: `linear_weight` must have shape (C, D), as `torch.nn.Linear.weight`, got "
            f"{tuple(weight.shape)}."
        )


def arrays(loss: Any, names: Sequence[str], tensors: Sequence[Any], rows: tuple[int, ...]) -> None:
    """Checks the dtypes of the named arrays, and the shape of the mask.

    Tangents, which have no names, follow these arrays and are not checked.
    """
    for name, x in zip(names, tensors, strict=False):
        dtype = dtype_name(x)
        if name == "mask":
            if dtype != "bool":
                raise TypeError(
                    f"{loss.name}: `mask` must be bool, True where a row counts, got {dtype}. Pass `mask != 0`."
                )
            shape = tuple(x.shape)
            if len(shape) > len(rows) or any(a not in (1, b) for a, b in zip(shape[::-1], rows[::-1], strict=False)):
                raise ValueError(
                    f"{loss.name}: `mask` must broadcast to the shape of the rows, {rows}, got {shape}. It has one "
                    "element per row, and no class dimension."
                )
        elif name == "index":
            if dtype not in INTEGER:
                raise TypeError(
                    f"{loss.name}: `index` must have one of the dtypes {', '.join(INTEGER)}, got {dtype}. Labels are "
                    "integers: convert them with `.long()` or `.astype('int64')`."
                )
        elif dtype not in FLOATING:
            raise TypeError(
                f"{loss.name}: `{name}` must have one of the dtypes {', '.join(FLOATING)}, got {dtype}. Convert it "
                "with `.to(torch.float32)` or `.astype('float32')`."
            )
