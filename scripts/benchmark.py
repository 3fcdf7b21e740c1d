#!/usr/bin/env python3
"""Benchmark the losses on this GPU against torch, other libraries and a plain copy, and store the rows.

    python scripts/benchmark.py                   everything, in ten minutes
    python scripts/benchmark.py --quick           only the project's figures, in less than four minutes
    python scripts/benchmark.py --sections rows   losses of rows of logits, in about three minutes
    python scripts/benchmark.py --sections linear linear layers with a loss, in a minute and a half
    python scripts/benchmark.py --sections sequences   CTC losses, in half a minute
    python scripts/benchmark.py --sections cliffs off-headline cases, worst first, in less than four minutes
    python scripts/benchmark.py --sections cliffs --cases "few classes"   some of them, in seconds
    python scripts/benchmark.py --sections random_cases --seed 7   random cases, as many as the budget allows
    python scripts/benchmark.py --plot            draw the pictures from the stored rows; needs no GPU

Sections:

    startup       first loss of a new process
    memory        peak memory beyond the results
    host          host time, µs per call
    graph         µs per step in a CUDA graph
    accuracy      error in ulp at 2^30 elements
    rows          losses of rows of logits: TB/s, speed-ups, and the cost of options
    linear        losses of a linear layer beside the bare matrix products, and log-probabilities beside a copy: time
                  and peak memory
    sequences     CTC losses: time and peak memory
    throughput    all other losses: TB/s and speed-ups
    cliffs        off-headline shapes, layouts and options beside eager and a copy, with their bars; only on request
    random_cases  random losses, shapes and layouts, measured like cliffs; only on request

Each section appends to a CSV file, with the GPU, the versions and the commit.

The rivals are eager torch, torch.compile, the formula one torch operation at a time and, if installed, Liger, QuACK and
Cut Cross Entropy. A workload that a rival does not support is reported, and its status records the reason. Compilation
takes most of the time; --providers eager skips it.

Exit code: 0; 1 if one of our losses failed; 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from rich.console import Console

from benchmarking import figures, plot, records, report
from cupylosses.checks import FLOATING
from cupylosses.definition.base import Definition
from cupylosses.definition.registry import registry

CANNOT = 2

SIZES = (10, 14, 17, 20, 22, 24, 26, 28, 30)


def parser() -> argparse.ArgumentParser:
    """The command-line parser."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = list(registry())
    result.add_argument("--loss", nargs="+", choices=every, metavar="NAME", help="these losses (default: all)")
    result.add_argument(
        "--dtype",
        nargs="+",
        choices=FLOATING,
        default=list(figures.DTYPES),
        metavar="NAME",
        help="default: float32 bfloat16",
    )
    result.add_argument("--sizes", type=exponents, help="powers of two, e.g. 20,28 or 10-30")
    result.add_argument(
        "--compile-sizes",
        type=exponents,
        default=(28,),
        help="powers of two at which to time torch.compile; takes seconds per loss, dtype and mode (default: 28)",
    )
    result.add_argument(
        "--mode",
        nargs="+",
        choices=list(figures.MODES),
        default=list(figures.MODES),
        help="modes of throughput",
    )
    result.add_argument(
        "--providers",
        nargs="+",
        choices=figures.RIVALS,
        metavar="NAME",
        help=f"rivals to time, of {', '.join(figures.RIVALS)} (default: all; with --quick those of the figures)",
    )
    result.add_argument("--sections", type=section_names, default=report.DEFAULT, help="comma-separated")
    result.add_argument(
        "--cases",
        nargs="+",
        default=(),
        metavar="TEXT",
        help="of the section cliffs, the cases with one of these in their titles (default: all, in all their dtypes)",
    )
    result.add_argument("--count", type=int, default=400, help="number of random cases (default: 400)")
    result.add_argument(
        "--seed", type=int, default=0, help="seed of random cases: the same one draws the same (default: 0)"
    )
    result.add_argument("--quick", action="store_true", help="only the project's figures")
    result.add_argument(
        "--budget", type=positive, help="seconds after which no measurement begins (default: 600; with --quick 220)"
    )
    result.add_argument("--target", type=positive, default=0.04, help="seconds per measurement and provider (0.04)")
    result.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="directory of the CSV files")
    result.add_argument("--plot", action="store_true", help="measure nothing; draw the newest rows")
    result.add_argument(
        "--picture",
        type=Path,
        default=ROOT / "docs" / "benchmark.png",
        help="file that --plot writes; the distribution of the cliffs is drawn as cliffs.png beside it",
    )
    return result


def chosen_losses(names: Sequence[str] | None) -> list[Definition]:
    """The named losses, or all. Those of the project's figures come first, in case the budget runs out."""
    chosen = [x for name, x in registry().items() if names is None or name in names]
    return sorted(chosen, key=lambda x: x.name not in figures.LOSSES)


