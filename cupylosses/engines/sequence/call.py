"""A call of a sequence loss: its static part, its arrays by name, and its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from cupylosses.call import Call


class Static(NamedTuple):
    """Settings of a call that plans specialise on.

    Attributes:
        reduction, out_dtype, blank, zero_infinity, batch_first: Options of the call.
        batched: True if the first operand has a dimension of samples.
        concatenated: True if the labels of all samples are stored one after another, without padding.
        input_lengths, target_lengths: True if the arrays include these. Without them, all samples have full length.
        weighted, masked: True if the arrays include `weight`, `mask`.
        of_logits: True if the gradient with respect to log-probabilities follows torch's convention: that of logits.
        inplace: True if backward may write the gradient over the first operand.
        check: Time at which invalid data raises, one of :data:`.definition.CHECKS`.
        normalized: True if a normalizer is given.
        batches: Number of leading dimensions of every array that are batches of ``vmap``.
        has_tangent: One flag per array, True if it has a tangent. The call is then the derivative along these tangents.
        by_position: For posteriors: True for a posterior of each label of the target, False for one of each class.
    """

    reduction: str
    out_dtype: str | None = None
    blank: int = 0
    zero_infinity: bool = False
    batch_first: bool = False
    batched: bool = True
    concatenated: bool = False
    input_lengths: bool = True
    target_lengths: bool = True
    weighted: bool = False
    masked: bool = False
    of_logits: bool = False
    inplace: bool = False
    check: str = "lazy"
    normalized: bool = False
    batches: int = 0
    has_tangent: tuple[bool, ...] = ()
    by_position: bool = False

    @property
    def averages_labels(self) -> bool:
        """True if the loss of each sample is divided by its number of labels."""
        return self.reduction == "mean" and not self.normalized

    @property
    def counted(self) -> bool:
        """True if a mean divides by the number of samples that a mask keeps."""
        return self.averages_labels and self.masked


class Sizes(NamedTuple):
    """Sizes of a call.

    ``labels`` is the number of labels that fit in the targets, ``inner`` the number of samples of one batch, and
    ``samples`` the shape of the values, one per sample.
    """

    frames: int
    classes: int
    labels: int
    inner: int
    samples: tuple[int, ...]

    @property
    def every(self) -> int:
        """Number of samples of all batches."""
        return prod(self.samples)

    @property
    def groups(self) -> int:
        """Number of batches. Each has its own concatenated targets."""
        return self.every // self.inner if self.inner else prod(self.samples[:-1])


def names(loss: Any, static: Static) -> tuple[str, ...]:
    """Returns the names of a call's arrays, without tangents."""
    array_names = [x.name for x in loss.operands[:2]]
    array_names += [x for x, has in zip(("input_lengths", "target_lengths"), static[7:9], strict=True) if has]
    return (*array_names, *["weight"] * static.weighted, *["mask"] * static.masked)


def arrays_by_name(call: Call) -> Mapping[str, Any]:
    """Returns the arrays of a call by name, without tangents."""
    return dict(zip(names(call.loss, call.static), call.arrays, strict=False))


def sizes(static: Static, first: Sequence[int], targets: Sequence[int]) -> Sizes:
    """Returns the sizes of a call, from the shapes of its first operand and its targets."""
    batch, shape = tuple(first[: static.batches]), tuple(first[static.batches :])
    if not static.batched:
        return Sizes(shape[0], shape[1], targets[-1], 1, batch)
    frames, inner = (shape[1], shape[0]) if static.batch_first else (shape[0], shape[1])
    return Sizes(frames, shape[2], targets[-1], inner, (*batch, inner))


def sizes_of(call: Call) -> Sizes:
    """Returns the sizes of a call."""
    return sizes(call.static, tuple(call.arrays[0].shape), tuple(call.arrays[1].shape))


def constant_divisor(static: Static, samples: Sequence[int]) -> float:
    """Returns the part of the divisor that depends only on the number of samples."""
    if static.normalized or static.counted or static.reduction in ("none", "sum"):
        return 1.0
    return float(samples[-1]) if static.batched else 1.0
