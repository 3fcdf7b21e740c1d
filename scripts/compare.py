"""Compare every loss with a float64 truth and with PyTorch's own result, on a GPU or, if there is none, on the CPU.

    python scripts/compare.py                                          one line per loss, in a minute
    python scripts/compare.py --loss mse_loss --plot mse.png           some losses, and a picture
    python scripts/compare.py --full                                   one line per check
    python scripts/compare.py --loss mse_loss --shape 16384x16384      the checks of one loss, on one shape
    python scripts/compare.py --layout row column --json rows.json     some layouts, and a file for machines
    python scripts/compare.py --accuracy --loss kl_div                 the whole domain, in digits; see below

Each line reports the worst error of the value and of the gradients, beside torch's. On a GPU, it also reports the time
and memory of forward and backward, beside torch's, and the speed as a fraction of a copy's. A line sums up a few checks
that share their kernels: float32 and bfloat16, every reduction, parameter and flag, the edges of the domain, a
broadcast operand, bitwise equality of a second run, and NumPy or CuPy arrays. docs/checking.md has the list.

With --full, or if you choose a dtype, reduction, layout or shape, each check has its own line. --full runs every check
of the representative losses, and enough checks of the others to cover each dtype, set of parameters, reduction and
layout. Any selection that you name runs in full, and --everything runs the full product. Losses of rows of logits have
checks for each kind of target; their layouts are the ways to assign threads to rows: subwarp, block, cluster, two_pass,
windowed, thread_per_row_packed, thread_per_row, packed_rows, columns, copied, label_only_rows, label_only_tiles,
label_only_few, label_only_columns.

The first line of output names the device: the GPU; without a GPU but with a C++ compiler, the CPU executing the same
kernels (--device host); otherwise the CPU with the formulas that CPU tensors use (--device cpu).

Kernels compile in the background while checks run. Kernels for the CPU are compiled once and cached, in
~/.cache/cupylosses/host or CUPYLOSSES_HOST_CACHE. Since compilation is slow there, --full without a GPU runs fewer
checks: few layouts, and few combinations of dtypes, reductions and gradients. --device host runs all checks, which
takes minutes per loss the first time. --device cpu runs all checks in three minutes, but no kernel. Neither measures
time.

--accuracy instead compares the value and gradients of every loss, case and dtype with a truth of at least 64 digits, at
some thousand points over the whole domain; an error of more than 4 units in the last place fails.

Exits with 0 on success, 1 if a row failed, and 2 if it could not start. Needs the extras `torch` and `scripts`, and
CuPy on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

try:
    import torch
    from rich.console import Console

    from comparing import accuracy, background, bits, files, hosted, overview, report
    from comparing.background import BackgroundCompiler
    from comparing.matrix import Matrix, Selection
    from comparing.overview import Line, Task
    from comparing.table import Row, accuracy_and_time, first_line_of, guarded, rehearse
except ModuleNotFoundError as error:
    print(f'compare.py needs {error.name}; install what is missing with `pip install "cupylosses[torch,scripts]"`, or '
          "from a checkout `pip install numpy array-api-compat torch rich mpmath`.", file=sys.stderr)  # fmt: skip
    sys.exit(2)

from cupylosses import checks, interop
from cupylosses.definition.base import REDUCTIONS, Definition
from cupylosses.definition.registry import registry
from cupylosses.testing import host
from cupylosses.testing.check import Check
from cupylosses.testing.layouts import SHAPE, Shape

#: Number of elements above which kernels do not run on the CPU by default. A launch of this many takes at least 0.2 s
#: there, and a check needs several launches.
HOST_ELEMENTS = 1 << 20

#: Width of the output if stdout is not a terminal.
WIDTH = 160


class Section(NamedTuple):
    """Checks of one section.

    ``measure`` turns a check into a row. ``calls`` makes only the library calls of a check, to find the kernels to
    compile in advance; None if there are none to find.
    """

    title: str
    checks: Sequence[Check]
    measure: Callable[[Check], Row]
    calls: Callable[[Check], object] | None = None


def main() -> int:
    arguments, parser = parse()
    begin = perf_counter()
    place, why = find_place(arguments.device, arguments.shape or SHAPE, parser)
    if arguments.compile and place != "cuda":
        parser.error("--compile times torch.compile on a GPU, and there is none here")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: `pip install matplotlib`")
    if arguments.accuracy:
        return accurate(arguments, place, why, parser)
    with undisturbed(one_thread=not arguments.shape):
        if detailed(arguments):
            return every_row(arguments, place, why, parser)
        return every_loss(arguments, place, why, begin)


@contextmanager
def undisturbed(one_thread: bool) -> Iterator[None]:
    """Silences user warnings and, with ``one_thread``, restricts torch to one CPU thread."""
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        # torch warns of broadcast operands and of its own `mean` of kl_div, and so does the library.
        warnings.simplefilter("ignore", UserWarning)
        if one_thread:
            # A few thousand elements are finished before a second thread wakes up, and cores may be shared.
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


# ----------------------------------------------------------------------------------------------------------------------
# One line per loss


def every_loss(arguments: argparse.Namespace, place: str, why: str, begin: float) -> int:
    """Runs the comparison with one line per loss; returns the exit code."""
    console = output()
    where = report.environment(place)
    console.print(first_line(place, why, where), style="bold", highlight=False)
    if missing := without_arrays(place, wanted(arguments)):
        console.print(missing, style="dim", highlight=False)
    device = "cuda" if place == "cuda" else "cpu"
    losses = wanted(arguments)
    tasks = [task for x in losses for task in overview.tasks(x, device, arguments.seed)]
    workloads = {x.name: speed().workload(x, free_memory()) for x in losses} if place == "cuda" else {}
    rows: dict[str, list[Row]] = {}
    times: dict[str, Mapping[str, Any]] = {}
    alive = True
    try:
        check_and_time(tasks, workloads, place, console, rows, times)
    except Exception as error:
        console.print(stopped(error), style="bold red", highlight=False, markup=False)
        alive = False

    lines = [overview.line(name, found, times.get(name)) for name, found in rows.items()]
    for section in dict.fromkeys(x.section for x in lines):
        of_section = [x.loss for x in lines if x.section == section and x.loss in workloads]
        timed = speed().described(workloads[of_section[0]]) if of_section else None
        console.print()
        # Leave wrapping to a narrow terminal, because rich would truncate cells.
        Console(width=max(console.width, WIDTH)).print(overview.table(lines, section, timed), soft_wrap=True)
    console.print(overview.legend(place == "cuda"), style="dim", highlight=False)
    every = [r for found in rows.values() for r in found]
    for text in overview.details(every):
        console.print(text, style="red", highlight=False, markup=False)
    if arguments.json:
        report.write_json(arguments.json, every, where, vars(arguments), [x.record() for x in lines])
    if lines:
        files.write(arguments, lines, where, console)
    console.print(verdict(lines, every, perf_counter() - begin, alive), highlight=False)
    return 0 if alive and not report.failures(every) else 1


def check_and_time(
    tasks: Sequence[Task],
    workloads: Mapping[str, Any],
    place: str,
    console: Console,
    rows: dict[str, list[Row]],
    times: dict[str, Mapping[str, Any]],
) -> None:
    """Fills ``rows`` and ``times``, keyed by loss name. The caller keeps what they hold if an error ends the run."""
    with background.compiling(place, console, len(tasks) + len(workloads)) as (compiler, progress, checking):
        for i, task in enumerate(tasks):
            if task.calls and place != "cpu":
                compiler.announce(i, partial(task.calls, task.check))
        for name, found in workloads.items():
            compiler.announce(name, partial(speed().calls, found))
        warm_up(tasks[0].check)
        for i, task in enumerate(tasks):
            progress.update(checking, description=task.check.loss.name)
            done = perform(task, place, compiler, i)
            rows.setdefault(done.loss, []).append(done)
            progress.advance(checking)
        # Measure time last, when no kernel compiles any more.
        for name in workloads:
            compiler.wait(name)
        quick_collections()
        for name, found in workloads.items():
            progress.update(checking, description=f"{name}: time")
            times[name], problems = speed().measure(found)
            rows[name] += [speed_row(rows[name][0], problems)] if problems else []
            progress.advance(checking)


def perform(task: Task, place: str, compiler: BackgroundCompiler, key: int) -> Row:
    """Waits for the kernels of a task, performs its check, and returns the row."""

    def measure(check: Check) -> Row:
        compiler.wait(key)
        on_host = place == "host" and task.calls is not None
        return (hosted.executed(task.measure) if on_host else task.measure)(check)

    return guarded(task.section, task.check, measure)


def stopped(error: Exception, where: str = "") -> str:
    """Describes an error that ends the run, in one line: CUDA's messages have many."""
    kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    return f"stopped{where}: {kind}{first_line_of(error)}"


