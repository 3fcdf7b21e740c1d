"""The run without arguments: a few representative checks per loss, and one line for each loss.

The number of kernels limits the checks, since each takes a tenth to a half of a second to compile. These checks share
kernels where possible, and `--full` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from rich.table import Table

from comparing import bits, row_matrix
from comparing.report import number
from comparing.rows import AnyCheck, Row, accuracy_and_time, rehearse
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing.check import EDGES, Check
from cupylosses.testing.softmax.check import ROW_LAYOUTS, SoftmaxCheck

ELEMENTWISE, OF_ROWS = "element-wise losses", "losses of rows of logits"

#: The dtype beside float32: it covers rounding to 16 bits and the kernels' vectors of eight.
NARROW = ("bfloat16",)

#: The loss of rows that is tried with every argument and in every row layout; the others share its kernels' skeletons.
EVERY_LAYOUT = row_matrix.FIRST


@dataclass(frozen=True)
class Task:
    """A check to perform: ``measure`` makes a row of it, and ``calls`` makes the same calls to find their kernels."""

    check: AnyCheck
    section: str
    measure: Callable[[AnyCheck], Row]
    calls: Callable[[AnyCheck], object] | None = None


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
# Which checks


def tasks(loss: Loss | SoftmaxLoss, device: str, seed: int = 0) -> list[Task]:
    """The checks of a loss without repetition: values and gradients, repeated bits, arrays of another library."""
    row = isinstance(loss, SoftmaxLoss)
    found = (_of_rows if row else _elementwise)(loss, device, seed)  # type: ignore[operator]
    measure = partial(accuracy_and_time, time=False, section=OF_ROWS if row else ELEMENTWISE)
    planned = [Task(x, OF_ROWS if row else ELEMENTWISE, measure, rehearse) for x in found.values()]
    for plain in (_plain_rows if row else _plain_elementwise)(loss, device, seed):  # type: ignore[operator]
        again = replace(plain, shape=bits.REPEATED_SHAPE) if device == "cuda" and not row else plain
        planned.append(Task(again, bits.REPEATED, bits.repeated, bits.repeated))
        if bits.crosses(plain.dtypes, device):
            planned.append(Task(plain, bits.section(device), bits.arrays))
    return planned


def _plain_elementwise(loss: Loss, device: str, seed: int) -> list[Check]:
    """The usual call in training: a float32 mean with the gradient of the prediction."""
    wanted = tuple(i == 0 for i in range(len(loss.operands)))
    return [Check(loss, case=loss.cases[0], wanted=wanted, device=device, seed=seed)]


def _elementwise(loss: Loss, device: str, seed: int) -> dict[str, Check]:
    (plain,) = _plain_elementwise(loss, device, seed)
    every = replace(plain, wanted=None)
    others = tuple(i > 0 for i in range(len(loss.operands)))
    planned = [
        plain,
        # These share the kernels of the first.
        *(replace(plain, reduction=x, layout="transposed") for x in ("sum", "batchmean")),
        *(replace(every, case=x, reduction="none") for x in loss.cases),
        *(replace(every, case=x, reduction="none", layout=EDGES) for x in loss.cases),
        replace(every, dtypes=NARROW),
        # The other operands are broadcast, so their gradients are sums.
        replace(every, wanted=others, layout="row"),
    ]
    return {x.id: x for x in planned if x.possible and x.has_truth}


def _plain_rows(loss: SoftmaxLoss, device: str, seed: int) -> list[SoftmaxCheck]:
    """A float32 mean for each kind of target."""
    found = []
    for kind in loss.targets:
        drawn = (SoftmaxCheck(loss, kind=kind, layout=x, device=device, seed=seed) for x in row_matrix.USUAL)
        found += [x for x in drawn if x.possible]
    return found


def _of_rows(loss: SoftmaxLoss, device: str, seed: int) -> dict[str, SoftmaxCheck]:
    planned = []
    for plain in _plain_rows(loss, device, seed):
        first = (loss.name, plain.kind) == EVERY_LAYOUT
        every = row_matrix.cases(loss, plain.kind)
        # The longest case has all arguments at once.
        cases = every if first else [*loss.cases, max(every, key=len)]
        planned += [replace(plain, case=x) for x in cases]
        planned += [replace(plain, reduction=x) for x in ("none", "sum", "batchmean")]
        narrow = [replace(plain, dtypes=NARROW, layout=x) for x in ("block", plain.layout)]
        planned += [x for x in narrow if x.possible][:1]
        planned += [replace(plain, layout=x) for x in (ROW_LAYOUTS if first else ("thread_per_row",))]
    return {x.id: x for x in planned if x.possible}


# ----------------------------------------------------------------------------------------------------------------------
# Lines


def line(loss: str, rows: Sequence[Row], times: Mapping[str, Any] | None = None) -> Line:
    """Sums up the rows of a loss by their worst errors. Edges of a domain count only as right or wrong."""
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
    """The table of a section; with the GPU's columns if ``timed`` describes the timed calls."""
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
    """Bytes in MiB."""
    return number(None if size is None else size / (1 << 20))


def legend(timed: bool) -> str:
    """The units of the columns."""
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
    """One line for each problem."""
    for r in rows:
        for problem in r.problems:
            words = (r.loss, r.case, r.dtype, r.reduction, r.layout, f"gradients of {r.gradients}")
            yield f"{', '.join(words)} ({r.section}): {problem}"
