"""Kernels of losses of row statistics, recorded from their calls (`cupylosses.engines.record`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

from cupylosses import checks, functional, interop
from cupylosses.call import Call
from cupylosses.engines.base import Wanted
from cupylosses.engines.record import KernelRecorder, placeholder
from cupylosses.engines.row_statistics.codegen import RowKernel, SumKernel
from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.engines.row_statistics.layout import REGISTER_ROWS
from cupylosses.jit.gpu import Chip
from tools.covered_variants import CoveredVariants, Subsets

#: Shapes of vectors: rows that a few lanes, a block or a cluster process, and rows whose parts have blocks; a last
#: operand that is broadcast; rows in registers; and rows without whole vectors.
ROWS = 4096
SHAPES: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = (
    ((ROWS, 256), (ROWS, 256)),
    ((ROWS, 4096), (ROWS, 4096)),
    ((64, 65536), (64, 65536)),
    ((64, 1 << 20), (64, 1 << 20)),
    ((ROWS, 256), (1, 256)),
    ((REGISTER_ROWS, 8), (REGISTER_ROWS, 8)),
    ((ROWS, 251), (ROWS, 251)),
    ((ROWS, 256), (ROWS, 1)),
)
_FEW = 6


class StatisticsVariants(CoveredVariants):
    """Kernels for each entry point, layout, dtype, weight and mask."""

    Definition: ClassVar = StatisticsLoss

    def kernels(self, fast: bool = False) -> list[Any]:
        recorder = KernelRecorder(Chip(227 << 10, clusters=True))
        dtypes = ("float32", "bfloat16") if fast else checks.FLOATING
        for dtype, (first, last) in product(dtypes, SHAPES[: _FEW if fast else None]):
            for reduction, options in product(("mean", "none"), self._options(first, dtype, fast)):
                self._call(recorder, dtype, first, last, {**options, "reduction": reduction})
        # Kernels of the pointwise engine compute the divisors.
        return [x for x in recorder.kernels if isinstance(x, RowKernel | SumKernel)]

    def _options(self, shape: Sequence[int], dtype: str, fast: bool) -> list[dict[str, Any]]:
        rows = tuple(shape[:-1])
        arrays = {"weight": placeholder(dtype, rows), "mask": placeholder("bool", rows)}
        flags = [{x.name: c} for x in self.loss.flags for c in x.choices if c != x.default]
        return [{}, arrays, *flags] if fast else [{}, arrays, *flags, {"weight": placeholder(dtype, (1,) * len(rows))}]

    def _call(
        self,
        recorder: KernelRecorder,
        dtype: str,
        first: tuple[int, ...],
        last: tuple[int, ...],
        options: Mapping[str, Any],
    ) -> None:
        vectors = len(self.loss.operands) - len(self.loss.row_operands)
        operands = {}
        for i, x in enumerate(self.loss.operands):
            shape = first[:-1] if i >= vectors else last if i == vectors - 1 else first
            operands[x.name] = placeholder("int64" if i >= vectors and x.integer else dtype, shape)
        call = getattr(functional, self.loss.name).prepare(**operands, **options)
        floating = call.loss.engine.floating(call)
        recorder.call(call, [floating, tuple([w and i == 0 for i, w in enumerate(floating)])])
        if options["reduction"] == "none":
            self._second(recorder, call, floating)

    def _second(self, recorder: KernelRecorder, call: Call, floating: Wanted) -> None:
        """Records the kernels of second derivatives by the first operand, and by all."""
        first = tuple([w and i == 0 for i, w in enumerate(floating)])
        call = call._replace(static=call.static._replace(out_dtype="float64"))
        for moving in (first, floating):
            tangents = tuple([x for x, w in zip(call.arrays, moving, strict=True) if w])
            along = call.loss.engine.jvp(call, moving, tangents)
            recorder.call(along, [(*moving, *(False,) * len(tangents))], call.loss.engine.promoted(call))

    @staticmethod
    def subsets() -> Subsets:
        return Subsets(dtypes, structure, formula, layout, ("value_and_gradient",))

    @staticmethod
    def wide_accesses(variant: RowKernel | SumKernel) -> tuple[int, int]:
        """Returns the wide loads and stores of whole vectors: one load per operand, and one store per gradient."""
        if isinstance(variant, SumKernel) or not variant.all_wide:
            return 0, 0
        features = [x.name not in variant.loss.row_operands for x in variant.loss.operands]
        sizes = [variant.vec_size * interop.ITEMSIZE[d] >= 16 for d in variant.dtypes]
        writes = variant.kind in ("value_and_gradient", "verify_gradient", "gradient")
        loads = sum(f and s for f, s in zip(features, sizes, strict=False))
        stores = sum(f and s and w for f, s, w in zip(features, sizes, variant.gradients, strict=False))
        return loads, stores * writes

    @staticmethod
    def described(variant: RowKernel | SumKernel) -> Mapping[str, str]:
        names = [x.name for x, on in zip(variant.loss.operands, variant.gradients, strict=False) if on]
        words = [x for x in ("wide", "held", "many", "columns") if getattr(variant, x, False)]
        return {
            "dtypes": " ".join(variant.storage),
            "layout": " ".join([getattr(variant, "layout", "sum"), *words]),
            "access": "",
            "gradients": " ".join(names),
            "flags": " ".join([x.name for x, on in zip(variant.loss.flags, variant.flags, strict=True) if on]),
        }


def layout(variant: RowKernel | SumKernel) -> Iterator[Hashable]:
    """Traits: the kernel and its layout."""
    if isinstance(variant, SumKernel):
        yield variant.kind, bool(variant.has_tangent)
        yield variant.columns
    else:
        yield variant.kind, bool(variant.has_tangent)
        yield variant.layout, variant.held, variant.all_wide, variant.in_registers > 0


def structure(variant: RowKernel | SumKernel) -> Iterator[Hashable]:
    """Traits: those of ``layout``, the formula, and the other properties of a call."""
    yield from layout(variant)
    yield from formula(variant)
    yield variant.kind, getattr(variant, "layout", "")
    yield variant.weight, variant.mask, variant.counted


def formula(variant: RowKernel | SumKernel) -> Iterator[Hashable]:
    """Traits: the formula."""
    yield variant.loss, variant.flags


def dtypes(variant: RowKernel | SumKernel) -> Iterator[Hashable]:
    """Traits: those of ``structure``, and the dtypes."""
    yield from structure(variant)
    yield variant.kind, variant.storage, variant.result
