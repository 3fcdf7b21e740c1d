"""The checks of element-wise losses with one line each: every value once, or the full product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tools import covering
from tools.representatives import representatives

from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing.check import EDGES, Check
from cupylosses.testing.layouts import LAYOUTS, Shape

Dtypes = tuple[str, ...]

#: The last one mixes dtypes: the first operand is narrower than the others.
DTYPES: tuple[Dtypes, ...] = (("float16",), ("bfloat16",), ("float32",), ("float64",), ("bfloat16", "float32"))

#: With --full: the reverse mixture, two 16-bit formats of which neither contains the other, and labels.
MORE_DTYPES: tuple[Dtypes, ...] = (("float32", "float16"), ("float16", "bfloat16"), ("float32", "int64"))

#: Dtypes and reductions that try every layout by default. A kernel takes about 0.1 s to compile, and each layout has
#: its own. The second dtype has the widest vectors.
LAYOUT_DTYPES: dict[Dtypes, tuple[str, ...]] = {("float32",): ("mean", "none"), ("bfloat16",): ("mean",)}

#: With `few`: one layout of each kind, and those without a kernel of their own.
FEW_LAYOUTS = frozenset({"row", "eight_d", "zero_d", "empty"})

#: Dtypes that try every combination of operands that require grad by default.
WANTED_DTYPES: tuple[Dtypes, ...] = (("float32",),)
WANTED_REDUCTIONS = ("mean", "none")


@dataclass(frozen=True)
class Selection:
    """The user's choices; None means the default."""

    losses: Sequence[Loss]
    shape: Shape
    device: str
    row_losses: Sequence[SoftmaxLoss] = ()
    shape_given: bool = False
    dtypes: Sequence[Dtypes] | None = None
    reductions: Sequence[str] | None = None
    layouts: Sequence[str] | None = None
    seed: int = 0
    full: bool = False
    few: bool = False
    covered: bool = False

    @property
    def chosen_dtypes(self) -> Sequence[Dtypes]:
        """The dtypes to try."""
        return self.dtypes or (DTYPES + MORE_DTYPES if self.full else DTYPES)

    def reductions_of(self, loss: Loss | SoftmaxLoss) -> list[str]:
        """The requested reductions that the loss has."""
        return [x for x in loss.reductions if self.reductions is None or x in self.reductions]

    def check(self, loss: Loss, **fields: object) -> Check:
        """A check on the chosen shape and device."""
        return Check(loss, shape=self.shape, device=self.device, seed=self.seed, **fields)  # type: ignore[arg-type]

    def takes(self, check: Check) -> bool:
        """True if a check is possible and requested."""
        kept = not self.few or among_few(check)
        kept &= not self.covered or check.loss in representatives() or covering.contains(check)
        return check.possible and check.has_truth and kept


def checks(selection: Selection) -> list[Check]:
    """The checks of a run without repetition, in the order of the losses."""
    plan = _everything if selection.full or selection.layouts else _once
    found = {c.id: c for loss in selection.losses for c in plan(selection, loss) if selection.takes(c)}
    return list(found.values())


def _everything(selection: Selection, loss: Loss) -> Iterator[Check]:
    # Some of the requested layouts belong to losses of rows.
    layouts = [x for x in (*LAYOUTS, EDGES) if selection.layouts is None or x in selection.layouts]
    for case, dtypes, layout in product(loss.cases, selection.chosen_dtypes, layouts):
        for reduction in selection.reductions_of(loss):
            for wanted in combinations(loss) if layout == "contiguous" else [None]:
                if layout != EDGES or reduction == "none":
                    yield selection.check(
                        loss, case=case, dtypes=dtypes, reduction=reduction, layout=layout, wanted=wanted
                    )


def _once(selection: Selection, loss: Loss) -> Iterator[Check]:
    """Every parameter case and dtype with every reduction, and every layout and choice of gradients at least once."""
    reductions = selection.reductions_of(loss)
    for case, dtypes in product(loss.cases, selection.chosen_dtypes):
        for reduction in reductions:
            yield selection.check(loss, case=case, dtypes=dtypes, reduction=reduction)
        if "none" in reductions:
            yield selection.check(loss, case=case, dtypes=dtypes, reduction="none", layout=EDGES)
        if dtypes in WANTED_DTYPES:
            for reduction, wanted in product(set_of(WANTED_REDUCTIONS, reductions), combinations(loss)):
                yield selection.check(loss, case=case, dtypes=dtypes, reduction=reduction, wanted=wanted)
    for dtypes in selection.chosen_dtypes:
        for layout, reduction in product(LAYOUTS, set_of(LAYOUT_DTYPES.get(dtypes, ()), reductions)):
            yield selection.check(loss, case=loss.cases[0], dtypes=dtypes, reduction=reduction, layout=layout)


def among_few(check: Check) -> bool:
    """True if a check remains where kernels are expensive: each loss, dtype, reduction and gradient occurs, but not
    each combination.

    Flags, layouts and choices of gradients have kernels of their own, so each meets one dtype. Parameters are numbers
    that a kernel takes, so they cost no kernel.
    """
    plain = check.layout in ("contiguous", EDGES)
    every_gradient = check.wanted is None or all(check.wanted)
    first = check.loss.values(check.loss.cases[0])
    usual = all(check.values[flag.name] == first[flag.name] for flag in check.loss.flags)
    if check.dtypes not in WANTED_DTYPES:
        return usual and plain
    laid_out = plain or (check.layout in FEW_LAYOUTS and check.reduction == "mean")
    return laid_out and (every_gradient or check.case == check.loss.cases[0])


def set_of(wanted: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """The values of ``wanted`` that are allowed."""
    return [x for x in wanted if x in allowed]


def combinations(loss: Loss) -> list[tuple[bool, ...]]:
    """Every choice of operands that require grad, from all to none."""
    return list(product((True, False), repeat=len(loss.operands)))