def speed_row(like: Row, problems: Sequence[str]) -> Row:
    """A failed row for times that could not be measured; ``like`` is another row of the loss."""
    return Row("time", like.loss, "defaults", "-", "-", "contiguous", "-", problems=tuple(problems))


def verdict(lines: Sequence[Line], rows: Sequence[Row], seconds: float, complete: bool) -> str:
    """One line that sums up the run."""
    failed = [x.loss for x in lines if not x.ok]
    counts = f"{len(lines)} losses, {len(rows)} checks in {seconds:.0f} s"
    ends = [f"{report.failures(rows)} checks failed, of {', '.join(failed)}"] if failed else []
    ends += [] if complete else ["stopped before the end"]
    return f"[bold red]{counts}: {'; '.join(ends)}" if ends else f"[bold green]{counts}: all ok"


def speed() -> Any:
    """The module `comparing.speed`, imported on first use because it needs a GPU."""
    from comparing import speed

    return speed


def free_memory() -> int:
    """Free bytes of the GPU."""
    return torch.cuda.mem_get_info()[0]


# ----------------------------------------------------------------------------------------------------------------------
# One line per check


def every_row(arguments: argparse.Namespace, place: str, why: str, parser: argparse.ArgumentParser) -> int:
    """Runs the comparison with one line per check; returns the exit code."""
    sections = planned(arguments, place)
    names = [(check.loss.name, *check.words) for section in sections for check in section.checks]
    if not names:
        parser.error("nothing to do: no loss has this combination of dtype, reduction, layout and shape")
    console = output()
    where = report.environment(place)
    console.print(first_line(place, why, where), style="bold", highlight=False)
    if missing := without_arrays(place, wanted(arguments)):
        console.print(missing, style="dim", highlight=False)
    console.print(report.legend(), style="dim", highlight=False)
    if place == "host":
        rows = "A part of the rows; --device host has all" if few(arguments, place) else "All rows"
        console.print(f"{rows}.", style="dim", highlight=False)

    begin = perf_counter()
    warm_up(next(check for section in sections for check in section.checks))
    lines = report.Report(console, report.columns(names, arguments.compile))
    alive = run(sections, lines, console, place)
    lines.summary(perf_counter() - begin)
    if place == "host":
        console.print(f"{host.counters}", highlight=False)
    if arguments.json:
        report.write_json(arguments.json, lines.rows, where, vars(arguments))
    by_loss = {r.loss: [x for x in lines.rows if x.loss == r.loss] for r in lines.rows}
    files.write(arguments, [overview.line(name, found) for name, found in by_loss.items()], where, console, lines.rows)
    return 0 if alive and not report.failures(lines.rows) else 1


