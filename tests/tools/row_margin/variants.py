"""Kernels of losses of rows of scores, recorded from their calls (`cupylosses.engines.record`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

from cupylosses import checks, functional
from cupylosses.call import Call
from cupylosses.engines.record import KernelRecorder, Placeholder, placeholder
from cupylosses.engines.row_margin.codegen import MarginKernel
from cupylosses.engines.row_margin.definition import MarginLoss
from cupylosses.interop import ITEMSIZE
from cupylosses.jit.gpu import Chip
from tools.covered_variants import CoveredVariants, Subsets

#: Shape of the scores, places for labels in lists, and the class dimension: rows that a warp, a block or a lane
#: processes; classes that are stored apart; several dimensions; and long lists.
SHAPES: Sequence[tuple[tuple[int, ...], int, int]] = (
    ((4096, 1000), 5, 1),
    ((4096, 8192), 8192, 1),
    ((4096, 8), 4, 1),
    ((4096, 128), 128, 1),
    ((16, 64, 1024), 5, 1),
    ((16, 64, 64), 5, -1),
    ((4096, 250), 250, 1),
)
_FEW = 5
#: Strides of the scores of 4096 rows of 1000 classes: a gap after each row, and after each class.
STRIDES: Sequence[tuple[int, int]] = ((1001, 1), (2000, 2))


class MarginVariants(CoveredVariants):
    """Kernels for each entry point, layout, dtype, class weights and mask."""

    Definition: ClassVar = MarginLoss

    def kernels(self, fast: bool = False) -> list[Any]:
        recorder = KernelRecorder(Chip(227 << 10, clusters=True))
        dtypes = ("float32", "bfloat16") if fast else checks.FLOATING
        for dtype, (shape, places, dim) in product(dtypes, SHAPES[: _FEW if fast else None]):
            for reduction, options in product(("mean", "none"), self._options(shape, dtype, dim)):
                self._call(recorder, dtype, shape, places, {**options, "reduction": reduction, "class_dim": dim})
        for dtype, strides in product(() if fast else dtypes, STRIDES):
            for options in ({"reduction": "mean"}, {"reduction": "none"}):
                self._call(recorder, dtype, (4096, 1000), 5, {**options, "class_dim": 1}, strides)
        # Kernels of the pointwise engine count the masks of lists.
        return [x for x in recorder.kernels if isinstance(x, MarginKernel)]

    def _options(self, shape: Sequence[int], dtype: str, dim: int) -> list[dict[str, Any]]:
        rows = tuple(n for d, n in enumerate(shape) if d != dim % len(shape))
        arrays = {"mask": placeholder("bool", rows)}
        if not self.loss.several:
            arrays["weight"] = placeholder(dtype, (shape[dim],))
        flags = [{x.name: c} for x in self.loss.flags for c in x.choices if c != x.default]
        return [{}, arrays, *flags]

    def _call(
        self,
        recorder: KernelRecorder,
        dtype: str,
        shape: tuple[int, ...],
        places: int,
        options: Mapping[str, Any],
        strides: tuple[int, ...] = (),
    ) -> None:
        dim = options["class_dim"] % len(shape)
        rows = tuple(n for d, n in enumerate(shape) if d != dim)
        labels = (*rows[:dim], places, *rows[dim:]) if self.loss.several else rows
        scores = Placeholder(dtype, shape, strides, 0) if strides else placeholder(dtype, shape)
        operands = {"input": scores, "target": placeholder("int64", labels)}
        call = getattr(functional, self.loss.name).prepare(**operands, **options)
        recorder.call(call, [call.loss.engine.floating(call)])
        if call.static.reduction == "none" and not strides:
            self._second(recorder, call)

    def _second(self, recorder: KernelRecorder, call: Call) -> None:
        """Records the products of second derivatives with a tangent; those of linear hinges have no kernel."""
        call = call._replace(static=call.static._replace(out_dtype="float64", check="off"))
        moved = call.loss.engine.jvp(call, call.loss.engine.floating(call), call.arrays[:1])
        recorder.second(moved, tuple([i == 0 for i in range(len(moved.arrays))]))

    @staticmethod
    def subsets() -> Subsets:
        return Subsets(dtypes, structure, formula, entry_point, ("value_and_gradient",))

    @staticmethod
    def wide_accesses(variant: MarginKernel) -> tuple[int, int]:
        """Returns the wide loads and stores: one vector load, and one vector store if the kernel writes gradients."""
        wide = variant.vec_size * ITEMSIZE[variant.input] >= 16 and variant.kind != "denominator"
        return int(wide and variant.scores != "gathered"), int(wide and "gradient" in variant.kind)

    @staticmethod
    def described(variant: MarginKernel) -> Mapping[str, str]:
        words = [x for x in ("counted", "self_counting", "tallies") if getattr(variant, x)]
        words += [f"rank{variant.rank}"] if variant.rank > 1 else []
        return {
            "dtypes": " ".join(variant.storage),
            "layout": " ".join([variant.layout, *words]),
            "access": variant.scores,
            "gradients": "input" if "gradient" in variant.kind else "",
            "flags": " ".join([x.name for x, on in zip(variant.loss.flags, variant.flags, strict=True) if on]),
        }


def entry_point(variant: MarginKernel) -> Iterator[Hashable]:
    """Traits: the kernel, and its layout for one label or a list."""
    yield variant.kind
    yield variant.loss.several, variant.layout


def layout(variant: MarginKernel) -> Iterator[Hashable]:
    """Traits: kernel, layout and access to scores, each for one label and for lists."""
    yield variant.loss.several, variant.kind
    yield variant.loss.several, variant.layout
    yield variant.loss.several, variant.scores


def structure(variant: MarginKernel) -> Iterator[Hashable]:
    """Traits: those of ``layout``, the formula, and the other properties of a call."""
    yield from layout(variant)
    yield from formula(variant)
    yield bool(variant.weight), variant.mask
    yield variant.counted, variant.self_counting, variant.tallies


def formula(variant: MarginKernel) -> Iterator[Hashable]:
    """Traits: the formula."""
    yield variant.loss, variant.flags


def dtypes(variant: MarginKernel) -> Iterator[Hashable]:
    """Traits: those of ``structure``, and the dtypes."""
    yield from structure(variant)
    yield variant.kind, variant.storage, variant.result
