"""The compile gate: every kernel compiles for every supported GPU, and none warns, spills, or moves narrow words.

No GPU is needed. ``tests/test_compile.py`` runs the fast subset, ``scripts/compile_kernels.py`` any part of it.
"""

from __future__ import annotations

import csv
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from cupylosses.codegen import Variant, source
from cupylosses.definition import Loss, registry
from cupylosses.row_definition import RowLoss
from cupylosses.testing import cache, nvrtc
from cupylosses.testing.nvrtc import CUPY_OPTIONS, CompileError, Nvrtc, Resources
from cupylosses.testing.representatives import representatives
from cupylosses.testing.row_variants import AnyRowVariant, described, row_variants
from cupylosses.testing.variants import complaints, variants

Kernel = TypeVar("Kernel", bound=Variant | AnyRowVariant)

#: The supported architectures, by the major version of the CUDA that compiles for them.
MATRIX: Mapping[int, tuple[str, ...]] = {
    13: ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
    12: ("sm_70", "sm_80", "sm_90"),
    11: ("sm_70", "sm_80", "sm_90"),
}

#: Where the fast subset is broadest: the architecture that performance is measured on.
BROADEST = "sm_90"

#: Those of the fast subset: the oldest, whose 16-bit conversions are spelled out; the broadest; and the newest.
FAST = (MATRIX[13][0], BROADEST, MATRIX[13][-1])


@dataclass(frozen=True)
class Job:
    """One kernel for one architecture by one compiler."""

    variant: Variant | AnyRowVariant
    architecture: str
    compiler: Nvrtc

    @property
    def release(self) -> str:
        """The version of the compiler: `13.0`."""
        return ".".join(map(str, self.compiler.version))

    @property
    def title(self) -> str:
        """The job in words."""
        return f"{self.variant.title} for {self.architecture} by NVRTC {self.release}"


@dataclass(frozen=True)
class Result:
    """What came out of a job; without resources, why nothing did."""

    job: Job
    resources: Resources | None
    complaints: tuple[str, ...]
    cached: bool = False


def chosen(loss: Loss, architecture: str, fast: bool = False, whole: bool = True) -> list[Variant]:
    """The kernels of a loss; with ``fast`` some of them.

    In these each kernel and layout occurs, and each dtype; for :data:`BROADEST` also each choice of dtypes, setting of
    the flags and broadcast operand. Without ``whole`` they are those of training: for BROADEST, and fewer for another
    architecture of :data:`FAST`, which takes turns.
    """
    if not fast:
        return variants(loss)
    usual = variants(loss, fast=True)
    if not whole:
        return _of_training(loss, usual, architecture)
    everything = variants(loss)
    training = [x for x in everything if (x.kind, x.layout) == ("value_and_gradient", "flat") and x.lanes > 1]
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


def _of_training(loss: Loss, usual: Sequence[Variant], architecture: str) -> list[Variant]:
    """Forward with gradients in two dtypes and, for BROADEST, with each setting of the flags; there the kernels of
    elements, too.
    """
    plain = [x for x in usual if x.layout == "flat" and x.loss is loss]
    forward = [x for x in plain if x.kind == "value_and_gradient"]
    if architecture == BROADEST:
        elements = [x for x in plain if x.kind in ("elements", "elements_gradient")]
        return [*_one_of_each(forward, "storage", "flags"), *_one_of_each(elements, "kind")]
    return _one_of_each(forward, "storage") if architecture in architectures(loss) else []


def chosen_rows(loss: RowLoss, architecture: str, fast: bool = False) -> list[AnyRowVariant]:
    """The same of a loss of rows: each kernel in each layout for BROADEST, forward with gradients for others."""
    if not fast:
        return row_variants(loss)
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
    """Those that the fast subset has kernels of a loss for."""
    if loss in representatives():
        return FAST
    others = [x for x in FAST if x != BROADEST]
    return BROADEST, others[list(registry()).index(loss.name) % len(others)]


def _one_of_each(among: Sequence[Kernel], *fields: str) -> list[Kernel]:
    """A variant for each combination of these fields that occurs: the last, which has all gradients."""
    return list({attrgetter(*fields)(x): x for x in among}.values())


