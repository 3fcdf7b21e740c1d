"""Off-headline cases of losses of vectors, with their bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarking.cases import Case, Layout, case, transposed
from benchmarking.figures import DTYPES, HVP
from benchmarking.row_statistics import vectors
from cupylosses.definition.registry import registry
from cupylosses.engines.row_statistics.definition import StatisticsLoss

F32, BF16 = "float32", "bfloat16"

VECTORS, SECOND = "vectors", "second derivatives of vectors"

#: Shapes (vectors, features): few features, a common number of features, and few but long vectors.
SHORT, COMMON, FEW = (1 << 22, 8), (65536, 256), (4, 1 << 22)


def cases() -> Iterator[Case]:
    """All cases."""
    across = transposed(2)
    for dtype in DTYPES:
        for shape in (SHORT, COMMON, FEW):
            yield _case("pearson_loss", shape, dtype)
        yield _case("cosine_embedding_loss", COMMON, dtype, {0: across})
        yield _case("ccc_loss", SHORT, dtype, {0: across, 1: across})
        yield _case("triplet_margin_loss", (65536, 255), dtype)
        yield _case("cosine_loss", (3000017, 3), dtype)
        yield _case("cosine_loss", (2000003, 15), dtype, mode="all gradients", reduction="none")
        yield _case("triplet_margin_loss", (1000003, 33), dtype, mode="all gradients")
    yield _case("triplet_margin_loss", COMMON, F32, mode="all gradients")
    yield _case("triplet_margin_loss", COMMON, F32, {2: across}, mode="all gradients", reduction="none")
    yield _case("pearson_loss", COMMON, BF16, {0: Layout(step=2)})
    yield _case("cosine_loss", COMMON, BF16, {1: Layout(offset=1)})
    yield _case("cosine_embedding_loss", (256, 128), F32, reduction="none")
    for dtype in DTYPES:
        for shape in (SHORT, COMMON, FEW):
            yield _second("pearson_loss", shape, dtype)
        yield _second("ccc_loss", SHORT, dtype, {0: across})
        yield _second("triplet_margin_loss", COMMON, dtype)
    yield _second("cosine_loss", COMMON, F32, {0: across, 1: across})


def _case(
    name: str, shape: Sequence[int], dtype: str, layouts: Mapping[int, Layout] | None = None, **fields: Any
) -> Case:
    return case(fields.pop("group", VECTORS), vectors(registry(StatisticsLoss)[name], shape, dtype), layouts, **fields)


def _second(name: str, shape: Sequence[int], dtype: str, layouts: Mapping[int, Layout] | None = None) -> Case:
    return _case(name, shape, dtype, layouts, group=SECOND, mode=HVP, copy_bar=0.4)