def run(sections: Sequence[Section], lines: report.Report, console: Console, place: str) -> bool:
    """Performs all checks; returns False if an error that the GPU does not survive ends the run."""
    count = sum(len(section.checks) for section in sections)
    with background.compiling(place, console, count) as (compiler, progress, checking):
        for section in sections:
            for check in section.checks:
                if section.calls and place != "cpu":
                    compiler.announce((section.title, check.id), partial(section.calls, check))
        for title, found, measure, calls in sections:
            if found:
                lines.section(f"{title}: {len(found)} rows")
            for check in found:
                progress.update(checking, description=check.loss.name)
                task = Task(check, title, measure, calls)
                try:
                    lines.add(perform(task, place, compiler, (title, check.id)))
                except Exception as error:
                    console.print(stopped(error, f" at {check.id}"), style="bold red", highlight=False, markup=False)
                    return False
                progress.advance(checking)
    return True


def accurate(arguments: argparse.Namespace, place: str, why: str, parser: argparse.ArgumentParser) -> int:
    """Runs the sweep of --accuracy; returns the exit code."""
    obstacle = accuracy.obstacle(arguments)
    if obstacle:
        parser.error(obstacle)
    console = output()
    where = report.environment(place)
    console.print(first_line(place, why, where), style="bold", highlight=False)
    console.print(accuracy.LEGEND, style="dim", highlight=False)
    return 0 if accuracy.run(arguments, place, where, console) else 1


