"""Kernels of softmax losses of a linear layer, recorded from their calls (`cupylosses.engines.record`).

They are the kernels between matrix products, and row kernels that write gradients over logits.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

from cupylosses import checks, functional
from cupylosses.engines.linear_softmax.codegen import ChunkKernel
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from cupylosses.engines.linear_softmax.row_weights import RowWeightKernel
from cupylosses.engines.record import KernelRecorder, placeholder
from cupylosses.engines.softmax.codegen import SoftmaxKernel
from cupylosses.jit.gpu import Chip
from tools.gate_subsets import BROADEST, cover
from tools.variants import Compiled, Variants

#: Rows and features; numbers of classes for which a thread, a subwarp, a block or a cluster processes a row. The fast
#: subset has the first two.
ROWS, FEATURES, CLASSES = 4096, 64, (10, 1000, 8000, 128256)

#: A GPU with every feature that kernels can use.
_CHIP = Chip(227 << 10, clusters=True)


class LinearSoftmaxVariants(Variants):
    """Kernels of calls with a bias, in each dtype, kind of target, dtype of the logits and length of rows."""

    Definition: ClassVar = LinearSoftmaxLoss

    def kernels(self, fast: bool = False) -> list[Any]:
        recorder = KernelRecorder(_CHIP)
        dtypes = ("float32", "bfloat16") if fast else checks.FLOATING
        for dtype, classes, dense in product(dtypes, CLASSES[: 2 if fast else None], (False, True)):
            wide = [None, "float32"] if dtype in ("float16", "bfloat16") else [None]
            for logits, reduction in product(wide, ("mean", "none")):
                self._call(recorder, dtype, classes, dense, {"logits_dtype": logits, "reduction": reduction})
        found = list(recorder.kernels)
        for dtype in dtypes:
            found += self._added(dtype)
        return found

    def _added(self, dtype: str) -> Iterator[ChunkKernel | RowWeightKernel]:
        """Yields the kernels of weights of rows and of `main_grad`, whose arrays no recorded call has."""
        wide = "float64" if dtype == "float64" else "float32"
        for kind in ("add", "add_unaligned"):
            yield ChunkKernel(self.loss, kind, wide if kind == "add" else dtype, wide)
        yield RowWeightKernel(self.loss, "weigh", "float64", dtype, wide)
        yield RowWeightKernel(self.loss, "sum", wide, dtype, dtype)
        yield RowWeightKernel(self.loss, "divisor", "int64", dtype, of_classes=dtype)

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
        """Returns each kernel, layout and dtype for BROADEST; for others the kernels between products."""
        if architecture == BROADEST:
            return cover(self.kernels(), dtypes)
        return [x for x in self.kernels(fast=True) if not isinstance(x, SoftmaxKernel)]

    @classmethod
    def newest(
        cls, losses: Sequence[LinearSoftmaxLoss], whole: Collection[Any], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        """Yields each kernel between products, and each layout that writes over logits.

        Row kernels that do not write over logits are those of the logits' loss. Kernels that convert whole gradients
        are compiled for the other architectures in turn, too.
        """
        kernels = cls.fast(losses)
        own = [x for x in kernels if x.kind != "add_unaligned" and getattr(x, "in_place", True)]
        for variant in cover(own, structure):
            yield variant, broadest
        for variant in cover([x for x in kernels if x.kind in ("narrow", "rescale")], structure):
            yield variant, next(others)

    @classmethod
    def older(
        cls, losses: Sequence[LinearSoftmaxLoss], whole: Collection[Any], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        """Yields the kernels between products that convert arrays."""
        kernels = cls.fast(losses)
        for variant in cover([x for x in kernels if x.kind in ("narrow", "rescale", "add", "weigh")], structure):
            yield variant, broadest

    @staticmethod
    def wide_accesses(variant: ChunkKernel) -> tuple[int, int]:
        """Returns the wide loads and stores of the kernels that rescale or add whole gradients."""
        return {"rescale": (1, 1), "add": (2, 1)}.get(variant.kind, (0, 0))

    @staticmethod
    def described(variant: ChunkKernel | RowWeightKernel) -> Mapping[str, str]:
        return {"dtypes": "-".join(variant.storage), "layout": "", "access": "", "gradients": "", "flags": ""}


def structure(variant: ChunkKernel | RowWeightKernel | SoftmaxKernel) -> Iterator[Hashable]:
    """Traits: the kernel; of a row kernel also its layout, and the arrays that it overwrites."""
    if not isinstance(variant, SoftmaxKernel):
        yield type(variant), variant.kind
    else:
        yield variant.indices, variant.kind, variant.layout
        yield variant.indices, variant.in_place, variant.in_place != variant.input


def dtypes(variant: ChunkKernel | RowWeightKernel | SoftmaxKernel) -> Iterator[Hashable]:
    """Traits: those of ``structure``, and the dtypes."""
    yield from structure(variant)
    yield variant.kind, variant.storage, variant.result
