"""Off-headline cases of losses of rows of logits, with their bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarking.cases import Case, Layout, channels_last, from_elements, transposed
from benchmarking.figures import DTYPES, HVP, PLAIN_LOGITS, ROW_OPTIONS
from benchmarking.softmax import SoftmaxWorkload, rows
from cupylosses.definition.registry import registry
from cupylosses.engines.softmax.definition import SoftmaxLoss

F32, BF16, F16, F64 = "float32", "bfloat16", "float16", "float64"

#: Number of elements from which a bar relative to a copy applies to logits whose classes are not adjacent in memory.
LARGE = 1 << 24

#: Number of elements of cases with few classes.
ELEMENTS = 1 << 26

#: Least fraction of a copy's speed by dtype, with few classes and with images.
FEW_CLASSES = {F32: 0.6, BF16: 0.45}
PIXELS = {F32: 0.7, BF16: 0.55}

APART, UNREDUCED, FEW, DENSE, NLL = "classes apart", "unreduced rows", "few classes", "dense targets", "nll_loss"
IMAGES, UNALIGNED, OPTIONS, FORWARD, SIZES = "images", "unaligned rows", "options", "forward", "sizes of rows"
SECOND = "second derivatives of rows"


def logits(
    shape: Sequence[int],
    dtype: str,
    case: Mapping[str, Any] | None = None,
    loss: str = "cross_entropy",
    reduction: str = "mean",
    **fields: Any,
) -> SoftmaxWorkload:
    """A workload of a loss with logits of this shape."""
    return replace(rows(registry(SoftmaxLoss)[loss], shape, dtype, "", case, **fields), reduction=reduction)


def cases() -> Iterator[Case]:
    """All cases."""
    yield from _classes_apart()
    yield from _few_classes()
    yield from _unreduced()
    yield from _dense()
    yield from _nll()
    yield from _images()
    yield from _unaligned()
    yield from _options()
    yield from _forward()
    yield from _sizes()
    yield from _second()


def _classes_apart() -> Iterator[Case]:
    across = transposed(2)

    def case(work: SoftmaxWorkload, layout: Layout, **fields: Any) -> Case:
        bar = from_elements(LARGE, work.shape, 0.5)
        layouts = {0: layout, 1: layout} if fields.pop("both", False) else {0: layout}
        return Case(APART, work, layouts=layouts, copy_bar=bar, **fields)

    for shape in ((16, 262144), (256, 32000)):
        yield case(logits(shape, F32), across, quick=True)
        yield case(logits(shape, BF16), across)
    yield case(logits((1, 128256), BF16), Layout(step=7))
    for shape in ((1024, 32000), (4096, 4096), (65536, 1000), (1 << 20, 64)):
        for dtype in DTYPES:
            yield case(logits(shape, dtype), across)
    for dtype in DTYPES:
        yield case(logits((128, 262144), dtype), across)
    yield case(logits((2048, 50000), BF16), across)
    yield case(logits((301, 30011), F32), across)
    yield case(logits((64, 32000), F32), Layout(step=2), quick=True)
    for dtype in DTYPES:
        yield case(logits((2048, 32000), dtype), Layout(step=2))
    yield case(logits((2048, 32000), F32), Layout(step=3, offset=1))
    # Classes start within lines of 128 bytes, and in 16 bits or with 999 rows within sectors.
    for dtype in DTYPES:
        yield case(logits((1000, 32001), dtype), across)
        yield case(logits((999, 32000), dtype), across)
    yield case(logits((1024, 32000), BF16), across, mode="forward")
    yield case(logits((1024, 32000), F32, reduction="none"), across)
    yield case(logits((1024, 32000), F32, {"label_smoothing": 0.1}), across)
    yield case(logits((1024, 32000), F32, kind="probabilities"), across)
    yield case(logits((1024, 32000), F32, loss="distillation_loss"), across, both=True)
    yield case(logits((4096, 4096), F32, loss="nll_loss"), across)
    yield case(logits((2048, 32000), F32, {"ignore_index": -100}), across)


def few(classes: int) -> tuple[int, int]:
    """The shape of logits with this number of classes and at most `ELEMENTS` elements."""
    return ELEMENTS // classes, classes


def _few_classes() -> Iterator[Case]:
    def case(work: SoftmaxWorkload, quick: bool = False, **fields: Any) -> Case:
        return Case(FEW, work, copy_bar=FEW_CLASSES[work.dtype], quick=quick, **fields)

    for classes in (2, 3, 5, 8, 10, 19, 33, 64, 100, 128):
        for dtype in DTYPES:
            yield case(logits(few(classes), dtype), dtype == BF16 and classes in (2, 5, 10, 33, 100))
    for classes in (2, 10, 100):
        for dtype in DTYPES:
            yield case(logits(few(classes), dtype, kind="probabilities"), classes == 10)
            yield case(logits(few(classes), dtype, {"label_smoothing": 0.1}), classes == 10 and dtype == BF16)
    yield case(logits(few(10), F32, {"weight": True}))
    yield case(logits(few(10), F32, {"gamma": 2.0}, "softmax_focal_loss"))
    yield case(logits(few(10), BF16), mode="forward")
    yield Case(FEW, logits((1 << 20, 10), F16))
    yield Case(FEW, logits((1 << 20, 10), F64))


def _unreduced() -> Iterator[Case]:
    for shape in (few(10), few(1000)):
        for dtype in DTYPES:
            yield Case(UNREDUCED, logits(shape, dtype, reduction="none"), copy_bar=0.7, quick=dtype == F32)
    yield Case(UNREDUCED, logits((8192, 32000), BF16, reduction="none"), copy_bar=0.7)
    yield Case(UNREDUCED, logits((2048, 128256), BF16, {"ignore_index": 255}, reduction="none"), copy_bar=0.7)
    yield Case(UNREDUCED, logits((65536, 1024), F32, reduction="sum"))
    yield Case(UNREDUCED, logits((32768, 4500), F32, reduction="none"), copy_bar=0.7)
    # Sequences with the classes in the second dimension, as some trainers arrange them.
    yield Case(UNREDUCED, logits((8, 32000, 256), BF16, reduction="none"), copy_bar=0.55)


def _dense() -> Iterator[Case]:
    for shape in ((8192, 32000), (65536, 1024)):
        for dtype in DTYPES:
            yield Case(DENSE, logits(shape, dtype, kind="probabilities"), copy_bar=0.75)
    for loss in ("kl_div_with_logits", "distillation_loss"):
        yield Case(DENSE, logits((8192, 32000), BF16, loss=loss), copy_bar=0.75)
    for shape, beta in (((8192, 32000), 0.5), ((8192, 32000), 1.0), ((2048, 128256), 0.5)):
        yield Case(DENSE, logits(shape, BF16, {"beta": beta}, "distillation_loss"), copy_bar=0.75)
    yield Case(DENSE, logits((8192, 32000), BF16, {"log_target": True}, "kl_div_with_logits"), copy_bar=0.75)
    for loss in ("kl_div_with_logits", "distillation_loss"):
        yield Case(DENSE, logits((8192, 18000), BF16, loss=loss), copy_bar=0.75)
    # The fixed cost of a row counts.
    yield Case(DENSE, logits(few(128), BF16, loss="kl_div_with_logits"), copy_bar=0.75)
    yield Case(DENSE, logits(few(200), BF16, kind="probabilities"), copy_bar=0.75)
    yield Case(DENSE, logits(few(128), BF16, loss="distillation_loss"), copy_bar=0.75)
    yield Case(DENSE, logits(few(256), F32, loss="distillation_loss"), copy_bar=0.75)
    # Vocabularies of which few rows fit on chip. Rows of 50257 classes begin between vectors.
    for shape in ((4096, 50257), (2048, 128256)):
        for loss in ("kl_div_with_logits", "distillation_loss"):
            yield Case(DENSE, logits(shape, BF16, loss=loss), copy_bar=0.75)
    yield Case(DENSE, logits((1024, 256000), BF16, kind="probabilities"), copy_bar=0.75)
    yield Case(DENSE, logits((1024, 128256), F32, kind="probabilities"), copy_bar=0.75)


def _nll() -> Iterator[Case]:
    for shape in (few(10), (2097, 32000)):
        for dtype in DTYPES:
            yield Case(NLL, logits(shape, dtype, loss="nll_loss"), copy_bar=0.7, quick=dtype == F32)
    yield Case(NLL, logits((8, 19, 512, 512), F32, loss="nll_loss"), copy_bar=0.7)
    yield Case(NLL, logits((8, 19, 512, 512), F32, loss="nll_loss"), copy_bar=0.7, layouts={0: channels_last(4)})
    yield Case(NLL, logits(few(1000), F32, loss="nll_loss", reduction="none"), copy_bar=0.7)


def _images() -> Iterator[Case]:
    def case(shape: Sequence[int], dtype: str, last: bool = False, quick: bool = False, **fields: Any) -> Case:
        work = logits(shape, dtype, **fields)
        layouts = {i: channels_last(len(shape)) for i in range(1 + (work.shapes[1] == work.shape))} if last else {}
        return Case(IMAGES, work, layouts=layouts, copy_bar=PIXELS[dtype], quick=quick)

    for dtype in DTYPES:
        yield case((1, 1000, 128, 128), dtype, quick=True)
        yield case((8, 2, 1024, 1024), dtype, quick=dtype == BF16)
        yield case((8, 19, 512, 512), dtype, last=True, quick=dtype == BF16)
        yield case((8, 2, 1024, 1024), dtype, last=True, quick=dtype == BF16)
        yield case((8, 19, 512, 512), dtype)
        yield case((4, 150, 256, 256), dtype)
        yield case((4, 150, 256, 256), dtype, last=True)
        yield case((1, 1000, 128, 128), dtype, last=True)
        yield case((2, 4, 128, 128, 128), dtype)
        yield case((2, 4, 128, 128, 128), dtype, last=True)
        # The number of pixels is not a multiple of a vector.
        yield case((8, 21, 513, 513), dtype)
        yield case((4, 150, 257, 257), dtype)
        yield case((4, 3, 1667, 1665), dtype)
    for classes, pixels in ((64, (355, 353)), (33, (513, 513))):
        yield case((4, classes, *pixels), BF16)
    yield case((8, 12, 513, 513), BF16)
    yield Case(IMAGES, logits((8, 21, 512, 512), BF16), layouts={0: Layout(offset=1)}, copy_bar=PIXELS[BF16])
    yield case((8, 2, 1024, 1024), BF16, case={"ignore_index": 255})
    yield case((8, 19, 512, 512), BF16, reduction="none")
    yield case((8, 19, 512, 512), BF16, case={"ignore_index": 255, "weight": True})
    yield case((2, 150, 512, 512), F32, case={"ignore_index": 255})
    yield case((8, 19, 512, 512), BF16, kind="probabilities")
    for dtype in DTYPES:
        yield case((4, 150, 256, 256), dtype, kind="probabilities")
    yield case((8, 19, 512, 512), F32, last=True, kind="probabilities")
    yield case((4, 150, 256, 256), BF16, loss="kl_div_with_logits")
    yield case((8, 19, 512, 512), BF16, loss="distillation_loss", reduction="none")
    # The number of pixels is not a multiple of a vector.
    yield case((4, 60, 121, 121), F32, loss="distillation_loss")


def _unaligned() -> Iterator[Case]:
    def case(shape: Sequence[int], dtype: str, layout: Layout, quick: bool = False) -> Case:
        work = logits(shape, dtype)
        return Case(
            UNALIGNED, work, layouts={0: layout}, beside=Case(UNALIGNED, work), beside_bar=1 / 0.85, quick=quick
        )

    for shape, dtype in (((4096, 1000), BF16), ((64, 262144), BF16)):
        yield case(shape, dtype, Layout(offset=1), quick=True)
    yield case((4096, 1000), F32, Layout(offset=1))
    yield case((65536, 1000), BF16, Layout(offset=3))
    yield case((8192, 32000), BF16, Layout(offset=1))
    yield case((2048, 32000), F32, Layout(offset=1))
    yield case((8192, 32000), BF16, Layout(padding=1))
    yield case((65536, 1000), BF16, Layout(padding=1))
    yield case((2048, 32000), F32, Layout(padding=1))
    yield case((65536, 1000), F32, Layout(padding=1))
    # A slice of a vocabulary that was rounded up, and then rows that a warp processes.
    yield case((4096, 50257), BF16, Layout(padding=47))
    for padding in (1, 4):
        yield case((16384, 4096), BF16, Layout(padding=padding))
    for mode, reduction in (("forward", "mean"), ("forward+backward", "none")):
        plain = Case(UNALIGNED, logits((8192, 32000), BF16, reduction=reduction), mode)
        yield replace(plain, layouts={0: Layout(padding=1)}, beside=plain, beside_bar=1 / 0.85)
    yield case(few(10), BF16, Layout(offset=1))
    yield case((8, 19, 512, 512), BF16, Layout(offset=1))
    # A few classes out of wider rows, and then every second class.
    for shape, layout in (
        (few(10), Layout(padding=3)), ((335544, 100), Layout(padding=3)), ((657930, 50), Layout(padding=1)),
        ((300000, 100), Layout(padding=28, offset=1)),
    ):  # fmt: skip
        yield case(shape, BF16, layout)
    yield case(few(10), F32, Layout(padding=3))
    for dtype in DTYPES:
        yield Case(APART, logits((2000000, 15), dtype), layouts={0: Layout(step=2)})
    yield Case(APART, logits((300000, 100), BF16), layouts={0: Layout(step=2)})
    # Rows that begin and end within a vector.
    for classes, whole in ((171, 168), (201, 200), (365, 368), (511, 512)):
        plain = logits((ELEMENTS // whole, whole), BF16)
        work = logits((ELEMENTS // classes, classes), BF16)
        yield Case(UNALIGNED, work, beside=Case(UNALIGNED, plain), beside_bar=1 / 0.85)
    plain = logits((4096, 50264), BF16)
    yield Case(UNALIGNED, logits((4096, 50257), BF16), beside=Case(UNALIGNED, plain), beside_bar=1 / 0.85)


def _options() -> Iterator[Case]:
    for shape, dtype in (PLAIN_LOGITS, ((65536, 1024), F32), (few(100), BF16)):
        plain = Case(OPTIONS, logits(shape, dtype))
        for options in ROW_OPTIONS:
            # The last one has all options.
            limit = 1.15 if options != ROW_OPTIONS[-1] else 1.5
            yield Case(OPTIONS, logits(shape, dtype, options), beside=plain, beside_bar=limit)
    plain = Case(OPTIONS, logits((4096, 44000), F32))
    yield Case(OPTIONS, logits((4096, 44000), F32, {"label_smoothing": 0.1}), beside=plain, beside_bar=1.15)


def _forward() -> Iterator[Case]:
    for shape, dtype in (
        ((8192, 32000), BF16), ((8192, 128256), BF16), ((8192, 32000), F32), ((32768, 4096), F32),
        ((65536, 1024), F32), ((65536, 1024), BF16), ((1024, 256000), F32), ((32768, 5500), F32), ((8192, 20480), BF16),
    ):  # fmt: skip
        yield Case(FORWARD, logits(shape, dtype), mode="forward", copy_bar=0.92 if shape[1] >= 32000 else 0.85)


def _sizes() -> Iterator[Case]:
    for shape in ((102, 10), (1, 1024), (16, 64), (128, 1000), (1, 128256), (8, 32000), (1024, 1024), (32, 262144)):
        for dtype in DTYPES:
            yield Case(SIZES, logits(shape, dtype))


def _second() -> Iterator[Case]:
    for shape, dtype in (((8192, 32000), BF16), ((65536, 1024), F32), (few(10), F32)):
        yield Case(SECOND, logits(shape, dtype), mode=HVP, copy_bar=0.4)
    yield Case(SECOND, logits((2048, 32000), F32, kind="probabilities"), mode=HVP, copy_bar=0.4)
    yield Case(SECOND, logits((8, 19, 512, 512), F32), mode=HVP, copy_bar=0.4)
    yield Case(SECOND, logits((2048, 32000), F32, {"label_smoothing": 0.1}), mode=HVP, copy_bar=0.4)
    for shape in ((65536, 1024), (8, 19, 512, 512), (4, 150, 256, 256)):
        yield Case(SECOND, logits(shape, BF16), mode=HVP, copy_bar=0.4)
        yield Case(SECOND, logits(shape, BF16, kind="probabilities"), mode=HVP, copy_bar=0.4)
    yield Case(SECOND, logits((4, 150, 256, 256), F32, kind="probabilities"), mode=HVP, copy_bar=0.4)
    yield Case(SECOND, logits((8, 19, 512, 512), F32), mode=HVP, layouts={0: channels_last(4)}, copy_bar=0.4)
    for loss in ("kl_div_with_logits", "distillation_loss"):
        yield Case(SECOND, logits((2048, 32000), BF16, loss=loss), mode=HVP, copy_bar=0.4)
    # Rows that warps stage, rows that a warp reads again, and rows that the largest blocks read again.
    for dtype in DTYPES:
        yield Case(SECOND, logits((1000000, 63), dtype), mode=HVP, copy_bar=0.4)
    yield Case(SECOND, logits((32768, 2048), BF16, loss="kl_div_with_logits"), mode=HVP, copy_bar=0.4)
    yield Case(SECOND, logits((8192, 32000), F32), mode=HVP, copy_bar=0.4)
    yield Case(SECOND, logits((1024, 32000), F32, loss="distillation_loss"), mode=HVP, copy_bar=0.4)
    yield Case(SECOND, logits((128, 1000), F32), mode=HVP)
