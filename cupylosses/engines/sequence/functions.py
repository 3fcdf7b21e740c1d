"""Base classes of sequence functions that are not losses: their definitions and engines.

A call has the arrays and the static part of a CTC loss without a reduction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from cupylosses.call import Call, Parts
from cupylosses.engines.base import Apart, Wanted
from cupylosses.engines.sequence import checks as sequence_checks
from cupylosses.engines.sequence.call import Static
from cupylosses.engines.sequence.definition import SequenceLoss
from cupylosses.engines.sequence.engine import SequenceEngine


@dataclass(frozen=True, eq=False, kw_only=True)
class SequenceFunction(SequenceLoss):
    """Definition of a function with the operands of a CTC loss and without a reduction."""

    EXTRA: ClassVar[tuple[str, ...]] = ("input_lengths", "target_lengths")

    @cached_property
    def common(self) -> Mapping[str, Any]:
        lengths = dict.fromkeys(self.EXTRA)
        return {**lengths, "blank": 0, "batch_first": False, "check_targets": "lazy"}

    @cached_property
    def kept(self) -> dict[str, Any]:
        return {}

    @property
    def reductions(self) -> tuple[str, ...]:
        return ("none",)

    @property
    def common_texts(self) -> Mapping[str, str]:
        return {
            **super().common_texts,
            "input_lengths": "Number of frames of each sample, at most T: integers in a tensor or an array on any "
            "device, of shape (N,) or (N, 1), in a tuple or a list; one for one sample. Later frames are not read. "
            "Default None, all T.",
            "target_lengths": "Number of labels of each sample, at most S, in the same form. Default None, all S.",
            "check_targets": "When labels that are no class, and lengths out of range, raise: 'sync' at once, which "
            "waits for the GPU; 'lazy' at the next call after a kernel has found one; 'off' never. What the host knows "
            "is checked at once.",
        }

    @property
    def symbols(self) -> str:
        return (
            "with alignments c_1 ... c_T, sequences of classes that give the target when repeats are collapsed and "
            "then blanks dropped."
        )


class SequenceFunctionEngine(SequenceEngine):
    """Engine of functions with the operands of a CTC loss."""

    needs_chip = False
    contracts = False
    Definition: ClassVar[Any] = SequenceFunction

    def bind(
        self, loss: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        return super().bind(loss, (*arrays, None, None, None), settings)

    def checked(self, loss: Any, settings: tuple[Any, ...]) -> Static:
        options = dict(zip(loss.setting_names, settings, strict=True))
        return Static(
            reduction="none",
            blank=sequence_checks.integer(loss, "blank", options["blank"]),
            batch_first=sequence_checks.switch(loss, "batch_first", options["batch_first"]),
            check=sequence_checks.choice(loss, "check_targets", options["check_targets"]),
        )

    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        return wide_dtype(super().promoted(call))

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        return None

    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        """Returns the call without checks, and ``grad_output`` unchanged: there is no divisor."""
        return call._replace(static=call.static._replace(check="off")), grad_output

    def trained(self, call: Call) -> Wanted:
        """Returns False for every array: kernels compute values only."""
        return (False,) * len(call.arrays)


def wide_dtype(dtype: str) -> str:
    """Returns the dtype of floating-point results, which is no narrower than the arithmetic."""
    return "float64" if dtype == "float64" else "float32"


def in_order(xp: Any, static: Static, shape: tuple[Any, ...], x: Any) -> Any:
    """Returns results of shape (T, samples of all batches, ...) in the dimension order of the first operand.

    ``shape`` is the shape of the returned array. Its last dimensions may be results of a frame.
    """
    at = static.batches + int(static.batched and static.batch_first)
    moved = (shape[at], *[n for d, n in enumerate(shape) if d != at])
    order = (*range(1, at + 1), 0, *range(at + 1, len(shape)))
    return xp.permute_dims(xp.reshape(x, moved), order)
