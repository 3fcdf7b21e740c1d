"""The checks of softmax losses of a linear layer, with each kind of target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from comparing.matrix import NARROW
from comparing.targets import REPEATED_AS, TargetMatrix, without_repetitions
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from cupylosses.testing.linear_softmax.check import LAYOUTS, LinearSoftmaxCheck

#: Layouts in which every argument and dtype is tried.
USUAL = ("one_chunk", "chunks")


class LinearSoftmaxMatrix(TargetMatrix):
    """Checks of every kind of target, argument, dtype, reduction and layout."""

    Definition: ClassVar = LinearSoftmaxLoss
    usual = USUAL
    section = "rows of logits of a linear layer"
    heading = "losses of a linear layer"
    layouts = tuple(LAYOUTS)
    array_layouts = USUAL

    loss: LinearSoftmaxLoss

    def bases(self) -> list[LinearSoftmaxCheck]:
        return [LinearSoftmaxCheck(self.loss, kind=x, **self.where) for x in self.loss.of_logits.targets]

    def cases(self, kind: str) -> list[dict[str, Any]]:
        """The definition's cases, each further argument that changes the result, and most of them together."""
        more: list[dict[str, Any]] = [
            {"linear_bias": True},
            {"weight": True},
            {"softcap": 2.5, "logit_scale": 0.5},
            {"mask": True},
            {"logits_dtype": "float32"},
        ]
        if kind == "indices":
            more.append({"ignore_index": 1})
        only = self.loss.of_logits.only_of_indices
        own = {k: v for case in self.loss.cases for k, v in case.items() if k not in only or kind == "indices"}
        every = {**own, "linear_bias": True, "weight": True, "softcap": 2.5}
        found = [*map(dict, self.loss.cases), *more, every]
        return without_repetitions(found)

    def among_few(self, check: LinearSoftmaxCheck) -> bool:
        """True for checks in which each case, dtype, reduction, layout and kind of target occurs, but not combined."""
        float32 = check.dtypes == ("float32",)
        if check.case:
            wide = "logits_dtype" in check.case and check.dtypes == NARROW
            return check.layout == "chunks" and check.reduction == "mean" and (float32 or wide)
        if not float32:
            return check.layout == "chunks" and check.reduction == "mean" and check.kind == "indices"
        return check.layout == "chunks" or (check.reduction == "mean" and check.kind == "indices")

    def among_covered(self, check: LinearSoftmaxCheck) -> bool:
        """True unless a check combines options with a dtype other than float32 for dense targets."""
        return check.kind == "indices" or not check.case or check.dtypes == ("float32",)

    def repeated(self) -> Iterator[LinearSoftmaxCheck]:
        for x in self.checks():
            if not x.case and x.dtypes == ("float32",) and x.reduction in REPEATED_AS:
                once = x.kind == "indices" and x.layout == "chunks"
                if once or not self.selection.few:
                    yield x

    def plain(self) -> list[LinearSoftmaxCheck]:
        """A float32 mean for each kind of target, in chunks."""
        return [replace(base, layout="chunks") for base in self.bases()]

    def candidates_of_line(self) -> Iterator[LinearSoftmaxCheck]:
        for plain in self.plain():
            indices = plain.kind == "indices"
            every = self.cases(plain.kind)
            # The longest case combines the most arguments.
            yield from (replace(plain, case=x) for x in (every if indices else [{}, max(every, key=len)]))
            yield from (replace(plain, reduction=x) for x in ("none", "sum", "batchmean"))
            yield replace(plain, dtypes=NARROW)
            yield replace(plain, dtypes=NARROW, case={"logits_dtype": "float32"})
            yield from (replace(plain, layout=x) for x in (LAYOUTS if indices else ("one_chunk",)))
