"""Call of a linear softmax loss: the settings that plans specialise on, and the softmax call that it contains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cupylosses.call import Call
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from cupylosses.engines.softmax.call import Rows
from cupylosses.engines.softmax.call import Static as SoftmaxStatic
from cupylosses.engines.softmax.definition import SoftmaxLoss


class Static(NamedTuple):
    """Settings of the softmax loss (:class:`cupylosses.engines.softmax.call.Static`), then those of the layer.

    Attributes:
        biased: True if a bias is among the arrays.
        logits_dtype: Dtype of the logits; None for the dtype of the operands.
        accumulate_dtype: Dtype in which the chunks accumulate the weight's gradient; None to choose it by the number
            of chunks.
        max_memory: Maximum size of a chunk of logits in bytes; None to choose it.
        skip_ignored: True if rows that do not count are excluded from the matrix products.
        token_weighted: True if rows have weights.
        adds: True if the weight's gradient is added to the last array, `main_grad`.
    """

    kind: str
    weighted: bool
    masked: bool
    class_dim: int
    ignore_index: int
    reduction: str
    out_dtype: str | None
    flags: tuple[int, ...]
    smoothed: bool
    capped: bool
    plain: bool
    limit: int
    lse: bool
    accuracy: bool
    inplace: bool
    check: str
    normalized: bool
    has_tangent: tuple[bool, ...]
    biased: bool
    logits_dtype: str | None
    accumulate_dtype: str | None
    max_memory: int | None
    skip_ignored: bool
    token_weighted: bool = False
    adds: bool = False

    @property
    def softmax(self) -> SoftmaxStatic:
        """Settings of the softmax loss."""
        return SoftmaxStatic._make(self[: len(SoftmaxStatic._fields)])


class Logits(NamedTuple):
    """Stand-in for logits that are not computed yet: shape and dtype, all that checks and divisors read."""

    shape: tuple[Any, ...]
    dtype: str


def positions(static: Static) -> Mapping[str, int]:
    """Returns the positions of a call's arrays, by name."""
    names = ["input", "linear_weight", "target", *["linear_bias"] * static.biased]
    names += [*["weight"] * static.weighted, *["mask"] * static.masked]
    names += [*["token_weight"] * static.token_weighted, *["main_grad"] * static.adds]
    return {name: i for i, name in enumerate(names)}


def inner_loss(call: Call) -> SoftmaxLoss:
    """Returns the softmax loss of a call."""
    assert isinstance(call.loss, LinearSoftmaxLoss)
    return call.loss.inner


def inner_arrays(static: Static, logits: Any, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arrays of the call of the softmax loss."""
    at = positions(static)
    return logits, *[arrays[at[x]] for x in ("target", "weight", "mask") if x in at]


def logits_shape(input: tuple[Any, ...], weight: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the shape of the logits. Classes are last; in K-dimensional losses they are second, as in torch."""
    if len(weight) == 2:
        return (*input[:-1], weight[0])
    return (*input[:-1], *weight[:-1])


def inner_rows(call: Call) -> Rows:
    """Returns the call of the softmax loss, with a stand-in for the logits."""
    static, arrays = call.static, call.arrays
    shape = logits_shape(tuple(arrays[0].shape), tuple(arrays[1].shape))
    dtype = static.logits_dtype or arrays[0].dtype
    inner = Call(
        inner_loss(call),
        inner_arrays(static, Logits(shape, dtype), arrays),
        static.softmax._replace(has_tangent=()),
        call.scalars,
        call.normalizer,
    )
    return Rows(inner)
