"""The sweep of ``--accuracy``: each loss, case and dtype over the whole domain, in ulp of a high-precision truth."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table
from tools.accuracy import BAR, Accuracy, Sweep

from comparing import background, files, report
from comparing.report import Column, number
from cupylosses import checks
from cupylosses.definition.registry import registry
from cupylosses.testing import host

#: Arguments of the command line that --accuracy rejects.
OTHERS = ("shape", "reduction", "layout", "compile", "full", "everything", "plot")

LEGEND = (
    "Errors are in units in the last place (ulp) of the result or, where terms cancel, of the arithmetic at the size\n"
    "of these terms; `plain` always uses the former. The truth has at least 64 digits.\n"
    f"Allowed: {BAR:g} ulp, for the value and for each gradient."
)


@dataclass(frozen=True)
class Row:
    """One result of a sweep, as printed and written. ``result`` is ``value``, or ``grad`` and an operand's name."""

    loss: str
    case: str
    dtype: str
    result: str
    points: int | None = None
    over: int | None = None
    ulp: float | None = None
    plain_ulp: float | None = None
    operands: tuple[float, ...] = ()
    got: float | None = None
    expected: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if the result is within the bar at every point."""
        return not self.problems

    def record(self) -> dict[str, Any]:
        """The row as written to the JSON file."""
        return {**asdict(self), "operands": [_shown(x, self.dtype) for x in self.operands], "ok": self.ok}


def obstacle(arguments: Namespace) -> str | None:
    """The reason why the requested sweep is impossible, or None."""
    for name in OTHERS:
        if getattr(arguments, name):
            return f"--accuracy has no --{name}: it takes every point by itself"
    if any(name not in checks.FLOATING for dtypes in arguments.dtype or () for name in dtypes):
        return f"--accuracy takes the dtypes {', '.join(checks.FLOATING)}"
    return None


def sweeps(arguments: Namespace, place: str) -> list[Sweep]:
    """The sweeps of a run: one per loss, case and dtype."""
    dtypes = arguments.dtype or [(name,) for name in checks.FLOATING]
    where: dict[str, Any] = {"device": "cuda" if place == "cuda" else "cpu", "seed": arguments.seed}
    losses = [x for name, x in registry().items() if not arguments.loss or name in arguments.loss]
    return [x for loss in losses for x in Sweep.of(loss).sweeps(loss, dtypes, **where)]


def run(arguments: Namespace, place: str, where: Mapping[str, str], console: Console) -> bool:
    """Measures, prints and writes everything; returns True if all results are within the bar."""
    begin = perf_counter()
    planned = sweeps(arguments, place)
    lines = report.Report(console, columns(planned))
    lines.section(f"accuracy: {len(planned)} sweeps")
    with background.compiling(place, console, len(planned)) as (compiler, progress, measuring):
        if place != "cpu":
            for i, sweep in enumerate(planned):
                compiler.announce(i, partial(_rehearse, sweep))
        for i, sweep in enumerate(planned):
            progress.update(measuring, description=sweep.loss.name)
            compiler.wait(i)
            with host.execution() if place == "host" else nullcontext():
                found = rows(sweep)
            for row in found:
                lines.add(row)
            progress.advance(measuring)
    summary(console, lines.rows, perf_counter() - begin)
    if arguments.json:
        report.write_json(arguments.json, lines.rows, where, vars(arguments))
    if arguments.csv:
        files.write_csv(arguments.csv, [x.record() for x in lines.rows])
    files.name(arguments, console)
    return not report.failures(lines.rows)


def _rehearse(sweep: Sweep) -> object:
    return sweep.results(sweep.operands())


def rows(sweep: Sweep) -> list[Row]:
    """Measures a sweep and returns its rows; an exception becomes a failed row."""
    try:
        found = sweep.measure()
    except Exception as error:
        text = (str(error).strip().splitlines() or ["no message"])[0]
        return [Row(*sweep.words, "-", problems=(f"{type(error).__name__}: {text}",))]
    return [_row(x, sweep) for x in found]


def _row(x: Accuracy, sweep: Sweep) -> Row:
    worst = x.worst
    named = zip(sweep.labels, worst.operands, strict=True)
    at = ", ".join(f"{name} = {value!r}" for name, value in named)
    wrong = f"{x.over} of {x.points} points; at {at}: got {worst.got!r}, expected {worst.expected!r}"
    return Row(
        *sweep.words,
        result=x.result if x.result == "value" else f"grad {x.result}",
        points=x.points,
        over=x.over,
        ulp=worst.ulps,
        plain_ulp=x.plain,
        operands=worst.operands,
        got=worst.got,
        expected=worst.expected,
        problems=() if x.ok else (wrong,),
    )


def columns(planned: Sequence[Sweep]) -> list[Column]:
    """The columns, wide enough for these sweeps."""
    names = [(*x.words, max((f"grad {o.name}" for o in x.loss.operands), key=len)) for x in planned]
    titles = ("loss", "case", "dtype", "result")
    widths = [max(map(len, (title, *words))) for title, words in zip(titles, zip(*names, strict=True), strict=True)]
    named = [
        Column(title, width, lambda r, title=title: getattr(r, title), right=False)  # type: ignore[misc]
        for title, width in zip(titles, widths, strict=True)
    ]
    return [
        *named,
        Column("points", 6, lambda r: "-" if r.points is None else str(r.points)),
        Column("ulp", 7, lambda r: number(r.ulp)),
        Column("plain", 7, lambda r: number(r.plain_ulp)),
        Column("", 4, lambda r: "ok" if r.ok else "OVER", right=False),
        Column("worst at", 8, _at, right=False),
    ]


def _at(row: Row) -> str:
    return "" if not row.ulp else f"({', '.join(_shown(x, row.dtype) for x in row.operands)})"


def _shown(x: float, dtype: str) -> str:
    """The number with enough digits to identify it in its dtype."""
    return f"{x:.17g}" if "float64" in dtype else f"{x:.9g}"


def summary(console: Console, found: Sequence[Row], seconds: float) -> None:
    """Prints one line per loss, and the verdict."""
    table = Table("loss", title="Summary", title_justify="left", box=None, pad_edge=False)
    for title in ("results", "over", "worst value ulp", "worst grad ulp"):
        table.add_column(title, justify="right")
    for loss in dict.fromkeys(r.loss for r in found):
        own = [r for r in found if r.loss == loss]
        worst = [
            max((r.ulp for r in own if r.ulp is not None and (r.result == "value") is value), default=None)
            for value in (True, False)
        ]
        table.add_row(loss, str(len(own)), str(report.failures(own)), *map(number, worst))
    console.print()
    console.print(table)
    failed = report.failures(found)
    verdict = f"all within {BAR:g} ulp" if not failed else f"{failed} are not within {BAR:g} ulp"
    console.print(f"{len(found)} results in {seconds:.1f} s: {verdict}", style="bold red" if failed else "bold green")
