"""Call for log-probabilities: its settings, the positions of its arrays, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cupylosses.engines.softmax.call import Static as RowStatic


class TokenLogProbs(NamedTuple):
    """Result with ``return_entropy``: log-probabilities of the labels, and the entropy of each row."""

    log_probs: Any
    entropy: Any


class Static(NamedTuple):
    """Settings that plans specialise on.

    Attributes:
        several: True if a row has several labels, in the last dimension of the index.
        masked: True if a mask is among the arrays.
        capped: True if logits are capped.
        entropy: True if the entropy is computed too, as one more value per row.
        ignore_index: Label that does not count.
        check: Setting `check_targets`: when a label out of range raises.
        out_dtype: Dtype of the result.
        has_tangent: One entry per array, True if it has a tangent; the call is then a derivative along the tangents.
            Empty otherwise.
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
    """Settings of :class:`Static`, then those of the layer.

    Attributes:
        biased: True if a bias is among the arrays.
        logits_dtype: Dtype of the logits; None for the dtype of the operands.
        accumulate_dtype: Dtype in which the chunks accumulate the weight's gradient; None to choose it by the number
            of chunks.
        max_memory: Maximum size of a chunk of logits in bytes; None to choose it.
        adds: True if the weight's gradient is added to the last array, `main_grad`.
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
        """Settings of the rows of logits."""
        return Static._make(self[: len(Static._fields)])


def of_one_label(static: Static, rank: int) -> RowStatic:
    """Returns the settings of a loss of rows for logits of this rank, one label per row and no entropy."""
    return RowStatic(
        kind="indices",
        weighted=False,
        masked=static.masked,
        class_dim=rank - 1,
        ignore_index=static.ignore_index,
        reduction="none",
        out_dtype=static.out_dtype,
        flags=(),
        smoothed=False,
        capped=static.capped,
        plain=True,
        limit=0,
        lse=False,
        accuracy=False,
        inplace=False,
        check=static.check,
    )


def linear_positions(static: LinearStatic) -> Mapping[str, int]:
    """Returns the positions of the arrays of a call with a linear layer, by name."""
    names = ["input", "linear_weight", "index", *["linear_bias"] * static.biased, *["mask"] * static.masked]
    names += ["main_grad"] * static.adds
    return {name: i for i, name in enumerate(names)}


def positions(static: Static) -> Mapping[str, int]:
    """Returns the positions of a call's arrays, by name."""
    return {name: i for i, name in enumerate(["logits", "index", *["mask"] * static.masked])}


def value_shape(static: Static | LinearStatic, rows: tuple[Any, ...], index: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the shape of the packed result: that of the index; an entropy is one more value at the end of a row."""
    if not static.entropy:
        return index
    return (*rows, (index[-1] if static.several else 1) + 1)


def unpacked(static: Static | LinearStatic, packed: Any) -> Any:
    """Returns the public result, made of views of the packed result."""
    if not static.entropy:
        return packed
    return TokenLogProbs(packed[..., :-1] if static.several else packed[..., 0], packed[..., -1])
