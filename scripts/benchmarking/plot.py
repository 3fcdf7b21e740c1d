"""Plots for the README and of off-headline cases, drawn from committed rows. Needs neither torch nor a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarking.figures import COMPILE, EAGER, KEY, LIGER, LOGITS, OURS, QUACK, ROWS, SWEEP, spell_shape
from benchmarking.records import Row, latest, read

#: Providers in the order of their bars, with label and colour. The colours remain distinct in greyscale and to the
#: colour-blind.
STYLES = {
    OURS: ("cupylosses", "#0072b2"),
    QUACK: ("QuACK", "#56b4e9"),
    COMPILE: ("torch.compile", "#e69f00"),
    LIGER: ("Liger", "#cc79a7"),
    EAGER: ("eager PyTorch", "#999999"),
}
MODE = "forward+backward"

#: Element-wise losses in the picture, and their dtype: common losses with and without exponentials, and one that torch
#: lacks.
LOSSES = (
    "mse_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss",
    "sigmoid_focal_loss",
)  # fmt: skip
DTYPE = "float32"

#: Least number of elements of an off-headline case in the picture; launches dominate the time of smaller ones.
CLIFFS_FROM = 1 << 22

TIMES = " \N{MULTIPLICATION SIGN} "

#: Maximum length of a line of a label, in characters.
LONGEST = 14

#: Heights of bars by group, then by provider: the copy's time divided by the provider's; None if the provider failed.
Bars = dict[str, dict[str, "float | None"]]


class NothingToDraw(Exception):
    """Raised if there are no rows to draw."""


def chosen(directory: Path) -> tuple[list[Row], list[Row]]:
    """The newest rows for the picture: those of element-wise losses, and those of cross entropy.

    Raises:
        NothingToDraw: a file has no such rows of ours.
    """

    def of(name: str, wanted: Callable[[Row], bool], what: str) -> list[Row]:
        rows = [r for r in read(directory / f"{name}.csv") if r["mode"] == MODE and wanted(r)]
        # Only the GPU that measured such rows last: the file may have rows of other GPUs.
        found = latest(rows, KEY)
        if not any(r["provider"] == OURS and r["status"] == "ok" for r in found):
            raise NothingToDraw(
                f"{directory / f'{name}.csv'} has no rows of {what}, {MODE}; measure first: python scripts/benchmark.py"
            )
        return found

    elementwise = of(
        "throughput",
        lambda r: r["workload"] == SWEEP and r["dtype"] == DTYPE and r["loss"] in LOSSES,
        f"{DTYPE} of {', '.join(LOSSES)}",
    )
    cross_entropy = of("rows", lambda r: r["workload"] == ROWS and r["loss"] == "cross_entropy", "cross_entropy")
    return elementwise, cross_entropy


def bars_of_losses(rows: Sequence[Row]) -> tuple[int, Bars]:
    """The size with the most measured bars (the largest if sizes tie), and the bars of each loss at that size."""

    def rank(elements: int) -> tuple[int, int]:
        return sum(r["elements"] == elements and r["provider"] in STYLES for r in rows), elements

    size = max({r["elements"] for r in rows}, key=rank)
    here = [r for r in rows if r["elements"] == size]
    return size, {_wrapped(x.removesuffix("_loss")): found for x in LOSSES if (found := _bars(here, {"loss": x}))}


def bars_of_shapes(rows: Sequence[Row]) -> Bars:
    """The bars of each shape and dtype of the logits, short rows first."""
    found: Bars = {}
    for shape, dtype, _ in sorted(LOGITS[ROWS], key=lambda x: (x[1], x[0][1])):
        bars = _bars(rows, {"shape": spell_shape(shape), "dtype": dtype})
        if bars:
            found[f"{TIMES.join(map(str, shape))}\n{dtype}"] = bars
    return found


def _bars(rows: Sequence[Row], where: Mapping[str, Any]) -> dict[str, float | None]:
    own = {r["provider"]: r for r in rows if all(r[k] == v for k, v in where.items())}
    return {p: own[p]["copy_fraction"] if own[p]["status"] == "ok" else None for p in STYLES if p in own}


def draw(directory: Path, picture: Path) -> None:
    """Draws the picture of the README.

    Raises:
        NothingToDraw: no suitable rows exist.
    """
    elementwise, cross_entropy = chosen(directory)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    size, losses = bars_of_losses(elementwise)
    shapes = bars_of_shapes(cross_entropy)
    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False}
    with pyplot.rc_context(style):
        figure, (left, right) = pyplot.subplots(
            1, 2, figsize=(15, 5), width_ratios=(len(shapes) * 5.2, len(losses) * 4), sharey=True, layout="constrained"
        )
        _draw_bars(left, shapes)
        left.set_title(f"cross_entropy: rows{TIMES}classes", loc="left", fontweight="bold")
        _draw_bars(right, losses)
        right.set_title(
            f"element-wise losses: $\\mathbf{{2^{{{size.bit_length() - 1}}}}}$ elements, {DTYPE}",
            loc="left",
            fontweight="bold",
        )
        left.set_ylim(0, 1.1)
        left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        left.set_ylabel("of a copy's speed")
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for _, colour in STYLES.values()]
        labels = [label for label, _ in STYLES.values()]
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=12)
        figure.supxlabel(_caption(cross_entropy, elementwise), fontsize=9, color="#555555")
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=130, metadata={"Software": None})
        pyplot.close(figure)


def draw_all(directory: Path, picture: Path) -> list[Path]:
    """Draws the README's picture and, if there are rows of off-headline cases, their distribution as cliffs.png.

    Raises:
        NothingToDraw: no suitable rows exist.
    """
    draw(directory, picture)
    rows = latest(read(directory / "cliffs.csv"), ("case",))
    if not rows:
        return [picture]
    draw_cliffs(rows, picture.with_name("cliffs.png"))
    return [picture, picture.with_name("cliffs.png")]


def distribution(rows: Sequence[Row], column: str) -> list[float]:
    """Fractions of a copy's speed, the worst first, of the cases that are large enough to be bound by memory."""
    return sorted(r[column] for r in rows if r["elements"] >= CLIFFS_FROM and isinstance(r[column], (int, float)))


