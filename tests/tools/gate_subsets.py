"""Subsets of the compile gate, for runs that do not compile every kernel.

``broad``  of each representative 115 to 174 kernels, of every other loss the training kernels;
``fast``   of all losses together some 200, and a few of them by CUDA 11, in every run of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle
from operator import attrgetter
from typing import TypeVar

from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.codegen import PointwiseKernel
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.softmax.definition import SoftmaxLoss
from tools.nvrtc import Nvrtc, find_libraries
from tools.representatives import representatives
from tools.row_variants import SoftmaxKernel, row_variants
from tools.variants import flag_settings, variants

Kernel = TypeVar("Kernel", bound=PointwiseKernel | SoftmaxKernel)

#: A kernel for an architecture by a compiler.
Choice = tuple[PointwiseKernel | SoftmaxKernel, str, Nvrtc]

#: The supported architectures, by the major version of the CUDA that compiles for them.
MATRIX: Mapping[int, tuple[str, ...]] = {
    13: ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
    12: ("sm_70", "sm_80", "sm_90"),
    11: ("sm_70", "sm_80", "sm_90"),
}

#: The architecture of the performance measurements. The subsets have most kernels for it.
BROADEST = "sm_90"

#: The architectures of the subsets: the oldest, whose 16-bit conversions are spelled out; the broadest; and the newest.
FAST = (MATRIX[13][0], BROADEST, MATRIX[13][-1])


# ----------------------------------------------------------------------------------------------------------------------
# The broad subset


def broad(loss: Loss, architecture: str, whole: bool = True) -> list[PointwiseKernel]:
    """Kernels of a loss in which each kernel and layout occurs, and each dtype.

    For :data:`BROADEST` also each choice of dtypes, setting of the flags and broadcast operand. Without ``whole``, only
    the training kernels: for BROADEST, and fewer for another architecture of :data:`FAST` in turn.
    """
    usual = variants(loss, fast=True)
    if not whole:
        return _of_training(loss, usual, architecture)
    everything = variants(loss)
    training = [x for x in everything if (x.kind, x.layout) == ("value_and_gradient", "flat") and x.vec_size > 1]
    if architecture == BROADEST:
        found = [
            *_one_of_each(usual, "kind", "layout", "access", "columns"),
            *_one_of_each(usual, "kind", "storage"),
            *_one_of_each(usual, "kind", "flags"),
            *_one_of_each(everything, "kind", "layout"),
            *_one_of_each(training, "storage"),
        ]
    else:
        same = [x for x in training if len(set(x.storage)) == 1]
        found = [*_one_of_each(usual, "kind", "layout"), *_one_of_each(same, "storage")]
    return list(dict.fromkeys(found))


def _of_training(loss: Loss, usual: Sequence[PointwiseKernel], architecture: str) -> list[PointwiseKernel]:
    """Forward with gradients in two dtypes; for BROADEST also with each setting of the flags, and the unreduced
    kernels.
    """
    plain = [x for x in usual if x.layout == "flat" and x.loss is loss]
    forward = [x for x in plain if x.kind == "value_and_gradient"]
    if architecture == BROADEST:
        elements = [x for x in plain if x.kind in ("elements", "elements_gradient")]
        return [*_one_of_each(forward, "storage", "flags"), *_one_of_each(elements, "kind")]
    return _one_of_each(forward, "storage") if architecture in architectures(loss) else []


def broad_rows(loss: SoftmaxLoss, architecture: str) -> list[SoftmaxKernel]:
    """For a loss of rows, each kernel in each layout for BROADEST, and forward with gradients for the others."""
    usual = row_variants(loss, fast=True)
    forward = [x for x in usual if x.kind == "value_and_gradient"]
    if architecture == BROADEST:
        each = [
            *_one_of_each(usual, "__class__", "kind", "layout"),
            *_one_of_each(forward, "__class__", "layout", "input"),
        ]
        return list(dict.fromkeys(each))
    return _one_of_each(forward, "__class__", "layout")


def architectures(loss: Loss) -> tuple[str, ...]:
    """The architectures for which the broad subset has kernels of a loss."""
    if loss in representatives():
        return FAST
    others = [x for x in FAST if x != BROADEST]
    return BROADEST, others[list(registry(Loss)).index(loss.name) % len(others)]


def _one_of_each(among: Sequence[Kernel], *fields: str) -> list[Kernel]:
    """A variant for each combination of these fields that occurs: the last one, which has all gradients."""
    return list({attrgetter(*fields)(x): x for x in among}.values())


# ----------------------------------------------------------------------------------------------------------------------
# The fast subset


def fast_compilers() -> dict[Nvrtc, Sequence[str]]:
    """The newest NVRTC and, if it is installed, that of CUDA 11, which accepts less; with their architectures."""
    libraries = find_libraries()
    newest = max(libraries, default=0)
    found: dict[Nvrtc, Sequence[str]] = {}
    compiler = Nvrtc(libraries.get(newest))
    found[compiler] = [x for x in FAST if x in compiler.architectures]
    if 11 in libraries and newest > 11:
        found[Nvrtc(libraries[11])] = MATRIX[11]
    return found


def fast(
    losses: Sequence[Loss | SoftmaxLoss],
    compilers: Mapping[Nvrtc, Sequence[str]],
    whole: Collection[Loss | SoftmaxLoss] | None = None,
) -> list[Choice]:
    """Kernels in which each formula occurs, and each kernel, layout and access to memory, from any loss.

    The newest of the compilers has all of them: of each loss a training kernel in float32 for :data:`BROADEST`, and one
    in bfloat16 for another of its architectures in turn; of the losses ``whole`` each kernel, layout, dtype and access,
    and of losses of rows each kernel, layout and option, for BROADEST; forward with gradients of rows also for the
    others in turn. An older compiler has each kernel and layout of ``whole``, and of rows each layout and option.

    Args:
        losses: Element-wise losses and losses of rows.
        compilers: The architectures that each of them compiles for.
        whole: The losses with all structures; by default the representatives, and all losses of rows.
    """
    whole = representatives() if whole is None else whole
    elements = [v for x in losses if isinstance(x, Loss) and x in whole for v in variants(x)]
    rows = [v for x in losses if isinstance(x, SoftmaxLoss) for v in row_variants(x, fast=True)]
    forward = [x for x in rows if x.kind == "value_and_gradient"]
    newest = max(compilers, key=lambda x: x.version)
    found: dict[Choice, None] = {}
    for compiler, architectures in compilers.items():
        broadest = BROADEST if BROADEST in architectures else architectures[-1]
        others = cycle([x for x in architectures if x != broadest] or [broadest])
        if compiler is newest:
            for variant in chain.from_iterable(training(x) for x in losses if isinstance(x, Loss)):
                architecture = broadest if variant.storage[0] == "float32" else next(others)
                found[variant, architecture, compiler] = None
            for variant in [*cover(elements, structure), *cover(rows, row_structure)]:
                found[variant, broadest, compiler] = None
            for variant in cover([x for x in forward if x.input == "bfloat16"], row_layout):
                found[variant, next(others), compiler] = None
        else:
            for variant, architecture in zip(cover(elements, kernel_and_layout), cycle((broadest, next(others)))):
                found[variant, architecture, compiler] = None
            for variant in [*cover(forward, row_options), *cover([x for x in rows if x.kind == "hvp"], row_kind)]:
                found[variant, broadest, compiler] = None
    return list(found)


def training(loss: Loss) -> list[PointwiseKernel]:
    """Forward with all gradients of contiguous operands: float32 and bfloat16 in turn, and each setting of the flags in
    turn.
    """
    plain = {
        (x.flags, x.storage[0]): x
        for x in variants(loss, fast=True)
        if (x.loss, x.kind, x.layout) == (loss, "value_and_gradient", "flat") and len(set(x.access[:-1])) == 1
    }
    settings = flag_settings(loss)
    return [
        plain[flags, dtype]
        for flags, dtype in zip(settings * (2 if len(settings) == 1 else 1), cycle(("float32", "bfloat16")))
    ]


def structure(variant: PointwiseKernel) -> Iterator[Hashable]:
    """Properties of a kernel that do not depend on its formula."""
    how = variant.kind, variant.layout, variant.columns
    yield how
    yield from ((*how, access) for access in variant.access)
    yield from (("storage", dtype) for dtype in variant.storage)
    yield "result", variant.kind, variant.result
    yield "counted", variant.kind, variant.counted


def kernel_and_layout(variant: PointwiseKernel) -> Iterator[Hashable]:
    """The fewest fields that tell kernels and dtypes apart."""
    yield variant.kind, variant.layout
    yield variant.storage[0]


def row_layout(variant: SoftmaxKernel) -> Iterator[Hashable]:
    """The part of the row engine in a kernel: class indices or dense targets, and the row layout."""
    yield variant.indices, variant.layout


def row_kind(variant: SoftmaxKernel) -> Iterator[Hashable]:
    """The entry point of a kernel of rows."""
    yield variant.indices, variant.kind


def row_options(variant: SoftmaxKernel) -> Iterator[Hashable]:
    """Parts of the row engine with their compiled-in options."""
    yield from row_layout(variant)
    for name in ("input", "cluster", "prefetch", "capped", "smoothed"):
        if hasattr(variant, name):
            yield variant.indices, name, getattr(variant, name)


def row_structure(variant: SoftmaxKernel) -> Iterator[Hashable]:
    """Properties of a kernel of rows that do not depend on its formula, and each formula."""
    yield variant.indices, variant.kind, variant.layout
    yield from row_options(variant)
    yield variant.loss.name, variant.indices, variant.kind == "hvp"
    yield from ((variant.indices, x, bool(getattr(variant, x))) for x in ("weight", "mask", "counted"))


def cover(kernels: Iterable[Kernel], traits: Callable[[Kernel], Iterator[Hashable]]) -> list[Kernel]:
    """A small set of kernels that covers every trait: greedily, always the kernel with most missing traits."""
    owned: dict[frozenset[Hashable], Kernel] = {}
    for kernel in kernels:
        owned.setdefault(frozenset(traits(kernel)), kernel)
    missing = set(chain.from_iterable(owned))
    found = []
    while missing:
        best = max(owned, key=lambda x: len(x & missing))
        missing -= best
        found.append(owned[best])
    return found
