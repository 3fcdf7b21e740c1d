"""Off-headline cases of element-wise losses, with their bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarking.cases import Case, Layout, channels_last, transposed
from benchmarking.figures import DTYPES, HVP
from benchmarking.pointwise import PointwiseWorkload, loss_of, over_dimensions, pair, square
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss, modified

F32, BF16, F16, F64 = "float32", "bfloat16", "float16", "float64"

ALL = "all gradients"

#: Losses that are bound by arithmetic in bfloat16.
HEAVY = (
    "binary_cross_entropy", "wing_loss", "msle_loss", "poly1_loss", "itakura_saito_loss", "generalized_cross_entropy",
    "generalized_kl_div", "sigmoid_focal_loss", "asymmetric_loss", "general_robust_loss", "js_div",
)  # fmt: skip

LAYOUTS, BROADCAST, UNALIGNED, UNREDUCED = "different layouts", "broadcast gradients", "unaligned operands", "unreduced"
ARITHMETIC, STRIDED, MODIFIED, SIZES = "heavy arithmetic", "strided operands", "weights, masks, dims", "sizes"
SECOND = "second derivatives"


def cases() -> Iterator[Case]:
    """All cases."""
    yield from _layouts()
    yield from _broadcast()
    yield from _unaligned()
    yield from _unreduced()
    yield from _arithmetic()
    yield from _strided()
    yield from _modified()
    yield from _sizes()
    yield from _second()


def _layouts() -> Iterator[Case]:
    def case(work: PointwiseWorkload, layout: Layout, operand: int = 1, **fields: Any) -> Case:
        return Case(LAYOUTS, work, layouts={operand: layout}, copy_bar=0.5, **fields)

    for name in ("mse_loss", "smooth_l1_loss"):
        for dtype in DTYPES:
            yield case(pair(name, square(26), dtype), transposed(2), quick=True)
            yield case(pair(name, square(26), dtype), transposed(2), mode=ALL)
    for dtype in DTYPES:
        yield case(pair("mse_loss", square(26), dtype), transposed(2), mode="forward")
        yield case(pair("mse_loss", square(26), dtype), transposed(2), operand=0)
        # Batches of transposed matrices, then operands whose outermost dimension is the other's innermost.
        yield case(pair("mse_loss", (64, 1024, 1024), dtype), transposed(3))
        yield case(pair("mse_loss", (512, 256, 512), dtype), transposed(3, 0, 2))
        yield case(pair("mse_loss", (16, 64, 256, 256), dtype), channels_last(4))
        # Sizes that are not multiples of a tile.
        yield case(pair("mse_loss", (8191, 8191), dtype), transposed(2))
        yield case(pair("mse_loss", (8191, 8191), dtype), transposed(2), mode=ALL)
        yield case(pair("mse_loss", (1 << 20, 24), dtype), transposed(2))
        yield case(pair("mse_loss", (12, 1 << 22), dtype), transposed(2))
        yield case(pair("mse_loss", (64, 512, 33, 31), dtype), channels_last(4))
    yield case(pair("mse_loss", (300, 111849), BF16), transposed(2))
    # Runs of only a few neighbours, which are far apart in the other operand; then five dimensions.
    yield case(pair("mse_loss", (7, 11, 13, 33521), F32), transposed(4))
    yield case(pair("mse_loss", (4, 3, 129, 130, 131), F32), transposed(5, 0, 3))
    yield case(pair("mse_loss", square(26), F32, reduction="none"), transposed(2))
    yield case(pair("binary_cross_entropy_with_logits", square(26), BF16), transposed(2))
    yield Case(LAYOUTS, pair("mse_loss", (1024, 1024), F32), layouts={1: transposed(2)})


def _broadcast() -> Iterator[Case]:
    def case(
        name: str, target: tuple[int, ...], dtype: str, shape: tuple[int, ...] = (8192, 8192), **fields: Any
    ) -> Case:
        return Case(BROADCAST, loss_of(name, (shape, target), dtype), ALL, copy_bar=0.6, **fields)

    middle: tuple[int, ...] = (64, 1024, 1024)
    for name in ("binary_cross_entropy_with_logits", "smooth_l1_loss", "kl_div"):
        yield case(name, (64, 1, 1024), BF16, middle, quick=True)
        yield case(name, (64, 1, 1024), F32, middle)
    for target in ((8192,), (8192, 1), ()):
        for name in ("binary_cross_entropy_with_logits", "smooth_l1_loss"):
            yield case(name, target, BF16, quick=True)
        yield case("mse_loss", target, F32)
    yield case("hinge_loss", (8192,), BF16)
    yield case("binary_cross_entropy", (8192,), BF16)
    for target in ((64,), (1 << 20, 1)):
        yield case("mse_loss", target, F32, (1 << 20, 64))
    for target in ((1 << 20,), (64, 1)):
        yield case("mse_loss", target, F32, (64, 1 << 20))
    yield case("mse_loss", (64, 1, 1), BF16, middle)
    yield case("mse_loss", (1, 1024, 1), BF16, middle)
    yield case("mse_loss", (1, 64, 1, 1), F32, (16, 64, 256, 256))
    # Rows whose length is not a multiple of a vector, with and without the gradient of the other operand.
    odd: tuple[int, ...] = (5793, 5793)
    for dtype in DTYPES:
        for target in ((5793, 1), (1, 5793)):
            yield case("mse_loss", target, dtype, odd)
        for shape, target in ((odd, (5793, 1)), ((1000003, 33), (1, 33)), ((111849, 300), (111849, 1))):
            yield Case(BROADCAST, loss_of("mse_loss", (shape, target), dtype), copy_bar=0.6)
        yield case("mse_loss", (1000003, 1), dtype, (1000003, 33))
    yield case("mse_loss", (1, 33), BF16, (1000003, 33))
    yield case("mse_loss", (1, 1 << 20, 1), BF16, (5, 1 << 20, 7))
    yield case("binary_cross_entropy_with_logits", (5793, 1), BF16, odd)
    # Both operands broadcast, then only the gradient of a broadcast operand, then a small case.
    yield Case(BROADCAST, loss_of("mse_loss", ((8192, 1), (8192,)), F32), ALL)
    yield Case(BROADCAST, loss_of("mse_loss", ((8192,), (8192, 8192)), F32), copy_bar=0.6)
    yield Case(BROADCAST, loss_of("mse_loss", ((1024, 1024), (1024,)), F32), ALL)


def _unaligned() -> Iterator[Case]:
    def case(work: PointwiseWorkload, operands: Sequence[int] = (0,), offset: int = 1, **fields: Any) -> Case:
        layouts = {i: Layout(offset=offset) for i in operands}
        aligned = Case(UNALIGNED, work, fields.get("mode", "forward+backward"))
        return Case(UNALIGNED, work, layouts=layouts, beside=aligned, beside_bar=1 / 0.85, **fields)

    for name in ("binary_cross_entropy_with_logits", "binary_cross_entropy", "smooth_l1_loss"):
        yield case(pair(name, square(26), BF16), quick=True)
    for dtype in DTYPES:
        yield case(pair("mse_loss", square(26), dtype))
        yield case(pair("mse_loss", square(26), dtype), (1,))
        yield case(pair("mse_loss", square(26), dtype), (0, 1))
        yield case(pair("mse_loss", square(26), dtype), (0, 1), mode=ALL)
        yield case(pair("mse_loss", square(26), dtype), mode="forward")
    yield case(pair("mse_loss", square(26), BF16), offset=3)
    yield case(pair("mse_loss", square(26), F32, reduction="none"))


def _unreduced() -> Iterator[Case]:
    for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits"):
        for dtype in DTYPES:
            yield Case(UNREDUCED, pair(name, square(26), dtype, reduction="none"), copy_bar=0.7, quick=dtype == F32)
    yield Case(UNREDUCED, pair("mse_loss", square(26), F32, reduction="none"), ALL, copy_bar=0.7)
    yield Case(UNREDUCED, pair("mse_loss", square(26), F32, reduction="sum"))


def _arithmetic() -> Iterator[Case]:
    for name in HEAVY:
        yield Case(ARITHMETIC, pair(name, square(26), BF16), copy_bar=0.75)


def _strided() -> Iterator[Case]:
    for dtype in DTYPES:
        both = {i: Layout(step=2) for i in range(2)}
        padded = {i: Layout(padding=1) for i in range(2)}
        yield Case(STRIDED, pair("mse_loss", square(24), dtype), layouts={0: Layout(step=2)})
        yield Case(STRIDED, pair("mse_loss", square(24), dtype), layouts=both)
        yield Case(STRIDED, pair("mse_loss", (8192, 8192), dtype), layouts={0: Layout(padding=64)}, copy_bar=0.6)
        yield Case(STRIDED, pair("mse_loss", (8192, 8191), dtype), layouts=padded)
        yield Case(STRIDED, pair("mse_loss", (1 << 20, 50), dtype), layouts={0: Layout(padding=3)})
        yield Case(STRIDED, pair("mse_loss", square(26), dtype), layouts={i: transposed(2) for i in range(2)})


def _modified() -> Iterator[Case]:
    loss, huber, full = registry(Loss)["mse_loss"], registry(Loss)["huber_loss"], (8192, 8192)

    def case(work: PointwiseWorkload, **fields: Any) -> Case:
        return Case(MODIFIED, work, **fields)

    for dtype in DTYPES:
        yield case(
            PointwiseWorkload(
                modified(loss, mask=True), (full, full, full), dtype, "",
                eager=lambda p, t, m: ((p - t) ** 2 * m).sum() / m.sum(),
            ),
            copy_bar=0.6,
        )  # fmt: skip
        yield case(
            PointwiseWorkload(
                modified(huber, weight="array"), (full, full, full[:1]), dtype, "",
                eager=lambda p, t, w: (torch.nn.functional.huber_loss(p, t, reduction="none") * w).mean(),
            ),
            copy_bar=0.6,
        )  # fmt: skip
        for dim in (0, 1):
            eager = _mean_over(dim)
            yield case(PointwiseWorkload(loss, (full, full), dtype, "", eager=eager, dim=(dim,)), copy_bar=0.6)
        yield case(over_dimensions(pair("mse_loss", (4096, 3, 2731), dtype), (0, 2)), copy_bar=0.6)
    for dim in (0, 1):
        yield case(over_dimensions(pair("mse_loss", (1000003, 33), BF16), (dim,)), copy_bar=0.6)
    yield case(over_dimensions(pair("huber_loss", (16, 19, 331, 333), BF16), (0,)), copy_bar=0.6)


def _mean_over(dim: int) -> Any:
    return lambda p, t: ((p - t) ** 2).mean(dim)


def _sizes() -> Iterator[Case]:
    for exponent in (10, 14, 17, 20, 22, 24):
        for name in ("mse_loss", "binary_cross_entropy_with_logits"):
            yield Case(SIZES, pair(name, square(exponent), F32))
        yield Case(SIZES, pair("mse_loss", square(exponent), BF16))
    for dtype in (F16, F64):
        yield Case(SIZES, pair("smooth_l1_loss", square(24), dtype))
    yield Case(SIZES, pair("mse_loss", (1 << 10,), F32, reduction="none"))
    yield Case(SIZES, pair("mse_loss", (1 << 10,), F32), mode="forward")


def _second() -> Iterator[Case]:
    for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits", "poisson_nll_loss", "huber_loss"):
        for dtype in DTYPES:
            yield Case(SECOND, pair(name, square(26), dtype), HVP, copy_bar=0.4)
    for name in ("sigmoid_focal_loss", "asymmetric_loss"):
        yield Case(SECOND, pair(name, square(26), BF16), HVP, copy_bar=0.4)
    yield Case(SECOND, pair("mse_loss", square(26), F32), HVP, {1: transposed(2)}, copy_bar=0.4)
    yield Case(SECOND, pair("mse_loss", square(14), F32), HVP)
