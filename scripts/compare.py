"""Holds every loss against a float64 truth and against PyTorch's own result, on a GPU or, without one, on the CPU.

    python scripts/compare.py                                          everything once; without a GPU, see below
    python scripts/compare.py --full                                   everything with everything
    python scripts/compare.py --loss mse_loss --shape 16384x16384      one loss, where the time means something
    python scripts/compare.py --layout row column --json rows.json     some layouts, and a file for machines
    python scripts/compare.py --accuracy --loss kl_div                 the whole domain, in digits; see below

Without arguments, the losses that stand for all in their structure have every row; the others have enough for each
dtype, set of parameters, reduction and layout to be met. Whatever is asked for has every row. Losses of rows of logits
have rows of each kind of target; their layouts are the ways in which threads take rows: lanes, block, cluster, long,
columns, long_columns, gather.

The first line says what the losses run on. It is the GPU; without one, where a C++ compiler is found, the very kernels
executed on the CPU (--device host); without that, the formulas that CPU tensors take (--device cpu).

Executed on the CPU, each kernel is compiled once, and kept (in ~/.cache/cupylosses/host, or CUPYLOSSES_HOST_CACHE). So
the run without arguments has fewer rows there: few layouts, and of dtypes, reductions and gradients few together. With
--device host it has all, which takes minutes for each loss the first time. With --device cpu it has all and takes three
minutes, but sees no kernel. Neither takes times.

With --accuracy, instead of that, value and gradient of every loss, case and dtype are held against a truth of at least
64 digits, at some thousand points all over the domain; more than 4 units in the last place fail.

Exits with 0 if all is well, 1 if a row failed, 2 if it could not begin. Needs the extras `torch` and `scripts`, and on
a GPU CuPy.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    import torch
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from comparing import accuracy, ahead, bits, hosted, matrix, report, row_matrix
    from comparing.rows import AnyCheck, Row, accuracy_and_time, guarded, rehearse
except ModuleNotFoundError as error:
    print(f'compare.py needs {error.name}; install what is missing with `pip install "cupylosses[torch,scripts]"`, or '
          "from a checkout `pip install numpy array-api-compat torch rich mpmath`.", file=sys.stderr)  # fmt: skip
    sys.exit(2)

from cupylosses import checks, interop
from cupylosses.definition import REDUCTIONS, registry
from cupylosses.row_definition import row_registry
from cupylosses.testing import host
from cupylosses.testing.check import EDGES
from cupylosses.testing.layouts import LAYOUTS, SHAPE, Shape
from cupylosses.testing.row_check import ROW_LAYOUTS

#: The title of the rows of losses of rows.
OF_ROWS = "rows of logits"

#: The CPU executes a launch of so many elements in 0.2 s and more, and a row takes several.
HOST_ELEMENTS = 1 << 20


class Section(NamedTuple):
    """Checks, what makes a row of one, and where that runs kernels, what makes the same calls."""

    title: str
    checks: Sequence[AnyCheck]
    measure: Callable[[AnyCheck], Row]
    calls: Callable[[AnyCheck], object] | None = None


def main() -> int:
    arguments, parser = parse()
    hosted.choose_sanitizers()
    place, why = find_place(arguments.device, arguments.shape or SHAPE, parser)
    if arguments.compile and place != "cuda":
        parser.error("--compile times torch.compile on a GPU, and there is none here")
    if arguments.accuracy:
        return accurate(arguments, place, why, parser)
    sections = planned(arguments, place)
    names = [(check.loss.name, *check.words) for section in sections for check in section.checks]
    if not names:
        parser.error("nothing to do: no loss has this combination of dtype, reduction, layout and shape")

    console = Console(soft_wrap=True)
    where = report.environment(place)
    console.print(first_line(place, why, where), style="bold", highlight=False)
    console.print(report.legend(), style="dim", highlight=False)
    # Torch warns of broadcasting and of its own `mean`, and so does the library.
    warnings.simplefilter("ignore", UserWarning)
    if not arguments.shape:
        # A few thousand elements are done before a second thread has woken up, and cores may be shared.
        torch.set_num_threads(1)

    begin = perf_counter()
    warm_up(next(check for section in sections for check in section.checks))
    if place != "cpu":
        prepare(sections, arguments, console, place)
    lines = report.Report(console, report.columns(names, arguments.compile))
    alive = run(sections, lines, console)
    lines.summary(perf_counter() - begin)
    if place == "host":
        console.print(f"{host.counters}", highlight=False)
    if arguments.json:
        report.write_json(arguments.json, lines.rows, where, vars(arguments))
        console.print(f"written to {arguments.json}", highlight=False)
    return 0 if alive and not report.failures(lines.rows) else 1


def accurate(arguments: argparse.Namespace, place: str, why: str, parser: argparse.ArgumentParser) -> int:
    """The run with --accuracy."""
    obstacle = accuracy.obstacle(arguments)
    if obstacle:
        parser.error(obstacle)
    console = Console(soft_wrap=True)
    where = report.environment(place)
    console.print(first_line(place, why, where), style="bold", highlight=False)
    console.print(accuracy.LEGEND, style="dim", highlight=False)
    return 0 if accuracy.run(arguments, place, where, console) else 1


def warm_up(check: AnyCheck) -> None:
    """Lets torch import what it imports when it is first used, and keeps the garbage collector from looking at it.

    Each timing begins with a collection, which would otherwise take longer than the check.
    """
    guarded("", check.small(), partial(accuracy_and_time, compile=False))
    gc.collect()
    gc.freeze()


def prepare(sections: Sequence[Section], arguments: argparse.Namespace, console: Console, place: str) -> None:
    """Compiles the kernels of all rows."""
    calls = ((check, x.calls) for x in sections if x.calls for check in x.checks)
    gpu = place == "cuda"
    kernels = ahead.needed(calls, gpu)
    begin = perf_counter()
    rows = "A part of the rows; --device host has all" if few(arguments, place) else "All rows"
    about = "" if gpu else f"{rows}. "
    console.print(f"{about}Compiling what is new of their {len(kernels)} kernels ...", style="dim", highlight=False)
    ahead.compile_all(kernels, console, gpu)
    if gpu:
        console.print(f"... which took {perf_counter() - begin:.1f} s.", style="dim", highlight=False)


def run(sections: Sequence[Section], lines: report.Report, console: Console) -> bool:
    """Performs all checks; False if the GPU died on the way."""
    count = sum(len(section.checks) for section in sections)
    bar = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("checking", total=count)
        for name, found, measure, _ in sections:
            if found:
                lines.section(f"{name}: {len(found)} rows")
            for check in found:
                progress.update(task, description=check.loss.name)
                try:
                    lines.add(guarded(name, check, measure))
                except RuntimeError as error:
                    console.print(f"stopped at {check.id}: {error}", style="bold red")
                    return False
                progress.advance(task)
    return True


def asked(arguments: argparse.Namespace) -> bool:
    """Whether something in particular was asked for."""
    return any((arguments.loss, arguments.dtype, arguments.reduction, arguments.layout, arguments.full))


def few(arguments: argparse.Namespace, place: str) -> bool:
    """Whether only some rows of a loss run: where kernels are dear."""
    return place == "host" and arguments.device == "auto" and not asked(arguments)


def planned(arguments: argparse.Namespace, place: str) -> list[Section]:
    """The sections of the run: errors and times, same bits, other array libraries."""
    selection = matrix.Selection(
        losses=[loss for name, loss in registry().items() if wanted(name, arguments)],
        row_losses=[loss for name, loss in row_registry().items() if wanted(name, arguments)],
        shape=arguments.shape or SHAPE,
        shape_given=bool(arguments.shape),
        device="cuda" if place == "cuda" else "cpu",
        dtypes=arguments.dtype,
        reductions=arguments.reduction,
        layouts=arguments.layout,
        seed=arguments.seed,
        full=arguments.full,
        few=few(arguments, place),
        covered=few(arguments, place) or (place == "cuda" and not asked(arguments)),
    )
    measure = partial(accuracy_and_time, compile=arguments.compile)
    sections = [
        Section("losses", matrix.checks(selection), measure, rehearse),
        Section(OF_ROWS, row_matrix.checks(selection), partial(measure, section=OF_ROWS), rehearse),
    ]
    if not arguments.layout:
        repeated = [*bits.repeated_checks(selection, bool(arguments.shape)), *row_matrix.repeated_checks(selection)]
        sections.append(Section(bits.REPEATED, repeated, bits.repeated, bits.repeated))
    if place == "host":
        sections = [x._replace(measure=hosted.executed(x.measure)) for x in sections]
    if not arguments.layout:
        # NumPy arrays take the formulas everywhere.
        sections.append(Section(bits.section(selection.device), list(bits.array_checks(selection)), bits.arrays))
    return sections


def wanted(name: str, arguments: argparse.Namespace) -> bool:
    """Whether a loss is to be compared."""
    return not arguments.loss or name in arguments.loss


def find_place(wanted: str, shape: Shape, parser: argparse.ArgumentParser) -> tuple[str, str]:
    """``cuda``, ``host`` or ``cpu``, and why; ends the run where what is asked for cannot be used."""
    if wanted == "cpu":
        return "cpu", "Asked for the CPU"
    if wanted == "host" or (wanted == "auto" and not torch.cuda.is_available()):
        obstacle = host.obstacle()
        if wanted == "auto" and prod(shape) > HOST_ELEMENTS:
            obstacle = "the shape is large for kernels on the CPU (--device host insists)"
        if wanted == "host":
            if obstacle:
                parser.error(f"{obstacle}; install g++ or clang++, set CXX, or use --device cpu")
            return "host", "Asked for the host"
        return ("cpu", f"No GPU found, and {obstacle}") if obstacle else ("host", "No GPU found, but a C++ compiler")
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        parser.error(f"torch {torch.__version__} (built {built}) finds no GPU; see `nvidia-smi`, or use --device cpu")
    try:
        interop.cupy()
    except ImportError as error:
        parser.error(str(error))
    return "cuda", "Found a GPU"


def first_line(place: str, why: str, where: dict[str, str]) -> str:
    """What the run is about."""
    if place == "cuda":
        return "{gpu}, driver {driver}, torch {torch} for CUDA {cuda}, CuPy {cupy}".format(**where)
    if place == "host":
        return f"{why}: executing the kernels on the CPU, compiled by {where['compiler']}, on small shapes"
    return f"{why}: validating the CPU path (torch tensors and NumPy arrays) on small shapes"


def parse() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = list(dict.fromkeys(r for loss in registry().values() for r in (*REDUCTIONS, *loss.reductions)))
    losses = [*registry(), *row_registry()]
    parser.add_argument("--loss", nargs="+", choices=losses, metavar="NAME", help="losses (default: all)")
    parser.add_argument(
        "--dtype", nargs="+", type=dtypes, metavar="DTYPE", help="float32, or one per operand: bfloat16+float32"
    )
    parser.add_argument("--shape", type=shape, metavar="NxM", help=f"default {'x'.join(map(str, SHAPE))}")
    parser.add_argument("--reduction", nargs="+", choices=every, help="default: all that a loss has")
    layouts = [*LAYOUTS, EDGES, *ROW_LAYOUTS]
    parser.add_argument("--layout", nargs="+", choices=layouts, metavar="NAME", help=f"of {', '.join(layouts)}")
    parser.add_argument("--device", choices=("auto", "cuda", "host", "cpu"), default="auto", help="see above")
    parser.add_argument("--accuracy", action="store_true", help="the accuracy over the whole domain instead; see above")
    parser.add_argument("--compile", action="store_true", help="time torch.compile, too; seconds per row")
    parser.add_argument(
        "--full",
        action="store_true",
        help="every case, dtype, reduction and layout with each other (without a GPU: add --device cpu)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random operands")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to a file")
    return parser.parse_args(), parser


def dtypes(text: str) -> tuple[str, ...]:
    """``bfloat16+float32`` as a tuple."""
    names = tuple(text.split("+"))
    for name in names:
        if name not in (*checks.FLOATING, *checks.INTEGER):
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join((*checks.FLOATING, *checks.INTEGER))}")
    return names


def shape(text: str) -> tuple[int, ...]:
    """``4096x4096`` as a tuple."""
    try:
        sizes = tuple(int(n) for n in text.split("x"))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 4096x4096")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
