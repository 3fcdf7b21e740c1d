"""Off-headline cases of log-probabilities of labels, with their bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarking.cases import Case, Layout, case, transposed
from benchmarking.figures import DTYPES, HVP
from benchmarking.log_probs import log_probs

LOG_PROBS, SECOND = "log-probabilities", "second derivatives of log-probabilities"

#: Shapes (rows, classes): a large vocabulary, rows of 1024, and few classes.
VOCABULARY, COMMON, ODD, FEW = (8192, 32000), (65536, 1024), (2000000, 33), (6710886, 10)

#: Bars for few classes, by dtype.
FEW_BARS = {"float32": 0.6, "bfloat16": 0.45}


def cases() -> Iterator[Case]:
    """All cases."""
    for dtype in DTYPES:
        for shape in (VOCABULARY, COMMON):
            yield _case(shape, dtype, copy_bar=0.7)
        for shape in (ODD, FEW):
            yield _case(shape, dtype, copy_bar=FEW_BARS[dtype])
        yield _case((1024, 32000), dtype, transposed(2), copy_bar=0.5)
        yield _case(VOCABULARY, dtype, options={"return_entropy": True}, copy_bar=0.7)
        yield _case(ODD, dtype, options={"return_entropy": True})
        yield _case(VOCABULARY, dtype, labels=4, copy_bar=0.7)
        for shape in (VOCABULARY, ODD):
            yield _second(shape, dtype, copy_bar=0.4)
            yield _second(shape, dtype, {"return_entropy": True}, copy_bar=0.4)
        yield _second(COMMON, dtype, labels=4, copy_bar=0.4)
        yield _second(COMMON, dtype, {"softcap": 30.0, "return_entropy": True})


def _second(shape: Sequence[int], dtype: str, options: dict[str, Any] | None = None, **fields: Any) -> Case:
    return _case(shape, dtype, options=options, group=SECOND, mode=HVP, **fields)


def _case(
    shape: Sequence[int],
    dtype: str,
    layout: Layout | None = None,
    options: dict[str, Any] | None = None,
    labels: int = 0,
    **fields: Any,
) -> Case:
    layouts = {0: layout} if layout else None
    workload = log_probs(shape, dtype, options, labels=labels)
    return case(fields.pop("group", LOG_PROBS), workload, layouts, reduction="none", **fields)
