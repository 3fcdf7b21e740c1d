"""The checks of losses of rows of scores that labels are to exceed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

from comparing.matrix import LAYOUT_DTYPES, NARROW, Matrix
from cupylosses.engines.row_margin.definition import MarginLoss
from cupylosses.testing.row_margin.check import GIVEN, LAYOUTS, MarginCheck

#: Layouts and reductions with distinct orders of additions.
REPEATED_AS = (("mean", "subwarp"), ("mean", "block"), ("none", "long lists"))


def cases(loss: MarginLoss) -> list[dict[str, Any]]:
    """The cases of the definition, and each further argument that changes the result, alone and all together."""
    more: list[dict[str, Any]] = [{"mask": True}]
    if not loss.several:
        more += [{"weight": True}, {"ignore_index": 1}]
    every = {k: v for case in loss.cases for k, v in case.items()} | {k: v for x in more for k, v in x.items()}
    return [*map(dict, loss.cases), *more, every]


class MarginMatrix(Matrix):
    """Every parameter, dtype, reduction and layout."""

    Definition: ClassVar = MarginLoss
    section = "losses of rows of scores"
    heading = "losses of rows of scores"
    layouts = tuple(LAYOUTS)
    array_layouts = ("subwarp", "apart")

    loss: MarginLoss

    def bases(self) -> list[MarginCheck]:
        shape = self.selection.shape
        fields = {"layout": GIVEN, "shape": tuple(shape)} if shape else {}
        return [MarginCheck(self.loss, self.loss.cases[0], **fields, **self.where)]

    def checks(self) -> list[MarginCheck]:
        # A shape has no layout.
        return [] if self.selection.shape and self.selection.layouts else super().checks()

    def everything(self) -> Iterator[MarginCheck]:
        if self.selection.shape:
            yield from self.once()
            return
        (base,) = self.bases()
        for case in cases(self.loss):
            yield from self.laid_out(replace(base, case=case), dict.fromkeys(self.dtypes, self.reductions))

    def once(self) -> Iterator[MarginCheck]:
        """Every case and dtype with every reduction, and every layout at least once."""
        (base,) = self.bases()
        for case, dtypes, reduction in product(cases(self.loss), self.dtypes, self.reductions):
            yield replace(base, case=case, dtypes=dtypes, reduction=reduction)
        if not self.selection.shape:
            yield from self.laid_out(base, LAYOUT_DTYPES)

    def among_few(self, check: MarginCheck) -> bool:
        """Layouts have kernels of their own, for one dtype and case."""
        if check.dtypes != ("float32",):
            return check.layout == "subwarp" and check.reduction == "mean" and check.case == self.loss.cases[0]
        return check.layout == "subwarp" or (check.reduction == "mean" and not check.case)

    def among_covered(self, check: MarginCheck) -> bool:
        return True

    def repeated(self) -> Iterator[MarginCheck]:
        for base, dtypes, (reduction, layout) in product(self.bases(), self.dtypes, REPEATED_AS):
            laid = {} if self.selection.shape else {"layout": layout}
            check = replace(base, dtypes=dtypes, reduction=reduction, **laid)
            if reduction in self.reductions and self.takes(check):
                yield check

    def plain(self) -> list[MarginCheck]:
        """A float32 mean."""
        return self.bases()

    def candidates_of_line(self) -> Iterator[MarginCheck]:
        (plain,) = self.plain()
        yield from (replace(plain, case=x) for x in cases(self.loss))
        yield from (replace(plain, reduction=x) for x in ("none", "sum", "batchmean"))
        yield replace(plain, dtypes=NARROW)
        if not self.selection.shape:
            yield from (replace(plain, layout=x) for x in LAYOUTS)
