"""The checks of losses of rows of logits, with each kind of target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from comparing.matrix import NARROW
from comparing.targets import REPEATED_AS, TargetMatrix, without_repetitions
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing.softmax.check import MASK, ROW_LAYOUTS, SoftmaxCheck

#: Layouts in which every argument and dtype is tried.
USUAL = ("subwarp", "label_only_rows")

#: Layouts in which arrays of another library are tried.
ARRAY_LAYOUTS = (*USUAL, "thread_per_row")

#: Loss and kind of target that are tried with every argument, reduction and layout, even with `few`. The other losses
#: share the skeletons of its kernels.
FIRST = ("cross_entropy", "indices")


class SoftmaxMatrix(TargetMatrix):
    """Checks of every kind of target, argument, dtype, reduction and layout of a loss of rows."""

    Definition: ClassVar = SoftmaxLoss
    usual = USUAL
    section = "rows of logits"
    heading = "losses of rows of logits"
    layouts = ROW_LAYOUTS
    array_layouts = ARRAY_LAYOUTS

    loss: SoftmaxLoss

    def bases(self) -> list[SoftmaxCheck]:
        return [SoftmaxCheck(self.loss, kind=x, **self.where) for x in self.loss.targets]

    def cases(self, kind: str) -> list[dict[str, Any]]:
        """The definition's cases, each further argument that changes the result, and most of them together."""
        loss = self.loss
        weights = {str(loss.weights): True} if loss.weights else {}
        scaled = {"logit_scale": {"softcap": 2.5, "logit_scale": 0.5}, "temperature": {"temperature": 2.0}}
        more: list[dict[str, Any]] = [weights, dict(scaled.get(str(loss.scale), {})), {MASK: True}]
        if kind == "indices":
            more.append({"ignore_index": 1})
        own = {
            k: v for case in loss.cases for k, v in case.items() if k not in loss.only_of_indices or kind == "indices"
        }
        every = {k: v for x in (*more, own) for k, v in x.items() if k not in (MASK, "ignore_index", "logit_scale")}
        found = [*map(dict, loss.cases), *(x for x in more if x), every]
        return without_repetitions(found)

    def among_few(self, check: SoftmaxCheck) -> bool:
        """True for checks that need few kernels; of the first loss, each option, layout and reduction occurs."""
        first = (check.loss.name, check.kind) == FIRST
        usual, plain = check.layout in USUAL, not check.case
        if not usual:
            alone = plain and check.dtypes == ("float32",) and check.reduction == "mean"
            return alone and (first or check.loss.row is None)
        if check.dtypes != ("float32",):
            return plain and check.reduction == "mean" and (first or check.dtypes == ("bfloat16",))
        if not plain:
            return check.reduction == "mean" and (first or MASK not in check.case)
        return first or check.reduction in ("mean", "none")

    def among_covered(self, check: SoftmaxCheck) -> bool:
        """True unless a check combines options of a loss other than the first with a dtype other than float32."""
        return (check.loss.name, check.kind) == FIRST or not check.case or check.dtypes == ("float32",)

    def repeated(self) -> Iterator[SoftmaxCheck]:
        """Checks of float32 without options; with `few`, only means of the first loss in the usual layouts."""
        for x in self.checks():
            if not x.case and x.dtypes == ("float32",) and x.reduction in REPEATED_AS:
                first = (x.loss.name, x.kind, x.reduction) == (*FIRST, "mean") and x.layout in USUAL
                if first or not self.selection.few:
                    yield x

    def plain(self) -> list[SoftmaxCheck]:
        """A float32 mean for each kind of target, in each usual layout that is possible."""
        drawn = [replace(base, layout=x) for base in self.bases() for x in USUAL]
        return [x for x in drawn if x.possible]

    def candidates_of_line(self) -> Iterator[SoftmaxCheck]:
        for plain in self.plain():
            first = (self.loss.name, plain.kind) == FIRST
            every = self.cases(plain.kind)
            # The longest case combines the most arguments.
            chosen = every if first else [*self.loss.cases, max(every, key=len)]
            yield from (replace(plain, case=x) for x in chosen)
            yield from (replace(plain, reduction=x) for x in ("none", "sum", "batchmean"))
            narrow = [replace(plain, dtypes=NARROW, layout=x) for x in ("block", plain.layout)]
            yield from [x for x in narrow if x.possible][:1]
            yield from (replace(plain, layout=x) for x in (ROW_LAYOUTS if first else ("thread_per_row", "windowed")))
