"""Output files of ``compare.py``: the table as CSV, and a picture."""

from __future__ import annotations

import csv
from argparse import Namespace
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarking.records import spell
from comparing.overview import Line
from comparing.table import Row

OURS, TORCH = "#0072b2", "#999999"

#: Smaller errors are drawn here, because a logarithmic axis has no 0.
LEAST = 0.01

#: Larger errors, including infinity, are drawn here.
MOST = 1e6


def write(
    arguments: Namespace, lines: Sequence[Line], where: Mapping[str, str], console: Console, rows: Sequence[Row] = ()
) -> None:
    """Writes the requested files and prints their names. The CSV has ``rows`` if there are any, otherwise ``lines``."""
    if arguments.csv:
        write_csv(arguments.csv, [x.record() for x in rows or lines])
    if arguments.plot:
        draw(arguments.plot, lines, where)
    name(arguments, console)


def name(arguments: Namespace, console: Console) -> None:
    """Prints the names of the written files."""
    for path in (arguments.csv, arguments.json, arguments.plot):
        if path:
            console.print(f"written to {path}", highlight=False, markup=False)


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes records with the same fields, one per row."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        rows.writeheader()
        rows.writerows({name: _cell(value) for name, value in x.items()} for x in records)


def _cell(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, (tuple, list)) else spell(value)


def draw(path: Path, lines: Sequence[Line], where: Mapping[str, str]) -> None:
    """Draws the errors of each loss beside torch's and, if times were measured, the speed-up."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = any(x.speed_up for x in lines)
    height = 1.6 + 0.26 * len(lines)
    panels = 3 if timed else 2
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(1, panels, figsize=(3 + 3.4 * panels, height), sharey=True, layout="constrained")
        for axis, what in zip(axes, ("value", "gradient"), strict=False):
            _errors(axis, lines, what)
        if timed:
            _speed(axes[2], lines)
        axes[0].set_yticks(range(len(lines)), [x.loss for x in lines])
        axes[0].set_ylim(len(lines) - 0.5, -0.5)
        axes[1].sharex(axes[0])
        axes[0].autoscale(axis="x")
        axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False)
        figure.supxlabel(", ".join(f"{k} {where[k]}" for k in ("gpu", "cpu", "torch") if k in where), fontsize=8)
        figure.savefig(path, format="png", dpi=130, metadata={"Software": None})
        pyplot.close(figure)


def _errors(axes: Any, lines: Sequence[Line], what: str) -> None:
    for prefix, label, colour, marker in (("torch_", "torch", TORCH, "s"), ("", "cupylosses", OURS, "o")):
        found = [(getattr(x, f"{prefix}{what}_ulp"), i) for i, x in enumerate(lines)]
        points = [(min(max(x, LEAST), MOST), i) for x, i in found if x is not None]
        if points:
            axes.scatter(*zip(*points, strict=True), color=colour, marker=marker, s=26, label=label, zorder=3)
    axes.set_xscale("log")
    axes.axvline(0.5, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"worst error of the {what}s, ulp")
    axes.grid(axis="y", alpha=0.25)


def _speed(axes: Any, lines: Sequence[Line]) -> None:
    found = [(x.speed_up or 0.0, i) for i, x in enumerate(lines)]
    bars = axes.barh([i for _, i in found], [x for x, _ in found], color=OURS, height=0.6)
    axes.bar_label(bars, [f"{x:.1f}" if x and isfinite(x) else "" for x, _ in found], padding=2, fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("times faster than torch")
