"""Off-headline cases of losses of sequences. The recursion over frames bounds their time, so eager is the bar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarking.cases import Case, Layout, case
from benchmarking.sequence import sequences
from cupylosses.definition.registry import registry
from cupylosses.engines.sequence.definition import SequenceLoss

F32, F64 = "float32", "float64"

SEQUENCES = "sequences"


def cases() -> Iterator[Case]:
    """All cases, by frames, samples, classes and labels."""
    yield _case((512, 64, 128, 60), F32)
    yield _case((512, 64, 128, 60), F32, reduction="none")
    yield _case((512, 64, 128, 60), F32, mode="forward")
    yield _case((512, 64, 128, 60), F64)
    # The frames of a sample are adjacent in memory, as in the output of a batch-first model.
    yield _case((512, 64, 128, 60), F32, {0: Layout((1, 0, 2))})
    yield _case((1500, 4, 5000, 200), F32)
    yield _case((50, 256, 37, 10), F32)
    yield _case((20, 1, 11, 3), F32)
    yield _case((512, 64, 128, 60), F32, name="ctc_loss")


def _case(
    sizes: Sequence[int],
    dtype: str,
    layouts: Mapping[int, Layout] | None = None,
    name: str = "ctc_loss_with_logits",
    **fields: Any,
) -> Case:
    return case(SEQUENCES, sequences(registry(SequenceLoss)[name], sizes, dtype), layouts, **fields)
