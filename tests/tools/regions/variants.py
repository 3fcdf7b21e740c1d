"""Kernels of region losses, recorded from their calls (`cupylosses.engines.record`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

from cupylosses import checks, functional, interop
from cupylosses.call import Call
from cupylosses.engines.record import KernelRecorder, placeholder
from cupylosses.engines.regions.codegen import RegionKernel
from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.jit.gpu import Chip
from tools.covered_variants import CoveredVariants, Subsets

#: Shapes with classes in registers, few and as many as possible for float32 and float64, and with more classes.
SHAPES: Sequence[tuple[int, ...]] = ((2, 4, 64, 64), (2, 40, 8, 8), (2, 19, 64, 64), (2, 2, 64, 64), (2, 8, 8, 8))
_FEW = 2
#: Dtypes of targets; with the last one, a target has a value per class.
TARGETS = ("int64", "uint8", "float32")

#: Options with kernels of their own, besides the cases of a definition.
OPTIONS: Sequence[Mapping[str, Any]] = (
    {"overlap": "squared"},
    {"overlap": "min"},
    {"activation": "sigmoid"},
    {"pool": "batch", "absent": "zero", "log_loss": True},
    {"average": "samples", "mean_of_weights": True, "include_background": False},
)


class RegionVariants(CoveredVariants):
    """Kernels for each entry point, layout, dtype and setting."""

    Definition: ClassVar = RegionLoss
    # Sums of many classes spill while lanes exchange them, once per chunk, or next to functions of every logit.
    spills: ClassVar = 168

    def kernels(self, fast: bool = False) -> list[Any]:
        recorder = KernelRecorder(Chip(227 << 10, clusters=True))
        shapes = SHAPES[: _FEW if fast else None]
        for dtype, shape in product(("float32", "bfloat16") if fast else checks.FLOATING, shapes):
            for target in TARGETS[:: 2 if fast else 1]:
                for options in self._options(dtype, shape, fast):
                    self._call(recorder, dtype, target, shape, options)
        return list(recorder.kernels)

    def _options(self, dtype: str, shape: Sequence[int], fast: bool) -> list[Mapping[str, Any]]:
        arrays: dict[str, Any] = {"mask": placeholder("bool", (*shape[:1], *shape[2:]))}
        if self.loss.values()["pool"] == "none":
            arrays["class_weight"] = placeholder(dtype, shape[1:2])
        if self.loss.has_voxels:
            arrays["weight"] = placeholder(dtype, shape[1:2])
            return [*self.loss.cases, arrays]
        pooled = self.loss.values()["pool"] != "none"
        others = OPTIONS[:3] if pooled else OPTIONS
        return [*self.loss.cases, arrays, {"reduction": "none"}, *(others[:1] if fast else others)]

    def _call(
        self, recorder: KernelRecorder, dtype: str, target: str, shape: tuple[int, ...], options: Mapping[str, Any]
    ) -> None:
        dense = target in checks.FLOATING
        if dense and options.get("focal_over") == "softmax":
            return
        given = placeholder(target, shape if dense else (*shape[:1], *shape[2:]))
        call = getattr(functional, self.loss.name).prepare(placeholder(dtype, shape), given, **options)
        floating = call.loss.engine.floating(call)
        recorder.call(call, [floating, tuple([i == 0 for i in range(len(call.arrays))])])
        self._second(recorder, call)

    def _second(self, recorder: KernelRecorder, call: Call) -> None:
        """Records the products of second derivatives with a tangent of the input."""
        call = call._replace(static=call.static._replace(out_dtype="float64", check="off"))
        moved = call.loss.engine.jvp(call, tuple([i == 0 for i in range(len(call.arrays))]), call.arrays[:1])
        recorder.second(moved, tuple([i == 0 for i in range(len(moved.arrays))]))

    @staticmethod
    def subsets() -> Subsets:
        return Subsets(dtypes, structure, entry_point, entry_point, ("value", "from_residual"))

    @staticmethod
    def wide_accesses(variant: RegionKernel) -> tuple[int, int]:
        """Returns the 16-byte loads and stores of each class, for kernels that have them."""
        wide = variant.wide and variant.held and variant.vec_size * interop.ITEMSIZE[variant.input] >= 16
        if not wide or variant.kind in ("groups", "hvp_groups"):
            return 0, 0
        stores = variant.kind in ("from_residual", "hvp") and variant.gradients[0]
        return variant.held, variant.held * stores

    @staticmethod
    def described(variant: RegionKernel) -> Mapping[str, str]:
        names = [x for x, on in zip(("input", "target"), variant.gradients, strict=True) if on]
        s = variant.static
        words = [x for x in ("wide", "many") if getattr(variant, x)]
        return {
            "dtypes": " ".join(variant.storage),
            "layout": f"{variant.held or 'many'} classes" + f" of {variant.lanes} lanes" * (variant.lanes > 1),
            "access": " ".join([f"x{variant.vec_size}", *words]),
            "gradients": " ".join(names),
            "flags": " ".join([s.kind, s.activation, s.overlap, s.pool, s.absent, s.voxel]),
        }


def entry_point(variant: RegionKernel) -> Iterator[Hashable]:
    """Traits: the kernel in its layout, and what it reads."""
    yield variant.kind, bool(variant.held), variant.lanes > 1
    yield variant.static.kind, variant.static.voxel


def layout(variant: RegionKernel) -> Iterator[Hashable]:
    """Traits: combinations of those of ``entry_point``."""
    yield variant.kind, bool(variant.held), variant.lanes > 1, variant.static.kind
    yield variant.kind, variant.static.voxel


def structure(variant: RegionKernel) -> Iterator[Hashable]:
    """Traits: those of ``layout``, the arrays of a call, and the settings."""
    yield from layout(variant)
    yield variant.loss, variant.static.voxel
    s = variant.static
    yield variant.kind, s.activation, s.overlap
    yield variant.kind, s.pool, s.average
    yield variant.kind, s.weighting, s.log_loss, s.power
    yield variant.class_weight, variant.weight, variant.mask


def dtypes(variant: RegionKernel) -> Iterator[Hashable]:
    """Traits: those of ``structure``, and the dtypes."""
    yield from structure(variant)
    yield variant.kind, variant.storage, variant.held
