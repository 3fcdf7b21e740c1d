"""The checks of losses of sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import ClassVar

from comparing.matrix import LAYOUT_DTYPES, NARROW, Matrix
from cupylosses.engines.sequence.definition import SequenceLoss
from cupylosses.testing.sequence.check import GIVEN, LAYOUTS, SequenceCheck

#: Layouts and reductions with distinct orders of additions.
REPEATED_AS = (("mean", "frames"), ("none", "long"), ("sum", "wide"))


class SequenceMatrix(Matrix):
    """Every dtype, reduction and layout."""

    Definition: ClassVar = SequenceLoss
    section = "losses of sequences"
    heading = "losses of sequences"
    layouts = tuple(LAYOUTS)
    array_layouts = ("frames", "concatenated")

    loss: SequenceLoss

    def bases(self) -> list[SequenceCheck]:
        shape = self.selection.shape
        fields = {"layout": GIVEN, "shape": tuple(shape)} if shape else {}
        return [SequenceCheck(self.loss, self.loss.cases[0], **fields, **self.where)]

    def checks(self) -> list[SequenceCheck]:
        # A shape has no layout.
        return [] if self.selection.shape and self.selection.layouts else super().checks()

    def everything(self) -> Iterator[SequenceCheck]:
        if self.selection.shape:
            yield from self.once()
            return
        (base,) = self.bases()
        yield from self.laid_out(base, dict.fromkeys(self.dtypes, self.reductions))

    def once(self) -> Iterator[SequenceCheck]:
        """Every dtype with every reduction, and every layout at least once."""
        (base,) = self.bases()
        for dtypes, reduction in product(self.dtypes, self.reductions):
            yield replace(base, dtypes=dtypes, reduction=reduction)
        if not self.selection.shape:
            yield from self.laid_out(base, LAYOUT_DTYPES)

    def among_few(self, check: SequenceCheck) -> bool:
        """Layouts have kernels of their own, for one dtype."""
        return check.dtypes == ("float32",) or (check.layout == "frames" and check.reduction == "mean")

    def among_covered(self, check: SequenceCheck) -> bool:
        return True

    def repeated(self) -> Iterator[SequenceCheck]:
        for base, dtypes, (reduction, layout) in product(self.bases(), self.dtypes, REPEATED_AS):
            laid = {} if self.selection.shape else {"layout": layout}
            check = replace(base, dtypes=dtypes, reduction=reduction, **laid)
            if reduction in self.reductions and self.takes(check):
                yield check

    def plain(self) -> list[SequenceCheck]:
        """A float32 mean."""
        return self.bases()

    def candidates_of_line(self) -> Iterator[SequenceCheck]:
        (plain,) = self.plain()
        yield from (replace(plain, reduction=x) for x in ("none", "mean", "sum", "batchmean"))
        yield replace(plain, dtypes=NARROW)
        if not self.selection.shape:
            yield from (replace(plain, layout=x) for x in LAYOUTS)
