"""The run without arguments: one line per loss, which sums up a few representative checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

from rich.table import Table

from comparing import bits
from comparing.matrix import Matrix, Selection
from comparing.report import number
from comparing.table import Row, accuracy_and_time, rehearse
from cupylosses.definition.base import Definition
from cupylosses.testing.check import EDGES, Check


@dataclass(frozen=True)
class Task:
    """A check to perform.

    ``measure`` turns it into a row. ``calls`` makes the same library calls, to find the kernels to compile in advance;
    None if there are none to find.
    """

    check: Check
    section: str
    measure: Callable[[Check], Row]
    calls: Callable[[Check], object] | None = None


@dataclass(frozen=True)
class Line:
    """The printed line of a loss: its worst errors, in conditioned units, and its time and memory on a GPU."""

    loss: str
    section: str
    checks: int
    failed: int
    value_ulp: float | None = None
    torch_value_ulp: float | None = None
    gradient_ulp: float | None = None
    torch_gradient_ulp: float | None = None
    ms: float | None = None
    torch_ms: float | None = None
    copy_fraction: float | None = None
    extra_bytes: int | None = None
    torch_extra_bytes: int | None = None

    @property
    def ok(self) -> bool:
        """True if every check of the loss passed."""
        return not self.failed

    @property
    def speed_up(self) -> float | None:
        """torch's time divided by ours."""
        return self.torch_ms / self.ms if self.ms and self.torch_ms else None

    def record(self) -> dict[str, Any]:
        """The line as written to files."""
        return {**asdict(self), "speed_up": self.speed_up, "ok": self.ok}


# ----------------------------------------------------------------------------------------------------------------------
# Checks


def tasks(loss: Definition, device: str, seed: int = 0) -> list[Task]:
    """The checks of a loss, each once: values and gradients, repeated runs, arrays of another library."""
    matrix = Matrix(loss, Selection(device, seed))
    measure = partial(accuracy_and_time, time=False, section=matrix.heading)
    planned = [Task(x, matrix.heading, measure, rehearse) for x in matrix.line()]
    for plain in matrix.plain():
        planned.append(Task(matrix.large(plain), bits.REPEATED, bits.repeated, bits.repeated))
        if bits.crosses(plain):
            planned.append(Task(plain, bits.section(device), bits.arrays))
    return planned


# ----------------------------------------------------------------------------------------------------------------------
# Lines


def line(loss: str, rows: Sequence[Row], times: Mapping[str, Any] | None = None) -> Line:
    """Sums up the rows of a loss by their worst errors. Checks of domain edges count only as passed or failed."""
    usual = [r for r in rows if r.layout != EDGES]

    def worst(name: str) -> float | None:
        return max((x for x in (getattr(r, name) for r in usual) if x is not None), default=None)

    return Line(
        loss,
        rows[0].section,
        len(rows),
        sum(not r.ok for r in rows),
        *(worst(f"{torch}{what}_error") for what, torch in product(("value", "gradient"), ("", "torch_"))),
        **(times or {}),
    )


def table(lines: Sequence[Line], section: str, timed: str | None) -> Table:
    """The table of a section, with times and memory if ``timed`` describes the timed calls."""
    own = [x for x in lines if x.section == section]
    found = Table(title=f"{section}{f': {timed}' if timed else ''}", title_justify="left", box=None, pad_edge=False)
    found.add_column("loss", no_wrap=True)
    cells: list[tuple[str, Callable[[Line], str]]] = [
        ("value ulp", lambda x: number(x.value_ulp)),
        ("torch", lambda x: number(x.torch_value_ulp)),
        ("gradient ulp", lambda x: number(x.gradient_ulp)),
        ("torch", lambda x: number(x.torch_gradient_ulp)),
    ]
    if timed:
        cells += [
            ("ms", lambda x: number(x.ms)),
            ("torch", lambda x: number(x.torch_ms)),
            ("speed-up", lambda x: number(x.speed_up)),
            ("of a copy", lambda x: "-" if x.copy_fraction is None else f"{x.copy_fraction:.0%}"),
            ("MiB", lambda x: mebibytes(x.extra_bytes)),
            ("torch", lambda x: mebibytes(x.torch_extra_bytes)),
        ]
    for title, _ in cells:
        found.add_column(title, justify="right", no_wrap=True)
    found.add_column("", no_wrap=True)
    for x in own:
        values = [cell(x) for _, cell in cells]
        found.add_row(x.loss, *values, "ok" if x.ok else "FAIL", style=None if x.ok else "bold red")
    return found


def mebibytes(size: int | None) -> str:
    """A number of bytes in MiB, or a dash for None."""
    return number(None if size is None else size / (1 << 20))


def legend(timed: bool) -> str:
    """Text that explains the units of the columns."""
    text = (
        "Worst errors in units in the last place (ulp) of the result or, where terms cancel, of the arithmetic, "
        "against float64."
    )
    if timed:
        text += (
            "\nms: forward and backward, median; of a copy: the speed relative to a copy of as many bytes; MiB: peak "
            "memory beyond operands and results."
        )
    return text


def details(rows: Sequence[Row]) -> Iterator[str]:
    """One line per problem."""
    for r in rows:
        for problem in r.problems:
            words = (r.loss, r.case, r.dtype, r.reduction, r.layout, f"gradients of {r.gradients}")
            yield f"{', '.join(words)} ({r.section}): {problem}"
