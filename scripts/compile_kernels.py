"""Compiles every kernel for given GPU architectures, on any machine: NVRTC needs no GPU.

    python scripts/compile_kernels.py --fast                      the common kernels, for sm_80 and sm_90
    python scripts/compile_kernels.py --arch sm_75 --loss kl_div  every kernel of one loss for one architecture

Exits with 1 if a kernel does not compile, warns, spills registers, or is contiguous and does not use 16-byte accesses.
Needs the extra `scripts` and NVRTC: `pip install nvidia-cuda-nvrtc`, or a CUDA toolkit under CUDA_PATH.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import track
from rich.table import Table

from cupylosses.codegen import Variant, source
from cupylosses.definition import registry
from cupylosses.testing.nvrtc import Compiled, CompileError, Nvrtc, find_library
from cupylosses.testing.variants import complaints, variants


@dataclass
class Result:
    """One kernel for one architecture: what came out, or why nothing did."""

    variant: Variant
    architecture: str
    compiled: Compiled | None
    complaints: list[str]


def main() -> int:
    arguments = parse()
    console = Console(soft_wrap=True) if sys.stdout.isatty() else Console(width=140, soft_wrap=True)
    compiler = Nvrtc(arguments.nvrtc)
    unknown = set(arguments.arch) - set(compiler.architectures)
    if unknown:
        sys.exit(f"{compiler.path} compiles for {', '.join(compiler.architectures)}, not for {', '.join(unknown)}")
    version = ".".join(map(str, compiler.version))
    console.print(f"NVRTC {version} ({compiler.path}), for {', '.join(arguments.arch)}")

    names = arguments.loss or list(registry())
    jobs = [(v, a) for name in names for v in variants(registry()[name], arguments.fast) for a in arguments.arch]
    results = list(track(run(jobs, arguments.nvrtc, arguments.jobs), "compiling", len(jobs), console=console))
    console.print(table(results))

    failed = [x for x in results if x.complaints]
    for result in failed:
        what = "\n".join(result.complaints)
        console.print(f"{result.architecture} {result.variant.title}: {what}", markup=False, highlight=False)
    console.print(f"{len(results)} kernels compiled, {len(failed)} with complaints")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90"], metavar="sm_XX", help="architectures")
    parser.add_argument("--loss", nargs="+", choices=list(registry()), help="these losses only")
    parser.add_argument("--fast", action="store_true", help="two dtypes, all gradients at once, common layouts")
    parser.add_argument("--nvrtc", type=Path, default=find_library(), help="the compiler's shared library")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    return parser.parse_args()


def run(jobs: Sequence[tuple[Variant, str]], nvrtc: Path, processes: int) -> Iterator[Result]:
    """Compiles in several processes; only text travels, since a definition holds functions."""
    with ProcessPoolExecutor(processes) as pool:
        work = ((source(variant), architecture, nvrtc) for variant, architecture in jobs)
        for (variant, architecture), outcome in zip(jobs, pool.map(compile_one, work, chunksize=8), strict=True):
            if isinstance(outcome, str):
                yield Result(variant, architecture, None, [outcome])
            else:
                yield Result(variant, architecture, outcome, complaints(variant, outcome))


def compile_one(work: tuple[str, str, Path]) -> Compiled | str:
    text, architecture, nvrtc = work
    try:
        return _compiler(nvrtc).compile(text, architecture)
    except CompileError as error:
        return str(error)


@cache
def _compiler(nvrtc: Path) -> Nvrtc:
    return Nvrtc(nvrtc)


def table(results: Sequence[Result]) -> Table:
    """One row per loss, kind of kernel and architecture; ranges over its variants."""
    rows: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        rows[result.variant.loss.name, result.variant.kind, result.architecture].append(result)
    show = Table("loss", "kernel", "arch", "compiled", "registers", "spills", "16-byte loads", "stores", "wrong")
    for column in show.columns[3:]:
        column.justify = "right"
    for key, group in rows.items():
        done = [x.compiled for x in group if x.compiled]
        measured = [
            span([getattr(x, name) for x in done]) for name in ("registers", "spills", "wide_loads", "wide_stores")
        ]
        wrong = sum(bool(x.complaints) for x in group)
        show.add_row(*key, str(len(done)), *measured, str(wrong), style="red" if wrong else None)
    return show


def span(values: Sequence[int]) -> str:
    """`3`, or `3-7`."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


if __name__ == "__main__":
    sys.exit(main())
