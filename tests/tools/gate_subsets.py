"""Subsets of the compile gate, for runs that do not compile every kernel.

``broad``  has 115 to 184 kernels of each representative, and of every other loss the training kernels
           (`Variants.broad`);
``fast``   has some 510 kernels of all losses together: every run of the tests compiles those of the newest compiler,
           and `.ci/run` those of CUDA 11.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle
from operator import attrgetter
from typing import TypeVar

from cupylosses.definition.base import Definition
from cupylosses.jit.kernel import Kernel
from tools.nvrtc import Nvrtc, find_libraries
from tools.representatives import representatives
from tools.variants import Variants

Variant = TypeVar("Variant")

#: A kernel for an architecture by a compiler.
Choice = tuple[Kernel, str, Nvrtc]

#: Supported architectures, by the major version of the CUDA toolkit that compiles for them.
MATRIX: Mapping[int, tuple[str, ...]] = {
    13: ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
    12: ("sm_70", "sm_80", "sm_90"),
    11: ("sm_70", "sm_80", "sm_90"),
}

#: Architecture of the performance measurements. The subsets have the most kernels for it.
BROADEST = "sm_90"

#: The architectures of the subsets: the oldest, whose 16-bit conversions are spelled out; the broadest; and the newest.
FAST = (MATRIX[13][0], BROADEST, MATRIX[13][-1])


def fast_compilers() -> dict[Nvrtc, Sequence[str]]:
    """Returns the newest NVRTC and, if installed, that of CUDA 11, which accepts less; with their architectures."""
    libraries = find_libraries()
    newest = max(libraries, default=0)
    found: dict[Nvrtc, Sequence[str]] = {}
    compiler = Nvrtc(libraries.get(newest))
    found[compiler] = [x for x in FAST if x in compiler.architectures]
    if 11 in libraries and newest > 11:
        found[Nvrtc(libraries[11])] = MATRIX[11]
    return found


def fast(
    losses: Sequence[Definition],
    compilers: Mapping[Nvrtc, Sequence[str]],
    whole: Collection[Definition] | None = None,
) -> list[Choice]:
    """Selects kernels that cover each formula, and each kernel, layout and access to memory of any loss.

    The newest compiler gets all of them. Of each loss it compiles a training kernel with each setting of the flags, in
    turn in float32 for :data:`BROADEST` and in bfloat16 for another of its architectures. Of the losses ``whole`` it
    compiles each kernel, layout, dtype and access for BROADEST, and of losses of rows each kernel, layout and option;
    forward with gradients of rows also for the other architectures in turn. An older compiler gets each kernel of
    ``whole`` and each layout, and of rows each layout and option.

    Args:
        losses: Losses of any engine.
        compilers: The architectures that each of them compiles for.
        whole: The losses with all structures; by default the representatives, and all losses of rows.
    """
    whole = representatives() if whole is None else whole
    newest = max(compilers, key=lambda x: x.version)
    found: dict[Choice, None] = {}
    for compiler, architectures in compilers.items():
        broadest = BROADEST if BROADEST in architectures else architectures[-1]
        for kind in Variants.classes():
            # Each engine starts its own cycle, so that one more kernel of an engine does not move those of others. The
            # newest compiler begins with the newest architecture, an older one with the oldest.
            rest = [x for x in architectures if x != broadest] or [broadest]
            others = cycle(rest[::-1] if compiler is newest else rest)
            own = [x for x in losses if isinstance(x, kind.Definition)]
            choose = kind.newest if compiler is newest else kind.older
            for variant, architecture in choose(own, whole, broadest, others):
                found[variant, architecture, compiler] = None
    return list(found)


def one_of_each(among: Sequence[Variant], *fields: str) -> list[Variant]:
    """Returns the last variant, which has all gradients, for each combination of these fields that occurs."""
    return list({attrgetter(*fields)(x): x for x in among}.values())


def cover(kernels: Iterable[Variant], traits: Callable[[Variant], Iterator[Hashable]]) -> list[Variant]:
    """Returns a small set of kernels that covers every trait: greedily, each time the one with most missing traits."""
    owned: dict[frozenset[Hashable], Variant] = {}
    for kernel in kernels:
        owned.setdefault(frozenset(traits(kernel)), kernel)
    missing = set(chain.from_iterable(owned))
    found = []
    while missing:
        best = max(owned, key=lambda x: len(x & missing))
        missing -= best
        found.append(owned[best])
    return found