def section(name: str) -> Any:
    """The module or object of a section: ``COLUMNS`` lists its columns, and ``measure(run)`` yields its rows."""
    from benchmarking import throughput

    return throughput.sections().get(name) or importlib.import_module(f"benchmarking.{name}")


def exponents(text: str) -> tuple[int, ...]:
    """Parses comma-separated exponents and ranges of them, such as ``10,12`` or ``10-14,20``."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            values = range(int(first), int(last or first) + 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected numbers like 20,28 or 10-30, got {text!r}") from None
        if not values or values[0] < 0 or values[-1] > 33:
            raise argparse.ArgumentTypeError(f"expected powers of two from 0 to 33 in rising order, got {text!r}")
        found += values
    return tuple(dict.fromkeys(found))


def section_names(text: str) -> tuple[str, ...]:
    """Parses comma-separated sections and returns them in the order in which they run."""
    names = text.split(",")
    unknown = [x for x in names if x not in report.TABLES]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {','.join(report.TABLES)}, got {unknown[0]!r}")
    return tuple(x for x in report.TABLES if x in names)


def positive(text: str) -> float:
    """Parses a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
    return value


def why_not() -> str | None:
    """The reason why this machine can measure nothing, or None."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return f"torch is needed: {error}"
    if not torch.cuda.is_available():
        return "an NVIDIA GPU is needed: torch.cuda.is_available() is False. (--plot draws committed rows without one.)"
    try:
        importlib.import_module("cupy")
    except ImportError as error:
        return f"CuPy is needed: {error}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    options = parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 220)
    if options.plot:
        try:
            pictures = plot.draw_all(options.out, options.picture)
        except plot.NothingToDraw as error:
            console.print(f"benchmark.py: {error}", markup=False, soft_wrap=True)
            return CANNOT
        for picture in pictures:
            console.print(f"{picture}", markup=False, soft_wrap=True)
        return 0
    reason = why_not()
    if reason:
        console.print(f"benchmark.py: {reason}", markup=False, soft_wrap=True)
        return CANNOT
    return measure(options, console)


def measure(options: argparse.Namespace, console: Console) -> int:
    """Runs the sections, stores and prints their rows, and compares them with the project's figures."""
    from benchmarking.selection import Run
    from benchmarking.timing import Budget

    # torch warns at every call that kl_div with `mean` is not the divergence; here it is one workload among others.
    warnings.filterwarnings("ignore", message="reduction: 'mean' divides")
    # torch warns of broadcast operands, which some workloads have on purpose.
    warnings.filterwarnings("ignore", message=".*which may not be what you want")
    where = records.environment()
    budget = Budget(options.budget or (220 if options.quick else 600))
    sizes = options.sizes or (figures.SIZES if options.quick else SIZES)
    run = Run(
        chosen_losses(options.loss),
        options.dtype,
        sizes,
        options.compile_sizes,
        options.mode,
        options.providers or (figures.BAR_RIVALS if options.quick else figures.RIVALS),
        options.quick,
        options.target,
        budget,
        lambda what: console.print(f"[{budget.spent:5.1f} s] {what}", markup=False, highlight=False),
        options.cases,
        options.count,
        options.seed,
    )
    console.print(", ".join(f"{k} {v}" for k, v in where.items()), markup=False, highlight=False)
    sections = {name: section(name) for name in options.sections}
    try:
        writers = {name: records.Writer(options.out, name, x.COLUMNS, where) for name, x in sections.items()}
    except ValueError as error:
        console.print(f"benchmark.py: {error}", markup=False, soft_wrap=True)
        return CANNOT
    rows: dict[str, list[records.Row]] = {name: [] for name in sections}
    crashed = False
    for name, measured in sections.items():
        try:
            for row in measured.measure(run):
                writers[name].write(row)
                rows[name].append(row)
        except Exception:
            traceback.print_exc()
            crashed = True
            if not gpu_is_usable():
                break
    for name, found in rows.items():
        if found:
            console.print(report.TABLES[name](found))
    if budget.left_out:
        first, more = budget.left_out[0], len(budget.left_out) - 1
        console.print(f"The budget of {budget.seconds:g} s left out {first} and {more} more.", markup=False)
    if rows.keys() & {x.section for x in figures.BARS}:
        console.print(report.bars(rows))
    failed = failures(rows)
    for row in failed:
        console.print(" ".join(str(v) for v in row.values()), markup=False, highlight=False)
    return 1 if crashed or failed else 0


def gpu_is_usable() -> bool:
    """True if the GPU still responds. After some kernel errors, this process can measure nothing more."""
    torch = importlib.import_module("torch")
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def failures(sections: Mapping[str, Sequence[records.Row]]) -> list[records.Row]:
    """Our rows that failed for a reason other than lack of GPU memory."""
    rows = [r for found in sections.values() for r in found if r.get("provider", figures.OURS) == figures.OURS]
    return [r for r in rows if r["status"] != "ok" and not r["status"].endswith("out of memory")]


if __name__ == "__main__":
    sys.exit(main())
