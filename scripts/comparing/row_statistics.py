"""The checks of losses of row statistics."""

from __future__ import annotations

from typing import ClassVar

from comparing.matrix import SizedMatrix
from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.testing.row_statistics.check import LAYOUTS


class StatisticsMatrix(SizedMatrix):
    """Checks of every parameter, dtype, reduction and layout."""

    Definition: ClassVar = StatisticsLoss
    section = "losses of row statistics"
    heading = "losses of row statistics"
    layouts = tuple(LAYOUTS)
    array_layouts = ("lanes", "transposed")
    usual = "lanes"
    repeated_as = (("mean", "lanes"), ("mean", "block"), ("none", "long"))
    layouts_of_first = layouts
    layouts_of_others = ("block",)
    narrow_others = False
