"""Off-headline cases of softmax losses of a linear layer. Matrix products bound their time, so eager is the bar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarking.cases import Case, Layout, case, transposed
from benchmarking.figures import HVP
from benchmarking.linear_softmax import layer
from cupylosses.definition.registry import registry
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss

F32, BF16, F16 = "float32", "bfloat16", "float16"

LAYERS = "linear layers"


def cases() -> Iterator[Case]:
    """All cases, by rows, features and classes."""
    yield _case((4096, 2048, 32000), BF16)
    yield _case((4096, 2048, 32000), BF16, reduction="none")
    yield _case((4096, 2048, 32000), BF16, mode="forward")
    yield _case((4096, 2048, 32000), BF16, {1: transposed(2)})
    yield _case((1000, 300, 10007), BF16)
    yield _case((1024, 512, 4096), F32)
    yield _case((65536, 64, 100), F16)
    yield _case((64, 128, 1000), F32)
    yield _case((64, 128, 1000), BF16)
    yield _case((1024, 512, 4096), BF16, mode=HVP)


def _case(sizes: Sequence[int], dtype: str, layouts: Mapping[int, Layout] | None = None, **fields: Any) -> Case:
    loss = registry(LinearSoftmaxLoss)["linear_cross_entropy"]
    return case(LAYERS, layer(loss, sizes, dtype), layouts, **fields)
