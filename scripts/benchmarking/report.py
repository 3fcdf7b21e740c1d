"""Printed tables of measured rows. Needs neither torch nor a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarking.figures import (
    BARS,
    COMPILE,
    COPY,
    EAGER,
    KEY,
    LIGER,
    MIB,
    NAIVE,
    OURS,
    QUACK,
    QUACK_OP,
    SWEEP,
    power,
    verdict,
)
from benchmarking.records import Row

#: Rivals in the order of their columns: in the section `throughput`, and in the section `rows`.
RIVALS = (COMPILE, EAGER, NAIVE, LIGER)
ROW_RIVALS = (COMPILE, EAGER, LIGER, QUACK, QUACK_OP)

#: Columns that identify a line of the throughput table, which combines the rows of all providers.
LINE = KEY[:-1]


def fixed(value: Any, pattern: str = ".3g", unit: str = "") -> str:
    """A formatted number, or a dash for anything else."""
    return f"{value:{pattern}}{unit}" if isinstance(value, (int, float)) else "-"


def table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """A table whose first column is text and whose other columns are numbers."""
    result = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    for i, column in enumerate(columns):
        result.add_column(column, justify="right" if i else "left", no_wrap=True)
    for line in lines:
        result.add_row(*line)
    return result


def grouped(rows: Sequence[Row], key: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Groups rows by the columns ``key``, and by provider within a group."""
    result: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        result.setdefault(tuple(row[column] for column in key), {})[row["provider"]] = row
    return result


def throughput(rows: Sequence[Row]) -> Table:
    """Table with one line per workload and mode: our time and bandwidth, and our speed-up over each rival."""

    def name(row: Row) -> str:
        title = row["loss"] if row["workload"] == SWEEP else row["workload"]
        return f"{title}, {row['dtype']}, {power(row['elements'])}"

    title = "GPU time, minimal traffic per second, and how many times faster than each rival"
    return _speeds(rows, title, name, RIVALS)


def of_rows(rows: Sequence[Row]) -> Table:
    """Table with one line per workload of rows and mode, with the time per byte relative to the plain case."""

    def name(row: Row) -> str:
        case = f", {row['case']}" if row.get("case") else ""
        return f"{row['loss']}, {row['shape']} {row['dtype']}{case}"

    title = "Rows of logits: GPU time, minimal traffic per second, and how many times faster than each rival"
    return _speeds(rows, title, name, ROW_RIVALS, {"of plain": lambda ours: fixed(ours.get("plain_ratio"), ".2f")})


def _speeds(
    rows: Sequence[Row],
    title: str,
    name: Callable[[Row], str],
    rivals: Sequence[str],
    more: Mapping[str, Callable[[Row], str]] | None = None,
) -> Table:
    more = more or {}
    lines = []
    for providers in grouped(rows, LINE).values():
        row = next(iter(providers.values()))
        ours, copy = providers.get(OURS, {}), providers.get(COPY, {})
        lines.append(
            [
                f"{name(row)}, {row['mode']}",
                fixed(ours.get("ms"), ".4f"),
                f"{fixed(ours.get('ms_low'), '.4f')}…{fixed(ours.get('ms_high'), '.4f')}",
                fixed(ours.get("tb_per_s"), ".2f"),
                fixed(copy.get("tb_per_s"), ".2f"),
                fixed(ours.get("copy_fraction"), ".3f"),
                *(cell(ours) for cell in more.values()),
                *(_speedup(providers.get(x)) for x in rivals),
                "" if ours.get("status") == "ok" else str(ours.get("status", "")),
            ]
        )
    columns = ["workload", "ms", "20…80 %", "TB/s", "copy", "of copy", *more, *(f"x {x}" for x in rivals), ""]
    return table(title, columns, lines)


def _speedup(row: Row | None) -> str:
    if row is None:
        return "-"
    return fixed(row.get("speedup_of_ours"), ".2f") if row["status"] == "ok" else str(row["status"])[:14]


