"""The checks of losses of rows with one line each: each loss with each kind of target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from comparing.matrix import Dtypes, Selection
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing.softmax.check import GIVEN, MASK, ROW_LAYOUTS, SoftmaxCheck

#: Dense targets may have another dtype than the logits.
DTYPES: tuple[Dtypes, ...] = (("float16",), ("bfloat16",), ("float32",), ("float64",), ("bfloat16", "float32"))

#: Dtypes and reductions that try every layout by default.
LAYOUT_DTYPES: Mapping[Dtypes, Sequence[str]] = {("float32",): ("mean", "none"), ("bfloat16",): ("mean",)}

#: The layouts in which arguments and dtypes are tried.
USUAL = ("subwarp", "label_only")

#: Reductions with distinct orders of additions and distinct results.
REPEATED_AS = ("mean", "none")

#: Layouts in which arrays of another library are tried.
ARRAY_LAYOUTS = (*USUAL, "thread_per_row")

#: With `few`: the loss that tries every layout and reduction. The others share its kernels' skeletons.
FIRST = ("cross_entropy", "indices")


def cases(loss: SoftmaxLoss, kind: str) -> list[dict[str, Any]]:
    """The cases of the definition, and each further argument that changes the result, alone and all together."""
    weights = {str(loss.weights): True} if loss.weights else {}
    scaled = {"logit_scale": {"softcap": 2.5, "logit_scale": 0.5}, "temperature": {"temperature": 2.0}}
    more: list[dict[str, Any]] = [weights, dict(scaled.get(str(loss.scale), {})), {MASK: True}]
    if kind == "indices":
        more.append({"ignore_index": 1})
    own = {k: v for case in loss.cases for k, v in case.items() if k not in loss.only_of_indices or kind == "indices"}
    every = {k: v for x in (*more, own) for k, v in x.items() if k not in (MASK, "ignore_index", "logit_scale")}
    found = [*map(dict, loss.cases), *(x for x in more if x), every]
    return [x for i, x in enumerate(found) if x not in found[:i]]


def checks(selection: Selection) -> list[SoftmaxCheck]:
    """The checks of a run without repetition, in the order of the losses."""
    found: dict[str, SoftmaxCheck] = {}
    for loss in [] if selection.shape_given and selection.layouts else selection.row_losses:
        for kind in loss.targets:
            plan = _everything if selection.full or selection.layouts else _once
            if selection.shape_given:
                plan = _given
            for check in plan(selection, loss, kind):
                kept = not selection.few or among_few(check)
                kept &= not selection.covered or among_covered(check)
                if check.possible and kept:
                    found[check.id] = check
    return list(found.values())


def repeated_checks(selection: Selection) -> list[SoftmaxCheck]:
    """Checks with distinct orders of additions; with `few`, one that has everything."""
    plain = [x for x in checks(selection) if not x.case and x.dtypes == ("float32",) and x.reduction in REPEATED_AS]
    if not selection.few:
        return plain
    return [x for x in plain if (x.loss.name, x.kind, x.reduction) == (*FIRST, "mean") and x.layout in USUAL]


def array_checks(selection: Selection, crosses: Callable[[Sequence[str], str], bool]) -> Iterator[SoftmaxCheck]:
    """One check per loss, kind of target, dtype, reduction and layout, for dtypes that cross to another library."""
    for loss in selection.row_losses:
        for kind, dtypes in product(loss.targets, _dtypes(selection)):
            if crosses(dtypes, selection.device):
                reductions = [x for x in REPEATED_AS if x in selection.reductions_of(loss)]
                for reduction, layout in product(reductions, ARRAY_LAYOUTS):
                    check = _check(selection, loss, kind, dtypes=dtypes, reduction=reduction, layout=layout)
                    if check.possible:
                        yield check


def _check(selection: Selection, loss: SoftmaxLoss, kind: str, **fields: Any) -> SoftmaxCheck:
    return SoftmaxCheck(loss, kind=kind, device=selection.device, seed=selection.seed, **fields)


def _dtypes(selection: Selection) -> Sequence[Dtypes]:
    return selection.dtypes or DTYPES


def _given(selection: Selection, loss: SoftmaxLoss, kind: str) -> Iterator[SoftmaxCheck]:
    for case, dtypes, reduction in product(cases(loss, kind), _dtypes(selection), selection.reductions_of(loss)):
        fields = {"case": case, "dtypes": dtypes, "reduction": reduction}
        yield _check(selection, loss, kind, **fields, layout=GIVEN, shape=tuple(selection.shape))


def _everything(selection: Selection, loss: SoftmaxLoss, kind: str) -> Iterator[SoftmaxCheck]:
    for check in _laid_out(selection, loss, kind, {x: selection.reductions_of(loss) for x in _dtypes(selection)}):
        for case in cases(loss, kind):
            yield replace(check, case=case)


def _once(selection: Selection, loss: SoftmaxLoss, kind: str) -> Iterator[SoftmaxCheck]:
    """Every case and dtype with every reduction, and every layout at least once."""
    for case, dtypes, reduction in product(cases(loss, kind), _dtypes(selection), selection.reductions_of(loss)):
        for layout in USUAL:
            yield _check(selection, loss, kind, case=case, dtypes=dtypes, reduction=reduction, layout=layout)
    yield from _laid_out(selection, loss, kind, LAYOUT_DTYPES)


def _laid_out(
    selection: Selection, loss: SoftmaxLoss, kind: str, reductions: Mapping[Dtypes, Sequence[str]]
) -> Iterator[SoftmaxCheck]:
    """The first case in every layout."""
    for dtypes in _dtypes(selection):
        wanted = [x for x in reductions.get(dtypes, ()) if x in selection.reductions_of(loss)]
        for layout, reduction in product(ROW_LAYOUTS, wanted):
            if selection.layouts is None or layout in selection.layouts:
                yield _check(selection, loss, kind, dtypes=dtypes, reduction=reduction, layout=layout)


def among_covered(check: SoftmaxCheck) -> bool:
    """True if a check remains in a run without particular choices: options of losses other than the first do not meet
    every dtype.
    """
    return (check.loss.name, check.kind) == FIRST or not check.case or check.dtypes == ("float32",)


def among_few(check: SoftmaxCheck) -> bool:
    """True if a check remains where kernels are expensive: every loss, target and dtype occurs, and with the first loss
    each option, layout and reduction, but not each combination.
    """
    first = (check.loss.name, check.kind) == FIRST
    usual, plain = check.layout in USUAL, not check.case
    if not usual:
        return (
            plain and check.dtypes == ("float32",) and check.reduction == "mean" and (first or check.loss.row is None)
        )
    if check.dtypes != ("float32",):
        return plain and check.reduction == "mean" and (first or check.dtypes == ("bfloat16",))
    if not plain:
        return check.reduction == "mean" and (first or MASK not in check.case)
    return first or check.reduction in ("mean", "none")
