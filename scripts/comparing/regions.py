"""The checks of region losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from comparing.matrix import SizedMatrix
from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.testing.check import Check
from cupylosses.testing.regions.check import LAYOUTS


class RegionMatrix(SizedMatrix):
    """Checks of every case of the definition, dtype, reduction and layout, with labels and with dense targets."""

    Definition: ClassVar = RegionLoss
    section = "losses of regions"
    heading = "losses of regions"
    layouts = tuple(LAYOUTS)
    array_layouts = ("vectors", "channels_last")
    usual = "vectors"
    repeated_as = (("mean", "vectors"), ("mean", "volume"), ("mean", "many"))
    of_line = ("none",)
    layouts_of_first = ("many", "ignored")
    layouts_of_others = layouts_of_first

    def among_few(self, check: Check) -> bool:
        """True for checks that need few kernels. Besides layouts, each case has kernels of its own, too."""
        return check.reduction != "sum" and super().among_few(check)

    def among_covered(self, check: Check) -> bool:
        return self.among_few(check)

    def candidates_of_line(self) -> Iterator[Check]:
        yield from super().candidates_of_line()
        (plain,) = self.plain()
        yield replace(plain, dtypes=("float32", "float32"))