def draw_cliffs(rows: Sequence[Row], picture: Path) -> None:
    """Draws the distribution of the fraction of a copy's speed over off-headline cases."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    with pyplot.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
        axes.axhline(1, color="black", linestyle="--", linewidth=1)
        for provider, column in ((OURS, "copy_fraction"), (EAGER, "eager_copy_fraction")):
            label, colour = STYLES[provider]
            heights = distribution(rows, column)
            shares = [(i + 0.5) / len(heights) for i in range(len(heights))]
            axes.plot(shares, heights, color=colour, linewidth=2, marker=".", markersize=4, label=label)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.15)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel(f"cases of $2^{{{CLIFFS_FROM.bit_length() - 1}}}$ elements and more, the slowest first")
        axes.set_ylabel("of a copy's speed")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        row = rows[-1]
        figure.supxlabel(f"{row['gpu']}, torch {row['torch']}, CuPy {row['cupy']}", fontsize=9, color="#555555")
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=130, metadata={"Software": None})
        pyplot.close(figure)


def _caption(left: Sequence[Row], right: Sequence[Row]) -> str:
    return (
        "Forward and backward with the gradient of the input, all through autograd. 100 % is a copy of as many bytes "
        "as must move: operands read once, gradients written once.\n"
        f"Left: {_measured(left)}. Right: {_measured(right)}."
    )


def _measured(rows: Sequence[Row]) -> str:
    """The GPU, the versions and the dates of our rows."""
    own = [r for r in rows if r["provider"] == OURS]
    dates = sorted({str(r["date"])[:10] for r in own})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{own[0]['gpu']}, torch {own[0]['torch']}, CuPy {own[0]['cupy']}, {when}"


def _draw_bars(axes: Any, groups: Bars) -> None:
    """Draws a group of adjacent bars for each entry, centred on its label; "fails" replaces the bar of a failure."""
    axes.axhline(1, color="black", linestyle="--", linewidth=1, zorder=1)
    for at, found in enumerate(groups.values()):
        width = 0.84 / max(len(x) for x in groups.values())
        for i, (provider, height) in enumerate(found.items()):
            x = at + (i - (len(found) - 1) / 2) * width
            if height is None:
                axes.text(x, 0.02, "fails", rotation=90, ha="center", va="bottom", fontsize=9, color="#555555")
                continue
            drawn = axes.bar(x, height, 0.94 * width, color=STYLES[provider][1], zorder=2)
            if provider == OURS:
                axes.bar_label(drawn, [f"{100 * height:.0f}"], fontsize=10, padding=2, fontweight="bold")
    axes.set_xticks(range(len(groups)), list(groups), fontsize=10)
    axes.tick_params(length=0)
    axes.grid(axis="y", alpha=0.25, zorder=0)
    axes.set_axisbelow(True)


def _wrapped(label: str) -> str:
    """Breaks a long name into lines after underscores."""
    lines = [""]
    for word in re.findall(r"[^_]+_?", label):
        if len(lines[-1]) + len(word) > LONGEST:
            lines.append("")
        lines[-1] += word
    return "\n".join(lines)