def host(rows: Sequence[Row]) -> Table:
    """Table of host microseconds: whole calls of ours and eager, then the parts of our call."""
    calls = [r for r in rows if r["kind"] == "call"]
    lines = [
        [f"{r['loss']}, {r['what']}, {r['provider']}", fixed(r.get("us"), ".2f"), fixed(r.get("eager_ratio"), ".2f")]
        for r in calls
    ]
    lines += [[f"  {r['what']}", _status(r, "us", ".2f"), ""] for r in rows if r["kind"] == "part"]
    return table("Host time of a call, µs, and where ours goes", ["call", "µs", "of eager"], lines)


def graph(rows: Sequence[Row]) -> Table:
    """Table of microseconds per step in a CUDA graph, ours beside eager's."""
    lines = []
    for (loss, elements), found in grouped(rows, ("loss", "elements")).items():
        ours, eager = found.get(OURS, {}), found.get(EAGER, {})
        cells = [_status(ours, "us", ".2f"), _status(eager, "us", ".2f"), fixed(ours.get("eager_ratio"), ".2f")]
        lines.append([f"{loss}, {power(elements)}", *cells])
    return table(
        "Forward and backward in a CUDA graph, float32, µs", ["loss, size", "ours", "eager", "of eager"], lines
    )


def startup(rows: Sequence[Row]) -> Table:
    """Table of the seconds that the first loss of a process takes."""
    stages = ("import_s", "forward_s", "backward_s", "call_s", "total_s")
    lines = [[f"{r['loss']}, {r['cache']} cache", *(_status(r, s, ".3f") for s in stages)] for r in rows]
    title = "First loss of a process after importing torch and CuPy, seconds"
    return table(title, ["loss", "import", "forward", "backward", "both", "with import"], lines)


def memory(rows: Sequence[Row]) -> Table:
    """Table of peak memory beyond the results, in MiB."""
    lines = [
        [
            f"{r['loss']}, {power(r['elements'])}, {r['mode']}, {r['provider']}",
            _status(_mib(r), "outputs", ".1f"),
            _status(_mib(r), "beyond_outputs", ".3f"),
        ]
        for r in rows
    ]
    return table("Peak memory, MiB", ["call", "results", "beyond"], lines)


def accuracy(rows: Sequence[Row]) -> Table:
    """Table of errors in units in the last place."""
    lines = [
        [f"{r['loss']}, {power(r['elements'])}, {r['provider']}", str(r.get("value", "")), _status(r, "ulp", ".3f")]
        for r in rows
    ]
    return table("Error of the float32 mean against float64, ulp", ["call", "value", "ulp"], lines)


def linear(rows: Sequence[Row]) -> Table:
    """Table with one line per shape, variant and provider: time beside that of the matrix products, and peak memory."""
    lines = [
        [
            f"{r['loss']}, {r['shape']} {r['dtype']}, {r['variant']}, {r['provider']}",
            _status(r, "ms", ".2f"),
            f"{fixed(r.get('ms_low'), '.2f')}…{fixed(r.get('ms_high'), '.2f')}",
            str(r.get("products") or "-"),
            fixed(r.get("products_ms"), ".2f"),
            fixed(r.get("ratio"), ".3f"),
            fixed(r.get("copy_fraction"), ".3f"),
            fixed(r.get("peak_gb"), ".2f"),
            *bars_of(r, "linear"),
        ]
        for r in rows
    ]
    title = "Losses of a linear layer beside the products of matrices that they take at least, or a copy of the logits"
    columns = ["call", "ms", "20…80 %", "products", "ms", "ratio", "of copy", "peak GB", "bars", "met"]
    return table(title, columns, lines)


