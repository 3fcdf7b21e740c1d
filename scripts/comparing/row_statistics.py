"""The checks of losses of row statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import ClassVar

from comparing.matrix import LAYOUT_DTYPES, NARROW, Matrix
from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.testing.row_statistics.check import GIVEN, LAYOUTS, StatisticsCheck

#: Layouts and reductions with distinct orders of additions.
REPEATED_AS = (("mean", "lanes"), ("mean", "block"), ("none", "long"))


class StatisticsMatrix(Matrix):
    """Every parameter, dtype, reduction and layout."""

    Definition: ClassVar = StatisticsLoss
    section = "losses of row statistics"
    heading = "losses of row statistics"
    layouts = tuple(LAYOUTS)
    array_layouts = ("lanes", "transposed")

    loss: StatisticsLoss

    def bases(self) -> list[StatisticsCheck]:
        shape = self.selection.shape
        fields = {"layout": GIVEN, "shape": tuple(shape)} if shape else {}
        return [StatisticsCheck(self.loss, self.loss.cases[0], **fields, **self.where)]

    def checks(self) -> list[StatisticsCheck]:
        # A shape has no layout.
        return [] if self.selection.shape and self.selection.layouts else super().checks()

    def everything(self) -> Iterator[StatisticsCheck]:
        if self.selection.shape:
            yield from self.once()
            return
        (base,) = self.bases()
        for case in self.loss.cases:
            yield from self.laid_out(replace(base, case=case), dict.fromkeys(self.dtypes, self.reductions))

    def once(self) -> Iterator[StatisticsCheck]:
        """Every case and dtype with every reduction, and every layout at least once."""
        (base,) = self.bases()
        for case, dtypes, reduction in product(self.loss.cases, self.dtypes, self.reductions):
            yield replace(base, case=case, dtypes=dtypes, reduction=reduction)
        if not self.selection.shape:
            yield from self.laid_out(base, LAYOUT_DTYPES)

    def among_few(self, check: StatisticsCheck) -> bool:
        """Parameters are numbers that a kernel takes; layouts have kernels of their own, for one dtype."""
        if check.dtypes != ("float32",):
            return check.layout == "lanes" and check.reduction == "mean" and check.case == self.loss.cases[0]
        return check.layout in ("lanes", "block") or check.reduction == "mean"

    def among_covered(self, check: StatisticsCheck) -> bool:
        return True

    def repeated(self) -> Iterator[StatisticsCheck]:
        for base, dtypes, (reduction, layout) in product(self.bases(), self.dtypes, REPEATED_AS):
            laid = {} if self.selection.shape else {"layout": layout}
            check = replace(base, dtypes=dtypes, reduction=reduction, **laid)
            if reduction in self.reductions and self.takes(check):
                yield check

    def plain(self) -> list[StatisticsCheck]:
        """A float32 mean."""
        return self.bases()

    def candidates_of_line(self) -> Iterator[StatisticsCheck]:
        (plain,) = self.plain()
        yield from (replace(plain, case=x) for x in self.loss.cases)
        yield from (replace(plain, reduction=x) for x in ("none", "sum", "batchmean"))
        yield replace(plain, dtypes=NARROW)
        if not self.selection.shape:
            yield from (replace(plain, layout=x) for x in LAYOUTS)
