"""Off-headline cases of region losses, with their bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarking.cases import Case, Layout, case, channels_last
from benchmarking.figures import DTYPES, HVP
from benchmarking.regions import regions
from cupylosses.definition.registry import registry
from cupylosses.engines.regions.definition import RegionLoss

F32, BF16 = "float32", "bfloat16"

REGIONS, SECOND = "regions", "second derivatives of regions"

#: Logits of street scenes.
STREETS = (8, 19, 512, 512)
#: Logits of volumes with dense targets, with few classes and with many.
DENSE = (2, 8, 128, 128, 64)
MANY_DENSE = (2, 32, 128, 128, 48)


def cases() -> Iterator[Case]:
    """All cases."""
    for dtype in DTYPES:
        yield _case("dice_loss", STREETS, dtype)
        yield _case("dice_loss", STREETS, dtype, channels_last(4))
        yield _case("dice_loss", (2, 4, 128, 128, 128), dtype)
        yield _case("dice_ce_loss", (1, 2, 96, 96, 96), dtype)
        yield _case("dice_focal_loss", (8, 2, 1024, 1024), dtype, channels_last(4))
        # A number of pixels that is not a multiple of a vector; then samples whose pixels interleave in memory.
        yield _case("tversky_loss", (4, 21, 513, 513), dtype)
        yield _case("dice_loss", (4, 16, 256, 256), dtype, Layout((2, 3, 0, 1)))
    yield _case("dice_loss", STREETS, BF16, Layout(offset=1))
    yield _case("dice_loss", STREETS, F32, Layout(step=2))
    yield _case("generalized_dice_loss", (4, 150, 256, 256), BF16)
    yield _case("jaccard_loss", (16, 3, 32, 32), F32)
    for dtype in DTYPES:
        yield _case("dice_loss", DENSE, dtype, target=dtype)
        yield _case("dice_loss", MANY_DENSE, dtype, target=dtype)
        yield _case("dice_focal_loss", MANY_DENSE, dtype)
    yield _case("dice_ce_loss", (4, 150, 256, 256), BF16, target=BF16)
    yield _case("dice_loss", (2, 32, 512, 512), BF16, channels_last(4), target=BF16)
    # More classes than most kernels have registers for.
    for dtype in DTYPES:
        yield _case("dice_loss", (8, 21, 512, 512), dtype)
    yield _case("dice_loss", (16, 21, 513, 513), BF16)
    yield _case("dice_focal_loss", (8, 21, 512, 512), BF16)
    yield _case("dice_loss", (2, 150, 512, 512), F32)
    for dtype in DTYPES:
        yield _second("dice_loss", STREETS, dtype)
        yield _second("dice_loss", STREETS, dtype, channels_last(4))
        yield _second("dice_focal_loss", (2, 4, 128, 128, 128), dtype)
        yield _second("dice_loss", DENSE, dtype, target=dtype)
        yield _second("dice_loss", MANY_DENSE, dtype, target=dtype)
    yield _second("dice_focal_loss", (4, 16, 384, 384), BF16)
    yield _second("dice_loss", (4, 16, 256, 256), F32, Layout((2, 3, 0, 1)))


def _case(
    name: str, shape: Sequence[int], dtype: str, layout: Layout | None = None, target: str = "int64", **fields: Any
) -> Case:
    work = regions(registry(RegionLoss)[name], shape, dtype, target)
    return case(fields.pop("group", REGIONS), work, {0: layout} if layout else None, **fields)


def _second(name: str, shape: Sequence[int], dtype: str, layout: Layout | None = None, **fields: Any) -> Case:
    return _case(name, shape, dtype, layout, group=SECOND, mode=HVP, copy_bar=0.4, **fields)
