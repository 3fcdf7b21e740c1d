"""Kernels of losses of boxes, recorded from their calls (`cupylosses.engines.record`)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any, ClassVar

from cupylosses import checks, functional, interop
from cupylosses.call import Call
from cupylosses.engines.boxes.codegen import SUMS, BoxKernel
from cupylosses.engines.boxes.definition import COMPONENTS, BoxLoss
from cupylosses.engines.record import KernelRecorder, placeholder
from cupylosses.jit.gpu import Chip
from tools.gate_subsets import BROADEST, cover
from tools.variants import Compiled, Variants

#: Shapes of the boxes of both operands: contiguous, and with an operand broadcast to rows, to columns, or to all.
SHAPES: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = (
    ((4096,), (4096,)),
    ((64, 64), (1, 64)),
    ((4096,), (1,)),
    ((64, 64), (64, 1)),
    ((16, 1, 16), (1, 16, 1)),
)
_FEW = 2


class BoxVariants(Variants):
    """Kernels for each entry point, layout, dtype, format, weight and mask.

    On GPUs of compute capability 12.0, the kernel of both gradients of distance_box_iou_loss spills 16 bytes.
    """

    Definition: ClassVar = BoxLoss
    spills = 16

    def kernels(self, fast: bool = False) -> list[Any]:
        recorder = KernelRecorder(Chip(227 << 10, clusters=True))
        dtypes = ("float32", "bfloat16") if fast else checks.FLOATING
        for dtype, (first, last) in product(dtypes, SHAPES[: _FEW if fast else None]):
            for reduction, options in product(("mean", "none"), self._options(first, dtype, fast)):
                self._call(recorder, dtype, (first, last), {**options, "reduction": reduction})
        # Kernels of the pointwise engine compute the divisors.
        return [x for x in recorder.kernels if isinstance(x, BoxKernel)]

    def _options(self, shape: Sequence[int], dtype: str, fast: bool) -> list[dict[str, Any]]:
        arrays = {"weight": placeholder(dtype, tuple(shape)), "mask": placeholder("bool", tuple(shape))}
        flags = [{x.name: c} for x in self.loss.flags for c in x.choices if c != x.default]
        one = {"weight": placeholder(dtype, (1,) * len(shape))}
        return [{}, arrays, *flags] if fast else [{}, arrays, *flags, one]

    def _call(
        self,
        recorder: KernelRecorder,
        dtype: str,
        shapes: tuple[tuple[int, ...], ...],
        options: Mapping[str, Any],
    ) -> None:
        boxes = {
            x.name: placeholder(dtype, (*shape, COMPONENTS))
            for x, shape in zip(self.loss.operands, shapes, strict=True)
        }
        call = getattr(functional, self.loss.name).prepare(**boxes, **options)
        floating = call.loss.engine.floating(call)
        recorder.call(call, [floating, tuple([w and i == 0 for i, w in enumerate(floating)])])
        if call.static.reduction == "none":
            self._second(recorder, call)

    def _second(self, recorder: KernelRecorder, call: Call) -> None:
        """Records the derivative along tangents of both boxes, and along a tangent of the first box only."""
        engine, boxes = call.loss.engine, len(self.loss.operands)
        call = call._replace(static=call.static._replace(out_dtype="float64"))
        for tangents in (boxes, 1):
            moving = tuple([i < tangents for i in range(len(call.arrays))])
            moved = engine.jvp(call, moving, tuple([x for x, m in zip(call.arrays, moving, strict=True) if m]))
            recorder.call(moved, [tuple([i < tangents for i in range(len(moved.arrays))])])

    def broad(self, architecture: str, whole: bool = True) -> list[Any]:
        """Returns each kernel, layout and dtype for BROADEST; forward with gradients for others."""
        if architecture == BROADEST:
            return cover(self.kernels(), dtypes)
        forward = [x for x in self.kernels(fast=True) if x.kind == "value_and_gradient"]
        return cover(forward, lambda x: chain(structure(x), [x.flags]))

    @classmethod
    def newest(
        cls, losses: Sequence[BoxLoss], whole: Collection[Any], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        """Yields each kernel and layout of one loss, and forward with gradients of each loss.

        The one loss is that whose kernels compile fastest. Forward with gradients covers each choice of the flags, on
        the architectures in turn.
        """
        for variant in cover(cls.fast(losses[:1]), structure):
            yield variant, broadest
        forward = [x for x in cls.fast(losses) if x.kind == "value_and_gradient"]
        for i, variant in enumerate(cover(forward, formula)):
            yield variant, broadest if i % 2 else next(others)

    @classmethod
    def older(
        cls, losses: Sequence[BoxLoss], whole: Collection[Any], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        """Yields each kernel and each layout."""
        yield from ((x, broadest) for x in cover(cls.fast(losses[:1]), entry_point))

    @staticmethod
    def wide_accesses(variant: BoxKernel) -> tuple[int, int]:
        """Returns the wide loads and stores.

        A float32 box is a word of 16 bytes, with one load per operand and one store per gradient.
        """
        if variant.kind in SUMS:
            return 0, 0
        wide = [
            element.startswith("Components") and variant.vec_size * COMPONENTS * interop.ITEMSIZE[x] >= 16
            for element, x in zip(variant.elements, variant.storage, strict=True)
        ]
        loads = sum(w and a == "stream" for w, a in zip(wide, variant.access, strict=False))
        writes = variant.kind in ("value_and_gradient", "elements_gradient")
        return loads, writes * sum(w and g for w, g in zip(wide, variant.gradients, strict=False))

    @staticmethod
    def described(variant: BoxKernel) -> Mapping[str, str]:
        names = [x for x, on in zip(variant.names, variant.gradients, strict=True) if on]
        words = [x for x in ("columns", "outer", "shared") if getattr(variant, x)]
        return {
            "dtypes": " ".join(variant.storage),
            "layout": " ".join([variant.layout, *words]),
            "access": " ".join(variant.access),
            "gradients": " ".join(names),
            "flags": " ".join(str(x.choices[i]) for x, i in zip(variant.loss.flags, variant.flags, strict=True)),
        }


def entry_point(variant: BoxKernel) -> Iterator[Hashable]:
    """Traits: the kernel, and its layout."""
    yield variant.kind
    yield variant.layout, variant.columns


def structure(variant: BoxKernel) -> Iterator[Hashable]:
    """Traits: kernel and layout together, and the other properties of a call."""
    yield variant.kind, variant.layout
    yield variant.kind in SUMS, variant.columns
    yield variant.weight, variant.mask, variant.counted
    yield variant.kind, sum(variant.has_tangent)


def formula(variant: BoxKernel) -> Iterator[Hashable]:
    """Traits: the loss, and each choice of its flags."""
    yield variant.loss
    yield from ((i, x) for i, x in enumerate(variant.flags))


def dtypes(variant: BoxKernel) -> Iterator[Hashable]:
    """Traits: those of ``structure``, each formula, and the dtypes."""
    yield from structure(variant)
    yield variant.loss, variant.flags
    yield variant.kind, variant.storage, variant.result
