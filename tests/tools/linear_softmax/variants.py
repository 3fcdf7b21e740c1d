"""The kernels of softmax losses of a linear layer, found by rehearsing their calls (`cupylosses.engines.record`): those
between matrix products, and row kernels that write gradients over logits.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

from cupylosses import checks, functional
from cupylosses.engines.linear_softmax.codegen import ChunkKernel
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from cupylosses.engines.record import KernelRecorder, placeholder
from cupylosses.engines.softmax.codegen import SoftmaxKernel
from cupylosses.jit.gpu import Chip
from tools.gate_subsets import BROADEST, cover
from tools.variants import Compiled, Variants

#: Rows and features; classes of rows that a thread, a subwarp, a block and a cluster take; the first two are fast.
ROWS, FEATURES, CLASSES = 4096, 64, (10, 1000, 8000, 128256)

#: A GPU with everything that kernels can use.
_CHIP = Chip(227 << 10, clusters=True)


class LinearSoftmaxVariants(Variants):
    """Each kernel of a call with a bias, in each dtype, kind of target, dtype of the logits and length of rows."""

    Definition: ClassVar = LinearSoftmaxLoss

    def kernels(self, fast: bool = False) -> list[Any]:
        recorder = KernelRecorder(_CHIP)
        dtypes = ("float32", "bfloat16") if fast else checks.FLOATING
        for dtype, classes, dense in product(dtypes, CLASSES[: 2 if fast else None], (False, True)):
            wide = [None, "float32"] if dtype in ("float16", "bfloat16") else [None]
            for logits, reduction in product(wide, ("mean", "none")):
                self._call(recorder, dtype, classes, dense, {"logits_dtype": logits, "reduction": reduction})
        return list(recorder.kernels)

    def _call(
        self, recorder: KernelRecorder, dtype: str, classes: int, dense: bool, options: Mapping[str, Any]
    ) -> None:
        target = placeholder(dtype, (ROWS, classes)) if dense else placeholder("int64", (ROWS,))
        call = getattr(functional, self.loss.name).prepare(
            placeholder(dtype, (ROWS, FEATURES)),
            placeholder(dtype, (classes, FEATURES)),
            target,
            linear_bias=placeholder(dtype, (classes,)),
            accumulate_dtype="float64" if dtype == "float64" else "float32",
            max_memory=ROWS // 4 * classes * 4,
            **options,
        )
        recorder.call(call, [call.loss.engine.floating(call)])

    def broad(self, architecture: str, whole: bool = True) -> list[Any]:
        """Each kernel, layout and dtype for BROADEST; for others the kernels between products."""
        if architecture == BROADEST:
            return cover(self.kernels(), dtypes)
        return [x for x in self.kernels(fast=True) if isinstance(x, ChunkKernel)]

    @classmethod
    def newest(
        cls, losses: Sequence[LinearSoftmaxLoss], whole: Collection[Any], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        """Each kernel and layout; those that convert whole gradients also for the others in turn."""
        kernels = [v for x in losses for v in cls(x).kernels(fast=True)]
        for variant in cover(kernels, structure):
            yield variant, broadest
        for variant in cover([x for x in kernels if x.kind in ("narrow", "rescale")], structure):
            yield variant, next(others)

    @classmethod
    def older(
        cls, losses: Sequence[LinearSoftmaxLoss], whole: Collection[Any], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        """Each kernel between products."""
        kernels = [v for x in losses for v in cls(x).kernels(fast=True)]
        for variant in cover([x for x in kernels if isinstance(x, ChunkKernel)], structure):
            yield variant, broadest

    @staticmethod
    def wide_accesses(variant: ChunkKernel) -> tuple[int, int]:
        """Those of the kernel that rescales whole gradients."""
        return (1, 1) if variant.kind == "rescale" else (0, 0)

    @staticmethod
    def described(variant: ChunkKernel) -> Mapping[str, str]:
        return {"dtypes": variant.dtype, "layout": "", "access": "", "gradients": "", "flags": ""}


def structure(variant: ChunkKernel | SoftmaxKernel) -> Iterator[Hashable]:
    """The kernel, and the layout of a row kernel with what it writes over what."""
    if isinstance(variant, ChunkKernel):
        yield variant.kind
    else:
        yield variant.indices, variant.kind, variant.layout
        yield variant.indices, variant.in_place, variant.in_place != variant.input


def dtypes(variant: ChunkKernel | SoftmaxKernel) -> Iterator[Hashable]:
    """Besides, the dtypes."""
    yield from structure(variant)
    yield variant.kind, variant.storage, variant.result