def output() -> Console:
    """The console for all output."""
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)


def warm_up(check: Check) -> None:
    """Performs a small check once, so that torch imports its lazy modules before anything is measured."""
    guarded("", check.small(), accuracy_and_time)
    quick_collections()


def quick_collections() -> None:
    """Freezes all live objects, so that later garbage collections skip them.

    Each timing begins with a collection, which would otherwise take longer than the measurement.
    """
    gc.collect()
    gc.freeze()


def detailed(arguments: argparse.Namespace) -> bool:
    """True if each check gets its own line."""
    given = (arguments.dtype, arguments.reduction, arguments.layout, arguments.shape, arguments.compile)
    return any((*given, arguments.full, arguments.everything))


def asked(arguments: argparse.Namespace) -> bool:
    """True if the command line selects losses, dtypes, reductions or layouts, or everything."""
    return any((arguments.loss, arguments.dtype, arguments.reduction, arguments.layout, arguments.everything))


def few(arguments: argparse.Namespace, place: str) -> bool:
    """True if only a few checks of each loss run, because kernels must be compiled for the CPU."""
    return place == "host" and arguments.device == "auto" and not asked(arguments)


def planned(arguments: argparse.Namespace, place: str) -> list[Section]:
    """The sections of a run with one line per check: errors and times, repeated runs, arrays of other libraries."""
    selection = Selection(
        device="cuda" if place == "cuda" else "cpu",
        shape=arguments.shape,
        dtypes=arguments.dtype,
        reductions=arguments.reduction,
        layouts=arguments.layout,
        seed=arguments.seed,
        full=arguments.everything,
        few=few(arguments, place),
        covered=few(arguments, place) or (place == "cuda" and not asked(arguments)),
    )
    matrices = [Matrix(loss, selection) for loss in wanted(arguments)]
    measure = partial(accuracy_and_time, compile=arguments.compile)
    sections = []
    for title in dict.fromkeys(x.section for x in matrices):
        found = [check for x in matrices if x.section == title for check in x.checks()]
        sections.append(Section(title, found, partial(measure, section=title), rehearse))
    if not arguments.layout:
        repeated = [check for x in matrices for check in x.repeated()]
        sections.append(Section(bits.REPEATED, repeated, bits.repeated, bits.repeated))
        # NumPy arrays use the formulas, never the kernels, so this section has no ``calls``.
        crossing = [check for x in matrices for check in x.arrays() if bits.crosses(check)]
        sections.append(Section(bits.section(selection.device), crossing, bits.arrays))
    return sections


