"""Kernels of element-wise losses, recorded from their calls (`cupylosses.engines.record`)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import cache
from itertools import cycle, product
from typing import ClassVar

from cupylosses import checks, interop
from cupylosses.call import Call
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.codegen import COMBINED, PRODUCT, PointwiseKernel
from cupylosses.engines.pointwise.definition import Loss, modified
from cupylosses.engines.pointwise.layout import TILED
from cupylosses.engines.pointwise.reduction import Static
from cupylosses.engines.record import KernelRecorder, Placeholder, placeholder
from tools.gate_subsets import BROADEST, FAST, cover, one_of_each
from tools.representatives import representatives
from tools.variants import Compiled, Variants

#: Every kind of layout occurs only with at least this many elements in both directions.
ROWS, COLUMNS = 4096, 4096
#: Odd sizes, with enough elements that tiles go through shared memory.
ODD_ROWS, ODD_COLUMNS = 4801, 4803


class PointwiseVariants(Variants):
    """Kernels for each setting of a loss's flags, dtype, layout, reduction and choice of gradients."""

    Definition: ClassVar = Loss

    def kernels(self, fast: bool = False) -> list[PointwiseKernel]:
        return list(_kernels(self.loss, fast))

    def broad(self, architecture: str, whole: bool = True) -> list[PointwiseKernel]:
        """Returns kernels in which each kind of kernel, each layout and each dtype occurs.

        For :data:`BROADEST`, each choice of dtypes, setting of the flags and broadcast operand occurs as well. Without
        ``whole``, there are only the training kernels: for BROADEST, and fewer for another architecture of :data:`FAST`
        in turn.
        """
        usual = self.kernels(fast=True)
        if not whole:
            return self._of_training(usual, architecture)
        everything = self.kernels()
        training = [x for x in everything if (x.kind, x.layout) == ("value_and_gradient", "flat") and x.vec_size > 1]
        if architecture == BROADEST:
            found = [
                *one_of_each(usual, "kind", "layout", "access", "columns"),
                *one_of_each(usual, "kind", "storage"),
                *one_of_each(usual, "kind", "flags"),
                *one_of_each(everything, "kind", "layout", "whole_batches"),
                *one_of_each(training, "storage"),
            ]
        else:
            same = [x for x in training if len(set(x.storage)) == 1]
            found = [*one_of_each(usual, "kind", "layout"), *one_of_each(same, "storage")]
        return list(dict.fromkeys(found))

    def _of_training(self, usual: Sequence[PointwiseKernel], architecture: str) -> list[PointwiseKernel]:
        """Returns forward with gradients in two dtypes.

        For BROADEST there are also each setting of the flags, the unreduced kernels, and products of second
        derivatives.
        """
        plain = [x for x in usual if x.layout == "flat" and x.loss is self.loss]
        forward = [x for x in plain if x.kind == "value_and_gradient"]
        if architecture == BROADEST:
            elements = [x for x in plain if x.kind in ("elements", "elements_gradient")]
            products = [x for x in usual if (x.kind, x.layout) == (PRODUCT, "flat")]
            return [
                *one_of_each(forward, "storage", "flags"),
                *one_of_each(elements, "kind"),
                *one_of_each(products, "storage"),
            ]
        return one_of_each(forward, "storage") if architecture in architectures(self.loss) else []

    @classmethod
    def newest(
        cls, losses: Sequence[Loss], whole: Collection[Loss], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        for i, loss in enumerate(losses):
            kernels = training(loss)
            for variant in kernels if len(flag_settings(loss)) > 1 else [kernels[i % 2]]:
                yield variant, broadest if variant.storage[0] == "float32" else next(others)
        for variant in cover(cls._of(losses, whole), structure):
            yield variant, broadest

    @classmethod
    def older(
        cls, losses: Sequence[Loss], whole: Collection[Loss], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        yield from zip(cover(cls._of(losses, whole), kernel_or_layout), cycle((broadest, next(others))))

    @classmethod
    def _of(cls, losses: Sequence[Loss], whole: Collection[Loss]) -> list[PointwiseKernel]:
        """Returns kernels with one setting of the flags, on which no structure depends: half of all kernels."""
        return [v for x in losses if x in whole for v in _kernels(x, False, 1)]

    @classmethod
    def may_spill(cls, variant: PointwiseKernel) -> float:
        """Returns the bytes that a kernel may spill.

        Products of second derivatives may spill a little, and more in tiles: with fewer elements per lane they spill
        nothing, but take up to a fifth longer.
        """
        if variant.kind != PRODUCT:
            return cls.spills
        return 288 if variant.layout in TILED else 16

    @staticmethod
    def wide_accesses(variant: PointwiseKernel) -> tuple[int, int]:
        """Returns the wide loads and stores of one vector.

        Gradients that are summed are not stored in vectors, and operands on which no second derivative depends are not
        loaded.
        """

        def words(dtype: str) -> int:
            return variant.vec_size * interop.ITEMSIZE[dtype] // 16

        only_combines = variant.kind == COMBINED or (variant.kind == "verify_gradient" and not any(variant.stored))
        if variant.layout != "flat" or only_combines:  # Partial sums are read one by one.
            return 0, 0
        stores = sum(words(x) for x, stored in zip(variant.storage, variant.stored, strict=True) if stored)
        if variant.kind == PRODUCT:
            return 0, stores
        read = [*variant.storage, variant.result]
        loads = sum(words(x) for x, access in zip(read, variant.access, strict=True) if access not in ("splat", "none"))
        return loads, stores + (words(variant.result) if variant.kind == "elements" else 0)

    @staticmethod
    def described(variant: PointwiseKernel) -> Mapping[str, str]:
        flags = [x.name for x, on in zip(variant.loss.flags, variant.flags, strict=True) if on]
        gradients = [x.name for x, wanted in zip(variant.loss.operands, variant.gradients, strict=True) if wanted]
        sums = " ".join(f"{x[0]} {x[1]}" if x else "none" for x in variant.sums)
        batches = f", batches of {variant.unroll}" * bool(variant.unroll)
        batches += ", whole batches" * variant.whole_batches
        return {
            "dtypes": " ".join(variant.storage),
            "layout": variant.layout + " by columns" * variant.columns + f", sums {sums}" * bool(sums) + batches,
            "access": " ".join(variant.access),
            "gradients": " ".join(gradients),
            "flags": " ".join(flags),
        }


@cache  # takes half a second per loss, several times in a run of the tests
def _kernels(loss: Loss, fast: bool, settings: int | None = None) -> tuple[PointwiseKernel, ...]:
    """Returns the kernels with all settings of the flags, or with the first few."""
    recorder, second = KernelRecorder(), KernelRecorder()
    for flags, dtypes in product(flag_settings(loss)[:settings], dtype_settings(loss, fast)):
        for tensors in layout_settings(dtypes, fast):
            _call(recorder, loss, flags, tensors, fast)
            _second(second, loss, flags, tensors)
        _call_forms(recorder, loss, flags, tuple(placeholder(x, (ROWS, COLUMNS)) for x in dtypes), fast)
    # The sums of second derivatives differ from those of gradients only in the formula.
    return (*recorder.kernels, *[x for x in second.kernels if x.kind == PRODUCT])


def flag_settings(loss: Loss) -> list[tuple[int, ...]]:
    """Returns the settings of the flags that the cases of the definition contain."""
    return list(dict.fromkeys(loss.choose(loss.values(case)) for case in loss.cases))


def dtype_settings(loss: Loss, fast: bool) -> Iterator[tuple[str, ...]]:
    """Yields operands of one dtype, of mixed floating dtypes, and integers where the definition accepts them."""
    count = len(loss.operands)
    for dtype in ("float32", "bfloat16") if fast else checks.FLOATING:
        yield (dtype,) * count
    if not fast:
        yield ("float32", *("bfloat16",) * (count - 1))
        for dtype in checks.INTEGER:
            mixed = ("float32", *(dtype if x.integer else "float32" for x in loss.operands[1:]))
            if dtype in mixed:
                yield mixed


def layout_settings(dtypes: Sequence[str], fast: bool) -> Iterator[tuple[Placeholder, ...]]:
    """Yields operands in each kind of layout.

    They are contiguous, with elements that fill the batches or do not; each broadcast along rows, along columns, or to
    all; misaligned, also next to broadcast operands, whose gradients are then sums of their own; permuted; with a step;
    permuted with odd sizes; and with a short dimension that is innermost in one of them.
    """
    contiguous = tuple(placeholder(x, (ROWS, COLUMNS)) for x in dtypes)
    yield contiguous
    for i, dtype in enumerate(dtypes):
        for shape in [(COLUMNS,)] if fast else [(COLUMNS,), (ROWS, 1), ()]:
            yield (*contiguous[:i], placeholder(dtype, shape), *contiguous[i + 1 :])
    first, *others = contiguous
    misaligned = Placeholder(first.dtype, first.shape, first.strides, interop.ITEMSIZE[first.dtype])
    if others:
        yield misaligned, *(placeholder(x.dtype, (COLUMNS,)) for x in others)
    if fast:
        yield Placeholder(first.dtype, first.shape, first.strides[::-1], 0), *others
        return
    yield tuple(placeholder(x, (ODD_ROWS, ODD_COLUMNS)) for x in dtypes)
    yield misaligned, *others
    yield Placeholder(first.dtype, first.shape, first.strides[::-1], 0), *others
    for step in (COLUMNS + 1, 2 * COLUMNS):  # Rows of a larger matrix, odd and even: without and with vectors.
        yield Placeholder(first.dtype, first.shape, (step, 1), 0), *others
    yield tuple(Placeholder(x, (16, 32, 64), (1, 16 * 65, 16), 0) for x in dtypes)
    for step in (64 + 1, 64 + 16):  # No two dimensions merge, again without and with vectors.
        yield tuple(Placeholder(x, (16, 32, 64), (33 * step, step, 1), 0) for x in dtypes)
        yield tuple(Placeholder(x, (8, 16, 32, 64), (17 * 33 * step, 33 * step, step, 1), 0) for x in dtypes)
    yield tuple(Placeholder(x, (ROWS,), (2,), 0) for x in dtypes)
    odd = ODD_ROWS, ODD_COLUMNS
    yield placeholder(first.dtype, odd), *(Placeholder(x.dtype, odd, (1, ODD_ROWS), 0) for x in others)
    # Short rows in one operand, short columns in the others.
    for short in (3, 5, 7):
        shape = (ROWS, short)
        yield placeholder(first.dtype, shape), *(Placeholder(x.dtype, shape, (1, ROWS), 0) for x in others)


def _call(
    recorder: KernelRecorder, loss: Loss, flags: tuple[int, ...], tensors: tuple[Placeholder, ...], fast: bool
) -> None:
    """Records forward and backward of one call, reduced and unreduced, for each choice of gradients."""
    floating = [x.dtype in checks.FLOATING for x in tensors]
    choices = [c for c in product(*((False, True) if x else (False,) for x in floating)) if any(c)]
    for kind in ("mean", "none"):
        _rehearse(recorder, loss, flags, tensors, Static(kind), choices[-1:] if fast else choices)


def _second(recorder: KernelRecorder, loss: Loss, flags: tuple[int, ...], tensors: tuple[Placeholder, ...]) -> None:
    """Records the product of the second derivatives with a contiguous tangent of the first operand, by each operand."""
    floating = [x.dtype in checks.FLOATING for x in tensors]
    parameters = tuple(x.default for x in loss.parameters)
    call = Call(loss, tensors, Static("sum", flags=flags), parameters)
    tangent = placeholder(tensors[0].dtype, tensors[0].shape)
    moved = loss.engine.jvp(call, tuple([i == 0 for i in range(len(tensors))]), (tangent,))
    recorder.second(moved, (*floating, False))


def _rehearse(
    recorder: KernelRecorder,
    loss: Loss,
    flags: tuple[int, ...],
    tensors: tuple[Placeholder, ...],
    how: Static,
    choices: Sequence[tuple[bool, ...]],
) -> None:
    parameters = tuple(x.default for x in loss.parameters)
    recorder.call(Call(loss, tensors, how._replace(flags=flags), parameters), choices)


def _call_forms(
    recorder: KernelRecorder, loss: Loss, flags: tuple[int, ...], tensors: tuple[Placeholder, ...], fast: bool
) -> None:
    """Records kernels for a weight, a mask, numbers and dimensions, for contiguous operands of one dtype."""
    dtype = tensors[0].dtype
    every = tuple(x.dtype in checks.FLOATING for x in tensors)
    row, full = placeholder(dtype, (COLUMNS,)), placeholder("bool", (ROWS, COLUMNS))
    both = modified(loss, weight="array", mask=True)
    _rehearse(recorder, both, flags, (*tensors, row, full), Static("mean"), [(*every, False, False)])
    for dim in (0, 1):
        _rehearse(recorder, loss, flags, tensors, Static("mean", (dim,)), [every])
    numbers = frozenset(x.name for x in loss.operands if x.number or x.default is not None)
    if numbers:
        arrays = [x.name not in numbers for x in loss.operands]
        chosen = [tuple(v for v, a in zip(values, arrays, strict=True) if a) for values in (tensors, every)]
        _rehearse(recorder, modified(loss, numbers), flags, chosen[0], Static("mean"), [chosen[1]])
    if fast:
        return
    apart = [Placeholder(x.dtype, (64, 64, 16), (65 * 17, 17, 1), 0) for x in tensors]  # No two dimensions merge.
    _rehearse(recorder, loss, flags, tuple(apart), Static("mean", (0, 1)), [every])
    for weight, mask, kind in (("array", False, "mean"), ("array", True, "weighted_mean"), ("number", True, "mean")):
        added = [row] * (weight == "array") + [full] * mask
        wanted = (*every, *(x.dtype in checks.FLOATING for x in added))
        _rehearse(recorder, modified(loss, weight=weight, mask=mask), flags, (*tensors, *added), Static(kind), [wanted])


# ----------------------------------------------------------------------------------------------------------------------
# Subsets


def architectures(loss: Loss) -> tuple[str, ...]:
    """Returns the architectures for which the broad subset has kernels of a loss."""
    if loss in representatives():
        return FAST
    others = [x for x in FAST if x != BROADEST]
    return BROADEST, others[list(registry(Loss)).index(loss.name) % len(others)]


def training(loss: Loss) -> list[PointwiseKernel]:
    """Returns forward kernels with all gradients of contiguous operands, for each setting of the flags.

    Their dtypes are float32 and bfloat16 in turn; a single setting has both.
    """
    plain = {
        (x.flags, x.storage[0]): x
        for x in Variants(loss).kernels(fast=True)
        if (x.loss, x.kind, x.layout) == (loss, "value_and_gradient", "flat") and len(set(x.access[:-1])) == 1
    }
    settings = flag_settings(loss)
    return [
        plain[flags, dtype]
        for flags, dtype in zip(settings * (2 if len(settings) == 1 else 1), cycle(("float32", "bfloat16")))
    ]


def structure(variant: PointwiseKernel) -> Iterator[Hashable]:
    """Traits of a kernel that do not depend on its formula.

    Products of second derivatives, which take the longest to compile, only cover each layout.
    """
    how = variant.kind, variant.layout, variant.columns
    yield how
    if variant.kind == PRODUCT:
        return
    yield from ((*how, access) for access in variant.access)
    yield from (("storage", dtype) for dtype in variant.storage)
    yield "result", variant.kind, variant.result
    yield "counted", variant.kind, variant.counted
    yield "whole_batches", variant.kind, variant.whole_batches


def kernel_or_layout(variant: PointwiseKernel) -> Iterator[Hashable]:
    """Traits: the fewest fields that distinguish kernels, layouts and dtypes."""
    yield variant.kind
    yield variant.layout
    yield variant.storage[0]
