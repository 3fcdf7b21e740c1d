"""The checks of losses of boxes."""

from __future__ import annotations

from typing import ClassVar

from comparing.matrix import SizedMatrix
from cupylosses.engines.boxes.definition import BoxLoss
from cupylosses.testing.boxes.check import LAYOUTS


class BoxMatrix(SizedMatrix):
    """Checks of every parameter, dtype, reduction and layout."""

    Definition: ClassVar = BoxLoss
    section = "losses of boxes"
    heading = "losses of boxes"
    layouts = tuple(LAYOUTS)
    array_layouts = ("flat", "transposed")
    usual = "flat"
    repeated_as = (("mean", "flat"), ("mean", "rows"), ("none", "strided"))
    # The checks of element-wise losses cover the other layouts; NVRTC takes seconds for each kernel of boxes.
    layouts_of_first = ("rows", "one", "strided", "broadcast")
    narrow_others = False