def jobs(
    losses: Sequence[Loss | RowLoss],
    compilers: Mapping[Nvrtc, Sequence[str]],
    fast: bool = False,
    whole: Collection[Loss | RowLoss] | None = None,
) -> list[Job]:
    """What there is to compile, by each compiler for its architectures. By default the representatives are whole."""
    whole = representatives() if whole is None else whole
    return [
        Job(variant, architecture, compiler)
        for loss in losses
        for compiler, architectures in compilers.items()
        for architecture in architectures
        for variant in (
            chosen_rows(loss, architecture, fast)
            if isinstance(loss, RowLoss)
            else chosen(loss, architecture, fast, loss in whole)
        )
    ]


def run(work: Sequence[Job], threads: int) -> Iterator[Result]:
    """Compiles in several threads, which NVRTC leaves free to run. What was compiled before is looked up."""
    with cache.Cache("kernels") as known, ThreadPoolExecutor(threads) as pool:
        try:
            waiting = []
            for job in work:
                text = source(job.variant)
                key = _key(job, text)
                found = known.get(key)
                waiting.append((job, key, _restored(found) if found else pool.submit(_compile, job, text)))
            for job, key, outcome in waiting:
                if isinstance(outcome, Resources):
                    yield Result(job, outcome, complaints(job.variant, outcome), cached=True)
                    continue
                try:
                    resources = outcome.result()
                except CompileError as error:
                    yield Result(job, None, (str(error),))
                else:
                    known.put(key, asdict(resources))
                    yield Result(job, resources, complaints(job.variant, resources))
        finally:
            pool.shutdown(cancel_futures=True)


def _compile(job: Job, text: str) -> Resources:
    return job.compiler.compile(text, job.architecture).resources


def _restored(found: dict[str, Any]) -> Resources:
    """From JSON, which has no tuples."""
    return Resources(**{name: tuple(x) if isinstance(x, list) else x for name, x in found.items()})


def _key(job: Job, text: str) -> str:
    """Everything that the resources depend on."""
    return cache.key(text, job.architecture, " ".join(CUPY_OPTIONS), job.compiler.fingerprint, _reader())


@functools.cache
def _reader() -> str:
    """How resources are read from what a compiler says."""
    return inspect.getsource(nvrtc.Resources) + inspect.getsource(nvrtc.Compiled)


COLUMNS = (
    "loss",
    "kernel",
    "dtypes",
    "result",
    "arithmetic",
    "layout",
    "lanes",
    "access",
    "gradients",
    "flags",
    "divisor",
    "arch",
    "nvrtc",
)
RESOURCES = ("registers", "spills", "stack", "shared", "wide_loads", "wide_stores")


def write(results: Sequence[Result], path: Path) -> None:
    """A table with a row per kernel, as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow((*COLUMNS, *RESOURCES, "complaints"))
        for result in results:
            measured = [getattr(result.resources, x, "") for x in RESOURCES]
            rows.writerow((*_description(result.job), *measured, "; ".join(result.complaints)))


def _description(job: Job) -> tuple[str | int, ...]:
    variant = job.variant
    if not isinstance(variant, Variant):
        return _description_of_rows(job, variant)
    flags = [x.name for x, on in zip(variant.loss.flags, variant.flags, strict=True) if on]
    gradients = [x.name for x, wanted in zip(variant.loss.operands, variant.gradients, strict=True) if wanted]
    return (
        variant.loss.name,
        variant.kind,
        " ".join(variant.storage),
        variant.result,
        variant.compute,
        f"{variant.layout} by columns" if variant.columns else variant.layout,
        variant.lanes,
        " ".join(variant.access),
        " ".join(gradients),
        " ".join(flags),
        "counted" if variant.counted else "given",
        job.architecture,
        job.release,
    )


def _description_of_rows(job: Job, variant: AnyRowVariant) -> tuple[str | int, ...]:
    shown = described(variant)
    return (
        variant.loss.name,
        variant.kind,
        shown["dtypes"],
        variant.result,
        variant.compute,
        shown["layout"],
        variant.lanes,
        "",
        shown["gradients"],
        shown["flags"],
        "counted" if variant.counted else "given",
        job.architecture,
        job.release,
    )
