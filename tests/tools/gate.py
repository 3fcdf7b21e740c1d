"""The compile gate: every kernel compiles for every supported GPU, without warnings, spills or narrow memory accesses.

No GPU is needed. ``tests/test_compile.py`` runs the fast subset, ``scripts/compile_kernels.py`` any part of it;
:mod:`tools.gate_subsets` defines the subsets.
"""

from __future__ import annotations

import csv
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupylosses.definition.base import Definition
from tools import cache, gate_subsets, nvrtc
from tools.nvrtc import CompileError, Nvrtc, Resources
from tools.representatives import representatives
from tools.variants import Variants, complaints, variants

#: Bytes of register spills that kernels compiled by CUDA 11 may have. Launch bounds are tuned for later compilers; with
#: 11.8, weighted binary cross entropy of three float16 operands spills 44.
SPILLS_OF_CUDA_11 = 64


@dataclass(frozen=True)
class Job:
    """One kernel for one architecture by one compiler."""

    variant: Any
    architecture: str
    compiler: Nvrtc

    @property
    def release(self) -> str:
        """The version of the compiler: `13.0`."""
        return ".".join(map(str, self.compiler.version))

    @property
    def title(self) -> str:
        """The job as text."""
        return f"{self.variant.title} for {self.architecture} by NVRTC {self.release}"

    def complaints(self, found: Resources) -> tuple[str, ...]:
        """Defects of the compiled kernel."""
        return complaints(self.variant, found, SPILLS_OF_CUDA_11 if self.compiler.version < (12, 0) else 0)


@dataclass(frozen=True)
class Result:
    """The outcome of a job: resources, or the reason why there are none."""

    job: Job
    resources: Resources | None
    complaints: tuple[str, ...]
    cached: bool = False


def whole_jobs(losses: Sequence[Definition], compilers: Mapping[Nvrtc, Sequence[str]]) -> list[Job]:
    """Returns every kernel of these losses, by each compiler for its architectures."""
    return [
        Job(variant, architecture, compiler)
        for loss in losses
        for compiler, architectures in compilers.items()
        for architecture in architectures
        for variant in variants(loss)
    ]


def broad_jobs(
    losses: Sequence[Definition],
    compilers: Mapping[Nvrtc, Sequence[str]],
    whole: Collection[Definition] | None = None,
) -> list[Job]:
    """Returns the broad subset, by each compiler for its architectures; by default representatives have all of it."""
    whole = representatives() if whole is None else whole
    return [
        Job(variant, architecture, compiler)
        for loss in losses
        for compiler, architectures in compilers.items()
        for architecture in architectures
        for variant in Variants(loss).broad(architecture, loss in whole)
    ]


def fast_jobs(
    losses: Sequence[Definition],
    compilers: Mapping[Nvrtc, Sequence[str]],
    whole: Collection[Definition] | None = None,
) -> list[Job]:
    """Returns the fast subset of :func:`tools.gate_subsets.fast`."""
    return [Job(*x) for x in gate_subsets.fast(losses, compilers, whole)]


def run(work: Sequence[Job], threads: int) -> Iterator[Result]:
    """Compiles in several threads, since NVRTC releases the GIL. Cached results are reused."""
    with cache.Cache("kernels") as known, ThreadPoolExecutor(threads) as pool:
        try:
            waiting = []
            for job in work:
                text = job.variant.source()
                job.compiler.request(text, job.architecture)
                key = _key(job, text)
                found = known.get(key)
                waiting.append((job, key, _restored(found) if found else pool.submit(_compile, job, text)))
            for job, key, outcome in waiting:
                if isinstance(outcome, Resources):
                    yield Result(job, outcome, job.complaints(outcome), cached=True)
                    continue
                try:
                    resources = outcome.result()
                except CompileError as error:
                    yield Result(job, None, (str(error),))
                else:
                    known.put(key, asdict(resources))
                    yield Result(job, resources, job.complaints(resources))
        finally:
            pool.shutdown(cancel_futures=True)


def _compile(job: Job, text: str) -> Resources:
    return job.compiler.compile(text, job.architecture).resources


def _restored(found: dict[str, Any]) -> Resources:
    """Restores tuples, which JSON lacks."""
    return Resources(**{name: tuple(x) if isinstance(x, list) else x for name, x in found.items()})


def _key(job: Job, text: str) -> str:
    """Returns a key of all inputs that the resources depend on."""
    return cache.key(text, job.architecture, " ".join(job.compiler.options), job.compiler.fingerprint, _reader())


@functools.cache
def _reader() -> str:
    """Returns the source code that reads resources from the compiler's output."""
    return inspect.getsource(nvrtc.Resources) + inspect.getsource(nvrtc.Compiled)


COLUMNS = (
    "loss",
    "kernel",
    "dtypes",
    "result",
    "arithmetic",
    "layout",
    "vec_size",
    "access",
    "gradients",
    "flags",
    "divisor",
    "arch",
    "nvrtc",
)
RESOURCES = ("registers", "spills", "stack", "shared", "wide_loads", "wide_stores")


def write(results: Sequence[Result], path: Path) -> None:
    """Writes a table with a row per kernel, as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow((*COLUMNS, *RESOURCES, "complaints"))
        for result in results:
            measured = [getattr(result.resources, x, "") for x in RESOURCES]
            rows.writerow((*_description(result.job), *measured, "; ".join(result.complaints)))


def _description(job: Job) -> tuple[str | int, ...]:
    variant = job.variant
    shown = Variants.of(variant.loss).described(variant)
    return (
        variant.loss.name,
        variant.kind,
        shown["dtypes"],
        variant.result,
        variant.compute,
        shown["layout"],
        variant.vec_size,
        shown["access"],
        shown["gradients"],
        shown["flags"],
        "counted" if variant.counted else "given",
        job.architecture,
        job.release,
    )
