"""A call for log-probabilities: its static part, its arrays by name, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class TokenLogProbs(NamedTuple):
    """The result with ``return_entropy``: log-probabilities of the labels, and the entropy of each row."""

    log_probs: Any
    entropy: Any


class Static(NamedTuple):
    """The settings that plans specialise on.

    Attributes:
        several: True if a row has several labels, in the last dimension of the index.
        masked: True if a mask is among the arrays.
        capped: True if logits are capped.
        entropy: True if the entropy is computed too, as one more value of each row.
        ignore_index: The label that does not count.
        check: When a label that is no class raises.
        out_dtype: The dtype of the result.
        has_tangent: Of the arrays, those that have a tangent: the call is a derivative along these.
    """

    several: bool
    masked: bool
    capped: bool
    entropy: bool
    ignore_index: int
    check: str
    out_dtype: str | None
    has_tangent: tuple[bool, ...] = ()


class LinearStatic(NamedTuple):
    """The settings of :class:`Static`, then those of the layer:

    Attributes:
        biased: True if a bias is among the arrays.
        logits_dtype: The dtype of the logits; None for that of the operands.
        accumulate_dtype: The dtype in which chunks add up the gradient of the weight; None to choose by their number.
        max_memory: Bytes that a chunk of logits may take; None to choose.
        adds: True if the gradient of the weight is added to the last of the arrays.
    """

    several: bool
    masked: bool
    capped: bool
    entropy: bool
    ignore_index: int
    check: str
    out_dtype: str | None
    has_tangent: tuple[bool, ...]
    biased: bool
    logits_dtype: str | None
    accumulate_dtype: str | None
    max_memory: int | None
    adds: bool = False

    @property
    def of_rows(self) -> Static:
        """The settings of the rows."""
        return Static._make(self[: len(Static._fields)])


def linear_positions(static: LinearStatic) -> Mapping[str, int]:
    """Positions of the arrays of a call with a linear layer, by name."""
    names = ["input", "linear_weight", "index", *["linear_bias"] * static.biased, *["mask"] * static.masked]
    names += ["main_grad"] * static.adds
    return {name: i for i, name in enumerate(names)}


def positions(static: Static) -> Mapping[str, int]:
    """Positions of the arrays of a call, by name."""
    return {name: i for i, name in enumerate(["logits", "index", *["mask"] * static.masked])}


def value_shape(static: Static | LinearStatic, rows: tuple[Any, ...], index: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shape of the packed result: of the index, or with the entropy one more value per row, which is the last."""
    if not static.entropy:
        return index
    return (*rows, (index[-1] if static.several else 1) + 1)


def unpacked(static: Static | LinearStatic, packed: Any) -> Any:
    """The public result, of views of the packed one."""
    if not static.entropy:
        return packed
    return TokenLogProbs(packed[..., :-1] if static.several else packed[..., 0], packed[..., -1])
