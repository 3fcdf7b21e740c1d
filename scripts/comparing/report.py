"""Printing of rows and their summary, and the JSON file."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import cupylosses
from benchmarking.records import environment as gpu_environment
from comparing.table import Row
from cupylosses.testing import host
from cupylosses.testing.tolerance import TABLE


def number(x: float | None) -> str:
    """A number with two or three significant digits, or a dash for None."""
    if x is None:
        return "-"
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    return f"{x:.1e}" if x >= 1e4 or x < 1e-3 else f"{x:.3g}"


@dataclass(frozen=True)
class Column:
    """A column: its title, its width, and a function that returns a row's cell. ``right`` aligns cells to the right."""

    title: str
    width: int
    cell: Callable[[Row], str]
    right: bool = True

    def pad(self, text: str) -> str:
        """The text padded to the width of the column."""
        return text.rjust(self.width) if self.right else text.ljust(self.width)


def columns(rows: Sequence[Sequence[str]], compile: bool) -> list[Column]:
    """The columns. The first ones fit ``rows``, the words that name each check of the run."""
    titles = ("loss", "case", "dtype", "reduction", "layout", "gradients")
    fields = ("loss", "case", "dtype", "reduction", "layout", "gradients")
    widths = [max(map(len, (title, *words))) for title, words in zip(titles, zip(*rows, strict=True), strict=True)]
    named = [
        Column(title, width, lambda r, field=field: getattr(r, field), right=False)  # type: ignore[misc]
        for title, width, field in zip(titles, widths, fields, strict=True)
    ]
    speed = [Column("compile ms", 10, lambda r: number(r.compile_ms))] if compile else []
    return [
        *named,
        Column("value ulp", 9, lambda r: number(r.value_ulp)),
        Column("torch", 7, lambda r: number(r.torch_value_ulp)),
        Column("grad ulp", 8, lambda r: number(r.gradient_ulp)),
        Column("torch", 7, lambda r: number(r.torch_gradient_ulp)),
        Column("ms", 8, lambda r: number(r.ms)),
        Column("torch ms", 8, lambda r: number(r.torch_ms)),
        *speed,
        Column("speed-up", 8, lambda r: number(r.speed_up)),
        Column("", 4, lambda r: "ok" if r.ok else "FAIL", right=False),
    ]


class Report:
    """Prints rows as they arrive and keeps them."""

    def __init__(self, console: Console, layout: Sequence[Column]) -> None:
        self.console, self.columns = console, layout
        self.rows: list[Row] = []

    def section(self, title: str) -> None:
        """Starts a section: prints its title and the titles of the columns."""
        self.console.print(f"\n{title}", style="bold")
        self._line("  ".join(c.pad(c.title) for c in self.columns), "dim")

    def add(self, row: Row) -> None:
        """Keeps and prints a row, with its problems below."""
        self.rows.append(row)
        self._line("  ".join(c.pad(c.cell(row)) for c in self.columns), None if row.ok else "bold red")
        for problem in row.problems:
            self._line(f"    {problem}", "red")

    def _line(self, text: str, style: str | None) -> None:
        self.console.print(Text(text.rstrip(), style=style or ""), soft_wrap=True, highlight=False)

    def summary(self, seconds: float) -> None:
        """Prints one line per loss and the totals."""
        table = Table("loss", title="Summary", title_justify="left", box=None, pad_edge=False)
        for title in ("rows", "failed", "worst value ulp*", "worst grad ulp*", "median speed-up"):
            table.add_column(title, justify="right")
        for loss in dict.fromkeys(r.loss for r in self.rows):
            rows = [r for r in self.rows if r.loss == loss]
            table.add_row(loss, str(len(rows)), str(failures(rows)), *map(number, figures(rows)))
        self.console.print()
        self.console.print(table)
        self.console.print("* where torch, too, is within 100 ulp: elsewhere the formula itself cancels.", style="dim")
        failed = failures(self.rows)
        verdict = "all ok" if not failed else f"{failed} failed"
        self.console.print(
            f"{len(self.rows)} rows in {seconds:.1f} s: {verdict}", style="bold green" if not failed else "bold red"
        )


def failures(rows: Sequence[Row]) -> int:
    """Number of rows that failed."""
    return sum(not r.ok for r in rows)


def figures(rows: Sequence[Row]) -> tuple[float | None, float | None, float | None]:
    """The worst value and gradient errors over rows where torch's is at most 100 ulp, and the median speed-up."""

    def worst(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
        return max((a for a, b in pairs if a is not None and b is not None and b <= 100), default=None)

    speeds = [r.speed_up for r in rows if r.speed_up is not None]
    return (
        worst([(r.value_ulp, r.torch_value_ulp) for r in rows]),
        worst([(r.gradient_ulp, r.torch_gradient_ulp) for r in rows]),
        median(speeds) if speeds else None,
    )


def legend() -> str:
    """Text that explains the units of the columns and the allowed errors."""
    table = ", ".join(f"{name} {t.element:g}" for name, t in TABLE.items())
    return (
        "Errors are in units in the last place (ulp) of the result, against a float64 truth, beside torch's.\n"
        f"Allowed: half a unit, plus {table} epsilons of the arithmetic on the size of the terms, or torch's error.\n"
        "Times, on a GPU, are medians of forward and backward (of forward alone if nothing requires grad)."
    )


def environment(place: str) -> dict[str, str]:
    """The machine and versions of the run; ``place`` is the device, as `--device` spells it."""
    if place == "cuda":
        return gpu_environment()
    compiler = {"compiler": " ".join(host.find_compiler() or ())} if place == "host" else {}
    return {
        **compiler,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "cupylosses": cupylosses.__version__,
    }


def write_json(
    path: Path,
    rows: Sequence[Row],
    where: Mapping[str, str],
    arguments: Mapping[str, Any],
    losses: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes every check, and the line of each loss if there are lines, as JSON.

    Infinities and NaN become strings, because JSON lacks them.
    """
    content = {
        "environment": dict(where),
        "arguments": {name: str(value) for name, value in arguments.items() if value is not None},
        "summary": {"rows": len(rows), "failed": failures(rows)},
        **({"losses": [_plain_record(x) for x in losses]} if losses else {}),
        "rows": [_plain_record(r.record()) for r in rows],
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _plain_record(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in record.items()}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
