"""The checks of losses of boxes."""

from __future__ import annotations

from typing import ClassVar

from comparing.matrix import SizedMatrix
from cupylosses.engines.boxes.definition import BoxLoss
from cupylosses.testing.boxes.check import LAYOUTS


class BoxMatrix(SizedMatrix):
    """Every parameter, dtype, reduction and layout."""

    Definition: ClassVar = BoxLoss
    section = "losses of boxes"
    heading = "losses of boxes"
    layouts = tuple(LAYOUTS)
    array_layouts = ("flat", "transposed")
    usual = "flat"
    repeated_as = (("mean", "flat"), ("mean", "rows"), ("none", "strided"))
    layouts_of_first = layouts
    # NVRTC takes seconds for one of these.
    narrow_others = False
