"""The checks of losses of boxes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import ClassVar

from comparing.matrix import LAYOUT_DTYPES, NARROW, Matrix
from cupylosses.engines.boxes.definition import BoxLoss
from cupylosses.testing.boxes.check import GIVEN, LAYOUTS, BoxCheck

#: Layouts and reductions with distinct orders of additions.
REPEATED_AS = (("mean", "flat"), ("mean", "rows"), ("none", "strided"))


class BoxMatrix(Matrix):
    """Every parameter, dtype, reduction and layout."""

    Definition: ClassVar = BoxLoss
    section = "losses of boxes"
    heading = "losses of boxes"
    layouts = tuple(LAYOUTS)
    array_layouts = ("flat", "transposed")

    loss: BoxLoss

    def bases(self) -> list[BoxCheck]:
        shape = self.selection.shape
        fields = {"layout": GIVEN, "shape": tuple(shape)} if shape else {}
        return [BoxCheck(self.loss, self.loss.cases[0], **fields, **self.where)]

    def checks(self) -> list[BoxCheck]:
        # A shape has no layout.
        return [] if self.selection.shape and self.selection.layouts else super().checks()

    def everything(self) -> Iterator[BoxCheck]:
        if self.selection.shape:
            yield from self.once()
            return
        (base,) = self.bases()
        for case in self.loss.cases:
            yield from self.laid_out(replace(base, case=case), dict.fromkeys(self.dtypes, self.reductions))

    def once(self) -> Iterator[BoxCheck]:
        """Every case and dtype with every reduction, and every layout at least once."""
        (base,) = self.bases()
        for case, dtypes, reduction in product(self.loss.cases, self.dtypes, self.reductions):
            yield replace(base, case=case, dtypes=dtypes, reduction=reduction)
        if not self.selection.shape:
            yield from self.laid_out(base, LAYOUT_DTYPES)

    def among_few(self, check: BoxCheck) -> bool:
        """Parameters are numbers that a kernel takes; layouts have kernels of their own, for one dtype."""
        if check.dtypes != ("float32",):
            return check.layout == "flat" and check.reduction == "mean" and check.case == self.loss.cases[0]
        return check.layout in ("flat", "columns") or check.reduction == "mean"

    def among_covered(self, check: BoxCheck) -> bool:
        return True

    def repeated(self) -> Iterator[BoxCheck]:
        for base, dtypes, (reduction, layout) in product(self.bases(), self.dtypes, REPEATED_AS):
            laid = {} if self.selection.shape else {"layout": layout}
            check = replace(base, dtypes=dtypes, reduction=reduction, **laid)
            if reduction in self.reductions and self.takes(check):
                yield check

    def plain(self) -> list[BoxCheck]:
        """A float32 mean."""
        return self.bases()

    def candidates_of_line(self) -> Iterator[BoxCheck]:
        (plain,) = self.plain()
        yield from (replace(plain, case=x) for x in self.loss.cases)
        yield from (replace(plain, reduction=x) for x in ("none", "sum", "batchmean"))
        yield replace(plain, dtypes=NARROW)
        if not self.selection.shape:
            yield from (replace(plain, layout=x) for x in LAYOUTS)