def sequences(rows: Sequence[Row]) -> Table:
    """Table with one line per loss, shape, mode and provider: time and peak memory."""
    lines = [
        [
            f"{r['loss']}, {r['shape']} {r['dtype']}, {r.get('mode', '')}, {r['provider']}",
            _status(r, "ms", ".4f"),
            f"{fixed(r.get('ms_low'), '.4f')}…{fixed(r.get('ms_high'), '.4f')}",
            fixed(r.get("speedup_of_ours"), ".2f"),
            fixed(r.get("peak_gb"), ".3f"),
            *bars_of(r, "sequences"),
        ]
        for r in rows
    ]
    title = "Losses of sequences from logits, log-softmax included: frames, samples, classes and labels"
    return table(title, ["call", "ms", "20…80 %", "/ ours", "peak GB", "bars", "met"], lines)


def bars_of(row: Row, section: str) -> tuple[str, str]:
    """The bars of one row, and "yes" if it meets them all, otherwise "no"; empty strings if it has none."""
    found = [verdict(bar, {section: [row]}) for bar in BARS if bar.section == section and bar.selects(row)]
    return ", ".join(x.limit for x in found), ("yes" if all(x.within for x in found) else "no") if found else ""


def cliffs(rows: Sequence[Row]) -> Table:
    """Table with one line per off-headline case: failures first, then by the factor that a bar is missed by."""
    ordered = sorted(rows, key=lambda r: -(inf if r.get("shortfall") is None else r["shortfall"]))
    lines = [
        [
            f"{r['case']}" if r["case"] else f"{r['loss']}",
            _status(r, "ms", ".4f"),
            fixed(r.get("eager_ms"), ".4f"),
            fixed(r.get("copy_fraction"), ".3f"),
            fixed(r.get("copy_bar"), ".2f"),
            fixed(r.get("eager_ratio"), ".2f"),
            fixed(r.get("contiguous_ratio"), ".2f"),
            fixed(r.get("beside_ratio"), ".2f"),
            fixed(r.get("beside_bar"), ".2f"),
            fixed(r.get("shortfall"), ".2f"),
            str(r.get("met") or "no"),
        ]
        for r in ordered
    ]
    below = sum(r.get("met") != "yes" for r in rows)
    title = (
        f"Off-headline cases, the worst first; {below} of {len(rows)} miss a bar. Ratios are our time over that of "
        "eager (at most 1), of contiguous copies and then ours (at most 1), and of the case beside it"
    )
    columns = [
        "case", "ms", "eager", "of copy", "bar", "/ eager", "/ contiguous", "/ beside", "bar", "short by", "met",
    ]  # fmt: skip
    found = table(title, columns, lines)
    missed = (r for r in ordered if r.get("met") != "yes" and r.get("reason"))
    found.caption = "\n".join(f"{r['case']}: {r['reason']}" for r in missed)
    found.caption_justify = "left"
    return found


def _mib(row: Row) -> Row:
    return {k: v / MIB if k in ("outputs", "beyond_outputs") and v is not None else v for k, v in row.items()}


def _status(row: Row, column: str, pattern: str) -> str:
    return fixed(row[column], pattern) if row.get(column) is not None else str(row.get("status", "-"))


TABLES: Mapping[str, Callable[[Sequence[Row]], Table]] = {
    "startup": startup,
    "memory": memory,
    "host": host,
    "graph": graph,
    "accuracy": accuracy,
    "rows": of_rows,
    "linear": linear,
    "sequences": sequences,
    "throughput": throughput,
    "cliffs": cliffs,
    "random_cases": cliffs,
}

#: Sections that run only on request. Each of their cases has its own bars.
OFF_HEADLINE = ("cliffs", "random_cases")

#: Sections that run by default.
DEFAULT = tuple(x for x in TABLES if x not in OFF_HEADLINE)


def bars(sections: Mapping[str, Sequence[Row]]) -> Table:
    """Table of the project's figures: each bar, the measured value and the verdict."""
    result = table("Figures: the worst row that counts", ["figure", "bar", "measured", "within", "met"], [])
    for bar in BARS:
        found = verdict(bar, sections)
        style = {"no": "red", "yes": "green", "so far": "yellow"}.get(found.met)
        result.add_row(bar.what, found.limit, found.measured, found.count, found.met, style=style)
    return result
