"""Off-headline cases of losses of rows of scores, with their bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarking.cases import Case, Layout, case, transposed
from benchmarking.figures import DTYPES, HVP
from benchmarking.row_margin import scores
from cupylosses.definition.registry import registry
from cupylosses.engines.row_margin.definition import MarginLoss

F32, BF16 = "float32", "bfloat16"

SCORES, SECOND = "scores", "second derivatives of scores"

ONE, SEVERAL = "multi_margin_loss", "multilabel_margin_loss"


def cases() -> Iterator[Case]:
    """All cases."""
    for dtype in DTYPES:
        for shape in ((1 << 22, 10), (65536, 1000), (2048, 32000), (16, 1 << 18), (3, 1000003)):
            yield _case(ONE, shape, dtype)
        yield _case(ONE, (65536, 1000), dtype, transposed(2))
        yield _case(ONE, (10655, 1096), dtype, Layout((1, 0), offset=1))
        yield _case(SEVERAL, (1 << 20, 20), dtype)
        yield _case(SEVERAL, (1 << 20, 20), dtype, transposed(2))
    yield _case(ONE, (65536, 1000), F32, reduction="none")
    yield _case(ONE, (65536, 1000), BF16, Layout(offset=1))
    yield _case(ONE, (1024, 100), F32)
    for dtype in DTYPES:
        yield _case(ONE, (65536, 1000), dtype, group=SECOND, mode=HVP, copy_bar=0.4)
        yield _case(SEVERAL, (1 << 20, 20), dtype, group=SECOND, mode=HVP, copy_bar=0.4)


def _case(name: str, shape: Sequence[int], dtype: str, layout: Layout | None = None, **fields: Any) -> Case:
    layouts = {0: layout} if layout else None
    return case(fields.pop("group", SCORES), scores(registry(MarginLoss)[name], shape, dtype), layouts, **fields)
