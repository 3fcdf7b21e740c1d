"""The checks of losses of sequences."""

from __future__ import annotations

from typing import ClassVar

from comparing.matrix import SizedMatrix
from cupylosses.engines.sequence.definition import SequenceLoss
from cupylosses.testing.sequence.check import LAYOUTS


class SequenceMatrix(SizedMatrix):
    """Checks of every dtype, reduction and layout."""

    Definition: ClassVar = SequenceLoss
    section = "losses of sequences"
    heading = "losses of sequences"
    layouts = tuple(LAYOUTS)
    array_layouts = ("frames", "concatenated")
    usual = "frames"
    repeated_as = (("mean", "frames"), ("none", "long"), ("sum", "wide"))
    layouts_of_first = layouts
    layouts_of_others = ("long", "wide")
