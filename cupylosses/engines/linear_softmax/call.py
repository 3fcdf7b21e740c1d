"""A call of a linear softmax loss: the settings that plans specialise on, and its call of the softmax loss."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from cupylosses.call import Call
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from cupylosses.engines.softmax.call import Rows
from cupylosses.engines.softmax.call import Static as SoftmaxStatic
from cupylosses.engines.softmax.definition import SoftmaxLoss


class Static(NamedTuple):
    """The settings of the softmax loss (:class:`cupylosses.engines.softmax.call.Static`), then:

    Attributes:
        biased: True if a bias is among the arrays.
        logits_dtype: The dtype of the logits; None for that of the operands.
        accumulate_dtype: The dtype in which chunks add up the gradient of the weight; None to choose by their number.
        max_memory: Bytes that a chunk of logits may take; None to choose.
        skip_ignored: True if rows that do not count are left out of the matrix products.
        token_weighted: True if rows have weights.
        adds: True if the gradient of the weight is added to the last of the arrays.
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
        """The settings of the softmax loss."""
        return SoftmaxStatic._make(self[: len(SoftmaxStatic._fields)])


class Logits(NamedTuple):
    """Logits that are not there: shape and dtype, which is all that checks and divisors ask of them."""

    shape: tuple[Any, ...]
    dtype: str


def positions(static: Static) -> Mapping[str, int]:
    """Positions of the arrays of a call, by name."""
    names = ["input", "linear_weight", "target", *["linear_bias"] * static.biased]
    names += [*["weight"] * static.weighted, *["mask"] * static.masked]
    names += [*["token_weight"] * static.token_weighted, *["main_grad"] * static.adds]
    return {name: i for i, name in enumerate(names)}


def inner_loss(call: Call) -> SoftmaxLoss:
    """The softmax loss of a call."""
    assert isinstance(call.loss, LinearSoftmaxLoss)
    return call.loss.inner


def inner_arrays(static: Static, logits: Any, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays of the softmax loss's call."""
    at = positions(static)
    return logits, *[arrays[at[x]] for x in ("target", "weight", "mask") if x in at]


def logits_shape(input: tuple[Any, ...], weight: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shape of the logits: the classes are last, but those of K-dimensional losses, as in torch, second."""
    if len(weight) == 2:
        return (*input[:-1], weight[0])
    return (*input[:-1], *weight[:-1])


def inner_rows(call: Call) -> Rows:
    """The call of the softmax loss, of logits that are not there."""
    static, arrays = call.static, call.arrays
    shape = logits_shape(tuple(arrays[0].shape), tuple(arrays[1].shape))
    dtype = static.logits_dtype or arrays[0].dtype
    found = Call(
        inner_loss(call),
        inner_arrays(static, Logits(shape, dtype), arrays),
        static.softmax._replace(has_tangent=()),
        call.scalars,
        call.normalizer,
    )
    return Rows(found)


def row_count(shape: tuple[int, ...]) -> int:
    """The number of rows of an input."""
    return prod(shape[:-1])
