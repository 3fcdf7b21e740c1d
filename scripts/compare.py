"""Holds every loss against a float64 truth and against PyTorch's own result, on a GPU or, without one, on the CPU.

    python scripts/compare.py                                          everything once
    python scripts/compare.py --full                                   everything with everything
    python scripts/compare.py --loss mse_loss --shape 16384x16384      one loss, where the time means something
    python scripts/compare.py --layout row column --json rows.json     some layouts, and a file for machines

Exits with 0 if all is well, 1 if a row failed, 2 if it could not begin. Needs the extras `torch` and `scripts`, and on
a GPU CuPy.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    import torch
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from comparing import bits, matrix, report
    from comparing.rows import Row, accuracy_and_time, guarded
except ModuleNotFoundError as error:
    print(f'compare.py needs {error.name}; install what is missing with `pip install "cupylosses[torch,scripts]"`, or '
          "from a checkout `pip install numpy array-api-compat torch rich`.", file=sys.stderr)  # fmt: skip
    sys.exit(2)

from cupylosses import checks, interop
from cupylosses.definition import REDUCTIONS, registry
from cupylosses.testing.check import EDGES, Check
from cupylosses.testing.layouts import LAYOUTS, SHAPE

Section = tuple[str, list[Check], Callable[[Check], Row]]


def main() -> int:
    arguments, parser = parse()
    device = find_device(arguments.device, parser)
    if arguments.compile and device == "cpu":
        parser.error("--compile times torch.compile on a GPU, and there is none here")
    sections = planned(arguments, device)
    names = [(check.loss.name, *check.words) for _, found, _ in sections for check in found]
    if not names:
        parser.error("nothing to do: no loss has this combination of dtype, reduction, layout and shape")

    console = Console(soft_wrap=True)
    where = report.environment(device)
    console.print(first_line(device, where), style="bold", highlight=False)
    console.print(report.legend(), style="dim", highlight=False)
    # Torch warns of broadcasting and of its own `mean`, and so does the library.
    warnings.simplefilter("ignore", UserWarning)
    if not arguments.shape:
        # A few thousand elements are done before a second thread has woken up, and cores may be shared.
        torch.set_num_threads(1)

    begin = perf_counter()
    warm_up(next(check for _, found, _ in sections for check in found))
    lines = report.Report(console, report.columns(names, arguments.compile))
    alive = run(sections, lines, console)
    lines.summary(perf_counter() - begin)
    if arguments.json:
        report.write_json(arguments.json, lines.rows, where, vars(arguments))
        console.print(f"written to {arguments.json}", highlight=False)
    return 0 if alive and not report.failures(lines.rows) else 1


def warm_up(check: Check) -> None:
    """Lets torch import what it imports when it is first used, and keeps the garbage collector from looking at it.

    Each timing begins with a collection, which would otherwise take longer than the check.
    """
    guarded("", replace(check, shape=SHAPE), partial(accuracy_and_time, compile=False))
    gc.collect()
    gc.freeze()


def run(sections: Sequence[Section], lines: report.Report, console: Console) -> bool:
    """Performs all checks; False if the GPU died on the way."""
    count = sum(len(found) for _, found, _ in sections)
    bar = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("checking", total=count)
        for name, found, measure in sections:
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


def planned(arguments: argparse.Namespace, device: str) -> list[Section]:
    """The sections of the run: errors and times, same bits, other array libraries."""
    selection = matrix.Selection(
        losses=[registry()[name] for name in arguments.loss or registry()],
        shape=arguments.shape or SHAPE,
        device=device,
        dtypes=arguments.dtype,
        reductions=arguments.reduction,
        layouts=arguments.layout,
        seed=arguments.seed,
        full=arguments.full,
    )
    accuracy = partial(accuracy_and_time, compile=arguments.compile)
    sections: list[Section] = [("losses", matrix.checks(selection), accuracy)]
    if not arguments.layout:
        sections.append((bits.REPEATED, list(bits.repeated_checks(selection, bool(arguments.shape))), bits.repeated))
        sections.append((bits.section(device), list(bits.array_checks(selection)), bits.arrays))
    return sections


def find_device(wanted: str, parser: argparse.ArgumentParser) -> str:
    """``cuda`` or ``cpu``; ends the run where a GPU is asked for and cannot be used."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        parser.error(f"torch {torch.__version__} (built {built}) finds no GPU; see `nvidia-smi`, or use --device cpu")
    try:
        interop.cupy()
    except ImportError as error:
        parser.error(str(error))
    return "cuda"


def first_line(device: str, where: dict[str, str]) -> str:
    """What the run is about."""
    if device != "cpu":
        return "{gpu}, driver {driver}, torch {torch} for CUDA {cuda}, CuPy {cupy}".format(**where)
    why = "Asked for the CPU" if torch.cuda.is_available() else "No GPU found"
    return f"{why}: validating the CPU path (torch tensors and NumPy arrays) on small shapes"


def parse() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = list(dict.fromkeys(r for loss in registry().values() for r in (*REDUCTIONS, *loss.reductions)))
    parser.add_argument("--loss", nargs="+", choices=list(registry()), metavar="NAME", help="losses (default: all)")
    parser.add_argument(
        "--dtype", nargs="+", type=dtypes, metavar="DTYPE", help="float32, or one per operand: bfloat16+float32"
    )
    parser.add_argument("--shape", type=shape, metavar="NxM", help=f"default {'x'.join(map(str, SHAPE))}")
    parser.add_argument("--reduction", nargs="+", choices=every, help="default: all that a loss has")
    parser.add_argument(
        "--layout", nargs="+", choices=[*LAYOUTS, EDGES], metavar="NAME", help=f"of {', '.join([*LAYOUTS, EDGES])}"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--compile", action="store_true", help="time torch.compile, too; seconds per row")
    parser.add_argument("--full", action="store_true", help="every case, dtype, reduction and layout with each other")
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
