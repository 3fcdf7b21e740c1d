"""Compile every kernel for given GPU architectures, on any machine: NVRTC needs no GPU.

    python scripts/compile_kernels.py --fast                      the kernels that every run of .ci/run compiles
    python scripts/compile_kernels.py --broad                     the kernels that the tests compile with --thorough
    python scripts/compile_kernels.py --broad --loss kl_div       more kernels of one loss
    python scripts/compile_kernels.py --arch sm_75 --loss kl_div  every kernel of one loss for one architecture
    python scripts/compile_kernels.py --matrix --out kernels.csv  every kernel, supported architecture and NVRTC

Exits with 1 if a kernel does not compile, causes a warning, spills registers, or, with contiguous operands, does not
use 16-byte accesses. Needs the extras `scripts` and `nvrtc`: `pip install -e ".[scripts,nvrtc]"` installs NVRTC of CUDA
11, 12 and 13 side by side. Without `--matrix` and `--nvrtc`, the newest NVRTC compiles; `--fast` adds that of CUDA 11.
Results are cached by content, in CUPYLOSSES_CACHE_DIR or the user's cache, so unchanged kernels are not compiled again.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tools import gate
from tools.gate import Result
from tools.gate_subsets import FAST, MATRIX, fast_compilers
from tools.nvrtc import Nvrtc, find_libraries

from cupylosses.definition.base import Definition
from cupylosses.definition.registry import registry
from cupylosses.jit import processors

LOSSES: Mapping[str, Definition] = registry()


def main() -> int:
    arguments = parse()
    console = Console(soft_wrap=True) if sys.stdout.isatty() else Console(width=160, soft_wrap=True)
    compilers = choose(arguments)
    for compiler, architectures in compilers.items():
        version = ".".join(map(str, compiler.version))
        console.print(f"NVRTC {version} ({compiler.path}), for {', '.join(architectures)}")

    losses = [LOSSES[name] for name in arguments.loss or LOSSES]
    # A loss named on the command line gets the kernels that otherwise only representative losses get.
    whole = losses if arguments.loss else None
    if arguments.fast:
        jobs = gate.fast_jobs(losses, compilers, whole)
    elif arguments.broad:
        jobs = gate.broad_jobs(losses, compilers, whole)
    else:
        jobs = gate.whole_jobs(losses, compilers)
    done = gate.run(jobs, arguments.jobs)
    results = list(track(done, "compiling", len(jobs), console=console))
    console.print(table(results))
    if arguments.out:
        gate.write(results, arguments.out)

    failed = [x for x in results if x.complaints]
    for result in failed:
        console.print(f"{result.job.title}: {'; '.join(result.complaints)}", markup=False, highlight=False)
    cached = sum(x.cached for x in results)
    console.print(f"{len(results)} kernels compiled ({cached} of them earlier), {len(failed)} with defects")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", action="store_true", help="every supported NVRTC and its architectures")
    subset = parser.add_mutually_exclusive_group()
    subset.add_argument(
        "--fast", action="store_true", help="each formula, and each kernel and layout of some loss: about a minute"
    )
    subset.add_argument(
        "--broad",
        action="store_true",
        help="each kernel, layout and choice of dtypes, but not every combination; of most losses the training kernels",
    )
    parser.add_argument("--arch", nargs="+", metavar="sm_XX", help=f"default without --matrix: {' '.join(FAST)}")
    parser.add_argument("--loss", nargs="+", choices=list(LOSSES), help="these losses only")
    parser.add_argument("--nvrtc", nargs="+", type=Path, metavar="FILE", help="shared libraries of the compilers")
    parser.add_argument("--jobs", type=int, default=processors.usable(), help="threads")
    parser.add_argument("--out", type=Path, metavar="CSV", help="write a row per kernel")
    return parser.parse_args()


def choose(arguments: argparse.Namespace) -> dict[Nvrtc, Sequence[str]]:
    """The compilers, each with the architectures that it compiles for."""
    if arguments.fast and not (arguments.nvrtc or arguments.matrix or arguments.arch):
        return fast_compilers()
    if arguments.nvrtc or not arguments.matrix:
        found = [Nvrtc(x) for x in arguments.nvrtc or [None]]
    else:
        libraries = find_libraries()
        missing = [str(x) for x in MATRIX if x not in libraries]
        if missing:
            sys.exit(
                f'There is no NVRTC of CUDA {", ".join(missing)}: `pip install -e ".[nvrtc]"`, or name it: --nvrtc'
            )
        found = [Nvrtc(libraries[x]) for x in MATRIX]
    chosen: dict[Nvrtc, Sequence[str]] = {}
    for compiler in found:
        usual = MATRIX.get(compiler.version[0], ()) if arguments.matrix else FAST
        chosen[compiler] = arguments.arch or usual
        unknown = set(chosen[compiler]) - set(compiler.architectures)
        if unknown or not chosen[compiler]:
            wanted = ", ".join(unknown) or "those of the matrix"
            sys.exit(f"{compiler.path} compiles for {', '.join(compiler.architectures)}, not for {wanted}")
    return chosen


def table(results: Sequence[Result]) -> Table:
    """Table with one row per loss, kind of kernel, compiler and architecture; cells are ranges over the variants."""
    rows: dict[tuple[str, str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        job = result.job
        rows[job.variant.loss.name, job.variant.kind, job.release, job.architecture].append(result)
    measures: Mapping[str, str] = {x: x.replace("wide_", "16-byte ") for x in gate.RESOURCES}
    show = Table("loss", "kernel", "NVRTC", "arch", "compiled", *measures.values(), "wrong")
    for column in show.columns[4:]:
        column.justify = "right"
    for key, group in rows.items():
        done = [x.resources for x in group if x.resources]
        measured = [span([getattr(x, name) for x in done]) for name in measures]
        wrong = sum(bool(x.complaints) for x in group)
        show.add_row(*key, str(len(done)), *measured, str(wrong), style="red" if wrong else None)
    return show


def span(values: Sequence[int]) -> str:
    """The range of values as text: `3` if all are equal, otherwise `3-7`; empty if there are none."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


if __name__ == "__main__":
    sys.exit(main())