def wanted(arguments: argparse.Namespace) -> list[Definition]:
    """The losses that the command line selects; by default all."""
    return [x for name, x in registry().items() if not arguments.loss or name in arguments.loss]


def find_place(wanted: str, shape: Shape, parser: argparse.ArgumentParser) -> tuple[str, str]:
    """Returns ``cuda``, ``host`` or ``cpu``, and the reason; exits if the requested device cannot be used."""
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


def without_arrays(place: str, losses: Sequence[Definition]) -> str:
    """A line that names the losses not compared as CuPy arrays, because cuBLAS is missing; empty if there are none."""
    reason = bits.without_products("cuda") if place == "cuda" else ""
    found = [x.name for x in losses if reason and any(c.multiplies for c in Matrix(x, Selection("cpu")).plain())]
    return f"Not compared as CuPy arrays: {', '.join(found)}. {reason}" if found else ""


def first_line(place: str, why: str, where: dict[str, str]) -> str:
    """The first line of output: the GPU and versions, or the device and the reason for it."""
    if place == "cuda":
        return "{gpu}, driver {driver}, torch {torch} for CUDA {cuda}, CuPy {cupy}".format(**where)
    if place == "host":
        return f"{why}: executing the kernels on the CPU, compiled by {where['compiler']}, on small shapes"
    return f"{why}: validating the CPU path (torch tensors and NumPy arrays) on small shapes"


def parse() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = list(dict.fromkeys(r for loss in registry().values() for r in (*REDUCTIONS, *loss.reductions)))
    losses = list(registry())
    parser.add_argument("--loss", nargs="+", choices=losses, metavar="NAME", help="these losses (default: all)")
    parser.add_argument(
        "--dtype", nargs="+", type=dtypes, metavar="DTYPE", help="float32, or one per operand: bfloat16+float32"
    )
    parser.add_argument("--shape", type=shape, metavar="NxM", help=f"default {'x'.join(map(str, SHAPE))}")
    parser.add_argument("--reduction", nargs="+", choices=every, help="default: all of a loss")
    layouts = [x for matrix in Matrix.classes() for x in matrix.layouts]
    parser.add_argument("--layout", nargs="+", choices=layouts, metavar="NAME", help=f"any of {', '.join(layouts)}")
    parser.add_argument("--device", choices=("auto", "cuda", "host", "cpu"), default="auto", help="see above")
    parser.add_argument("--full", action="store_true", help="one line per check, and many more checks")
    parser.add_argument(
        "--everything",
        action="store_true",
        help="every combination of case, dtype, reduction and layout (without a GPU: add --device cpu)",
    )
    parser.add_argument("--accuracy", action="store_true", help="measure accuracy over the whole domain; see above")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile; takes seconds per row")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random operands")
    parser.add_argument("--csv", type=new_file, metavar="FILE", help="write the table to a file")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write every check and the environment to a file")
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="draw error and speed by loss (PNG)")
    return parser.parse_args(), parser


def dtypes(text: str) -> tuple[str, ...]:
    """Parses dtypes such as ``bfloat16+float32``."""
    names = tuple(text.split("+"))
    for name in names:
        if name not in (*checks.FLOATING, *checks.INTEGER):
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join((*checks.FLOATING, *checks.INTEGER))}")
    return names


def shape(text: str) -> tuple[int, ...]:
    """Parses a shape such as ``4096x4096``."""
    try:
        sizes = tuple(int(n) for n in text.split("x"))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 4096x4096")
    return sizes


def new_file(text: str) -> Path:
    """Parses the path of an output file; rejects a missing folder now, because a failure later loses the results."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder, or in none that exists")
    return path


def leave(status: int) -> NoReturn:
    """Ends the process.

    If the GPU no longer responds, skips Python's shutdown, which would print an error for each kernel that cannot be
    unloaded.
    """
    dead = False
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            dead = True
    if dead:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    leave(main())
