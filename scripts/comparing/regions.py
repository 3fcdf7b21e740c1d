"""The checks of region losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import ClassVar

from comparing.matrix import LAYOUT_DTYPES, NARROW, Matrix
from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.testing.regions.check import GIVEN, LAYOUTS, RegionCheck

#: Layouts with distinct orders of additions.
REPEATED = ("vectors", "volume", "many")


class RegionMatrix(Matrix):
    """Every setting of the definition's cases, dtype, reduction and layout; labels, and a target per class."""

    Definition: ClassVar = RegionLoss
    section = "losses of regions"
    heading = "losses of regions"
    layouts = tuple(LAYOUTS)
    array_layouts = ("vectors", "channels_last")

    loss: RegionLoss

    def bases(self) -> list[RegionCheck]:
        shape = self.selection.shape
        fields = {"layout": GIVEN, "shape": tuple(shape)} if shape else {}
        return [RegionCheck(self.loss, self.loss.cases[0], **fields, **self.where)]

    def checks(self) -> list[RegionCheck]:
        # A shape has no layout.
        return [] if self.selection.shape and self.selection.layouts else super().checks()

    def everything(self) -> Iterator[RegionCheck]:
        if self.selection.shape:
            yield from self.once()
            return
        (base,) = self.bases()
        for case in self.loss.cases:
            yield from self.laid_out(replace(base, case=case), dict.fromkeys(self.dtypes, self.reductions))

    def once(self) -> Iterator[RegionCheck]:
        """Every case and dtype with every reduction, and every layout at least once."""
        (base,) = self.bases()
        for case, dtypes, reduction in product(self.loss.cases, self.dtypes, self.reductions):
            yield replace(base, case=case, dtypes=dtypes, reduction=reduction)
        if not self.selection.shape:
            yield from self.laid_out(base, LAYOUT_DTYPES)

    def among_few(self, check: RegionCheck) -> bool:
        """A setting has kernels of its own, of one dtype; so has a layout."""
        if check.reduction == "sum":
            return False
        if check.dtypes != ("float32",):
            return check.layout == "vectors" and check.reduction == "mean" and check.case == self.loss.cases[0]
        return check.layout in ("vectors", "many") or check.reduction == "mean"

    def among_covered(self, check: RegionCheck) -> bool:
        return self.among_few(check)

    def repeated(self) -> Iterator[RegionCheck]:
        for base, dtypes, layout in product(self.bases(), self.dtypes, REPEATED):
            laid = {} if self.selection.shape else {"layout": layout}
            check = replace(base, dtypes=dtypes, reduction="mean", **laid)
            if "mean" in self.reductions and self.takes(check):
                yield check

    def plain(self) -> list[RegionCheck]:
        """A float32 mean."""
        return self.bases()

    def candidates_of_line(self) -> Iterator[RegionCheck]:
        (plain,) = self.plain()
        yield from (replace(plain, case=x) for x in self.loss.cases)
        yield replace(plain, reduction="none")
        yield replace(plain, dtypes=NARROW)
        yield replace(plain, dtypes=("float32", "float32"))
        if not self.selection.shape:
            yield from (replace(plain, layout=x) for x in ("many", "ignored"))
