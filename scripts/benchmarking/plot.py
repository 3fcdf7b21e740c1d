"""The picture in the README, drawn from committed rows. Needs neither torch nor a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarking.figures import COMPILE, COPY, EAGER, KEY, LIGER, LOSSES, NAIVE, OURS, SWEEP
from benchmarking.records import Row, latest, read

#: Providers in the order of their bars, with labels and colours that remain apart in grey and for the colour-blind.
STYLES = {
    OURS: ("cupylosses", "#0072b2"),
    COMPILE: ("torch.compile", "#e69f00"),
    EAGER: ("eager", "#999999"),
    NAIVE: ("naive expression", "#d5d5d5"),
}
MODE = "forward+backward"
DTYPE = "float32"


class NothingToDraw(Exception):
    """No committed rows to draw."""


def chosen(directory: Path) -> list[Row]:
    """The newest throughput rows that the picture shows: one mode and dtype, those that were measured."""
    rows = latest(read(directory / "throughput.csv"), KEY)
    found = [r for r in rows if r["mode"] == MODE and r["dtype"] == DTYPE and r["status"] == "ok"]
    if not any(r["provider"] == OURS for r in found):
        raise NothingToDraw(
            f"{directory / 'throughput.csv'} has no {DTYPE} rows of {MODE}; measure first: python scripts/benchmark.py"
        )
    return found


def bars_of(rows: Sequence[Row]) -> tuple[int, dict[str, dict[str, float]], float]:
    """For the bars: the size with the most rivals, TB/s by loss and provider there, and the copy's TB/s."""
    sweep = [r for r in rows if r["workload"] == SWEEP]
    sizes = {r["elements"] for r in sweep}

    def rank(elements: int) -> tuple[int, int]:
        here = {r["provider"] for r in sweep if r["elements"] == elements}
        return len(here & STYLES.keys()), elements

    size = max(sizes, key=rank)
    result: dict[str, dict[str, float]] = {}
    copies = []
    for r in sorted(sweep, key=lambda r: LOSSES.index(r["loss"]) if r["loss"] in LOSSES else len(LOSSES)):
        if r["elements"] != size:
            continue
        if r["provider"] == COPY:
            copies.append(r["tb_per_s"])
        elif r["provider"] in STYLES:
            result.setdefault(r["loss"], {})[r["provider"]] = r["tb_per_s"]
    return size, result, sum(copies) / len(copies) if copies else 0.0


def lines_of(rows: Sequence[Row], loss: str) -> dict[str, list[tuple[int, float]]]:
    """For the lines: TB/s over size of one loss, by provider; one point makes no line."""
    result: dict[str, list[tuple[int, float]]] = {}
    for r in sorted(rows, key=lambda r: r["elements"]):
        if r["workload"] == SWEEP and r["loss"] == loss and r["provider"] != LIGER:
            result.setdefault(r["provider"], []).append((r["elements"], r["tb_per_s"]))
    return {provider: points for provider, points in result.items() if len(points) > 1}


def draw(directory: Path, picture: Path) -> None:
    """Draws the picture.

    Raises:
        NothingToDraw: no rows fit.
    """
    rows = chosen(directory)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size, losses, copy = bars_of(rows)
    with pyplot.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.8), width_ratios=(1.5, 1), layout="constrained")
        _draw_bars(left, losses, copy)
        left.set_title(f"$2^{{{size.bit_length() - 1}}}$ elements, by loss")
        first = next(iter(losses))
        _draw_lines(right, lines_of(rows, first))
        right.set_title(f"{first}, by number of elements")
        row = next(r for r in rows if r["provider"] == OURS)
        figure.suptitle(f"{DTYPE}, {MODE}, gradient of the input: minimal traffic per second of GPU time", fontsize=14)
        figure.supxlabel(
            f"{row['gpu']}, torch {row['torch']}, CuPy {row['cupy']}, {str(row['date'])[:10]}. "
            "Minimal traffic: each operand read once, each gradient written once.",
            fontsize=9,
        )
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=130, metadata={"Software": None})
        pyplot.close(figure)


def _draw_bars(axes: Any, losses: dict[str, dict[str, float]], copy: float) -> None:
    shown = [p for p in STYLES if any(p in found for found in losses.values())]
    width = 0.84 / len(shown)
    for i, provider in enumerate(shown):
        label, colour = STYLES[provider]
        at = [x + (i - (len(shown) - 1) / 2) * width for x, found in enumerate(losses.values()) if provider in found]
        heights = [found[provider] for found in losses.values() if provider in found]
        drawn = axes.bar(at, heights, width, label=label, color=colour)
        if provider == OURS:
            axes.bar_label(drawn, fmt="%.2f", fontsize=10, padding=2)
    if copy:
        axes.axhline(copy, color="black", linestyle="--", linewidth=1.2, label=f"copy, {copy:.2f} TB/s")
    axes.set_xticks(range(len(losses)), [name.removesuffix("_loss") for name in losses])
    axes.set_ylabel("TB/s")
    axes.set_ylim(0, 1.3 * max([copy, *(x for found in losses.values() for x in found.values())]))
    axes.legend(ncols=3, fontsize=10, loc="upper center", frameon=False)


def _draw_lines(axes: Any, lines: dict[str, list[tuple[int, float]]]) -> None:
    for provider, points in lines.items():
        label, colour = STYLES.get(provider, (provider, "black"))
        style = "--" if provider == COPY else "-"
        marker = "" if provider == COPY else "o"
        axes.plot(*zip(*points, strict=True), style, marker=marker, markersize=4, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("TB/s")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=10, loc="upper left", frameon=False)
