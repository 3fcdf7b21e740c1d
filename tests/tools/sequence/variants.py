"""Kernels of losses of sequences, recorded from their calls (`cupylosses.engines.record`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

from cupylosses import checks, functional
from cupylosses.engines.record import KernelRecorder, placeholder
from cupylosses.engines.sequence.codegen import PLAIN, ROLES, SOFTMAX, SequenceKernel
from cupylosses.engines.sequence.definition import SequenceLoss
from cupylosses.jit.gpu import Chip
from tools.covered_variants import CoveredVariants, Subsets
from tools.gate_subsets import BROADEST, cover

#: Numbers of frames, samples and labels, on which no kernel depends.
FRAMES, SAMPLES, LABELS = 1200, 8, 40
#: Few classes, many, and more than fit in shared memory next to their posteriors.
CLASSES = 64, 4000, 20000
#: Properties of kernels that their description lists.
LAYOUTS = ("stores", "many", "prepares", "keeps", "in_parts")


class SequenceVariants(CoveredVariants):
    """Kernels for each dtype, result and kind of gradient."""

    Definition: ClassVar = SequenceLoss

    def kernels(self, fast: bool = False) -> list[Any]:
        recorder = KernelRecorder(Chip(227 << 10, clusters=True))
        dtypes = ("float32", "bfloat16") if fast else checks.FLOATING
        results = (None, "float32") if fast else (None, *checks.FLOATING)
        kinds = [{}] if self.loss.logits else [{}, {"gradient": "logits"}]
        for dtype, result, kind, reduction, classes in product(dtypes, results, kinds, ("mean", "none"), CLASSES):
            self._call(recorder, dtype, classes, {**kind, "reduction": reduction, "out_dtype": result})
        # Kernels of the pointwise engine compute the divisors.
        found = [x for x in recorder.kernels if isinstance(x, SequenceKernel)]
        # Longer targets, larger inputs and many samples have other first and second kernels.
        sums = SOFTMAX if self.loss.logits else PLAIN
        first = [replace(x, prepares=False, added=sums) for x in found if x.kind == "first" and x.prepares]
        second = [replace(x, added=y) for x in found if x.kind == "second" for y in dict.fromkeys((PLAIN, sums))]
        return list(dict.fromkeys([*found, *first, *[replace(x, roles=n) for x in second for n in ROLES.values()]]))

    def _call(self, recorder: KernelRecorder, dtype: str, classes: int, options: Mapping[str, Any]) -> None:
        first, targets, *lengths = [x.name for x in self.loss.operands]
        arrays = {
            first: placeholder(dtype, (FRAMES, SAMPLES, classes)),
            targets: placeholder("int64", (SAMPLES, LABELS)),
        }
        arrays |= {x: placeholder("int64", (SAMPLES,)) for x in lengths}
        call = getattr(functional, self.loss.name).prepare(**arrays, **options)
        recorder.call(call, [call.loss.engine.floating(call)])

    @staticmethod
    def subsets() -> Subsets:
        return Subsets(dtypes, structure, kind, kind, ("second", "gradient"))

    def broad(self, architecture: str, whole: bool = True) -> list[Any]:
        """Returns each kernel, dtype and result for BROADEST; for others each kernel, not only those of training."""
        if architecture == BROADEST:
            return super().broad(architecture, whole)
        return cover(self.kernels(fast=True), structure)

    @staticmethod
    def wide_accesses(variant: SequenceKernel) -> tuple[int, int]:
        """Returns the wide loads and stores: a frame's logits are read, and its gradient is written, in vectors."""
        reads = variant.kind == "gradient" and variant.added != "kPlain"
        return int(reads), int(variant.kind == "gradient")

    @staticmethod
    def described(variant: SequenceKernel) -> Mapping[str, str]:
        return {
            "dtypes": f"{variant.dtype} {variant.result}",
            "layout": " ".join([variant.added, *[x for x in LAYOUTS if getattr(variant, x)]]),
            "access": "",
            "gradients": "",
            "flags": "",
        }


def kind(variant: SequenceKernel) -> Iterator[Hashable]:
    """Traits: the kernel."""
    yield variant.kind
    yield variant.kind, variant.roles, *[getattr(variant, x) for x in LAYOUTS]


def structure(variant: SequenceKernel) -> Iterator[Hashable]:
    """Traits: those of ``kind``, and the kind of gradient."""
    yield from kind(variant)
    yield variant.kind, variant.added, variant.many, variant.in_parts


def dtypes(variant: SequenceKernel) -> Iterator[Hashable]:
    """Traits: those of ``structure``, and the dtypes."""
    yield from structure(variant)
    yield variant.kind, variant.dtype, variant.result, variant.many, variant.in_parts
