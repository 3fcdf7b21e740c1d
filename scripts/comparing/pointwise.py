"""The checks of element-wise losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import ClassVar

from tools import covering
from tools.representatives import representatives

from comparing.matrix import LAYOUT_DTYPES, NARROW, Matrix, set_of
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing.check import EDGES
from cupylosses.testing.layouts import LAYOUTS, SHAPE
from cupylosses.testing.pointwise.check import PointwiseCheck

#: Further dtypes of the full product: a first operand wider than the others, two 16-bit formats neither of which
#: contains the other, and integer labels.
MORE_DTYPES = (("float32", "float16"), ("float16", "bfloat16"), ("float32", "int64"))

#: Layouts with `few`: one of each kind, and those that need no kernel of their own.
FEW_LAYOUTS = frozenset({"row", "eight_d", "zero_d", "empty"})

#: Dtypes, and reductions, in which every choice of operands that require grad is tried by default.
WANTED_DTYPES = (("float32",),)
WANTED_REDUCTIONS = ("mean", "none")

#: A shape with many blocks on any GPU, and a partial vector at the end.
REPEATED_SHAPE = (1031, 1025)

#: Reductions and layouts that add in distinct orders: over all elements, and over rows.
REPEATED_AS = (("mean", "contiguous"), ("mean", "row"), ("none", "contiguous"))


class PointwiseMatrix(Matrix):
    """Checks of every parameter, dtype, reduction, layout and choice of gradients of an element-wise loss."""

    Definition: ClassVar = Loss
    section = "losses"
    heading = "element-wise losses"
    layouts = (*LAYOUTS, EDGES)
    array_layouts = ("contiguous", "transposed", "row")

    loss: Loss

    @property
    def dtypes(self) -> tuple[tuple[str, ...], ...]:
        return super().dtypes if self.selection.dtypes or not self.selection.full else super().dtypes + MORE_DTYPES

    def bases(self) -> list[PointwiseCheck]:
        shape = self.selection.shape or SHAPE
        return [PointwiseCheck(self.loss, self.loss.cases[0], shape=shape, **self.where)]

    def everything(self) -> Iterator[PointwiseCheck]:
        (base,) = self.bases()
        for case, dtypes, layout in product(self.loss.cases, self.dtypes, self.chosen_layouts):
            for reduction in self.reductions:
                for wanted in self.combinations() if layout == "contiguous" else [None]:
                    if layout != EDGES or reduction == "none":
                        fields = {"dtypes": dtypes, "reduction": reduction, "layout": layout, "wanted": wanted}
                        yield replace(base, case=case, **fields)

    def once(self) -> Iterator[PointwiseCheck]:
        """Every case and dtype with every reduction; every layout and choice of gradients at least once."""
        (base,) = self.bases()
        for case, dtypes in product(self.loss.cases, self.dtypes):
            check = replace(base, case=case, dtypes=dtypes)
            yield from (replace(check, reduction=x) for x in self.reductions)
            if "none" in self.reductions:
                yield replace(check, reduction="none", layout=EDGES)
            if dtypes in WANTED_DTYPES:
                for reduction, wanted in product(set_of(WANTED_REDUCTIONS, self.reductions), self.combinations()):
                    yield replace(check, reduction=reduction, wanted=wanted)
        yield from (x for x in self.laid_out(base, LAYOUT_DTYPES) if x.layout != EDGES)

    def among_few(self, check: PointwiseCheck) -> bool:
        """True for checks that need few kernels.

        Flags, layouts and choices of gradients have kernels of their own, so each is tried in one dtype. Parameters are
        kernel arguments and need no kernel of their own.
        """
        plain = check.layout in ("contiguous", EDGES)
        every_gradient = check.wanted is None or all(check.wanted)
        first = check.loss.values(check.loss.cases[0])
        usual = all(check.values[flag.name] == first[flag.name] for flag in check.loss.flags)
        if check.dtypes not in WANTED_DTYPES:
            return usual and plain
        laid_out = plain or (check.layout in FEW_LAYOUTS and check.reduction == "mean")
        return laid_out and (every_gradient or check.case == check.loss.cases[0])

    def among_covered(self, check: PointwiseCheck) -> bool:
        return check.loss in representatives() or covering.contains(check)

    def repeated(self) -> Iterator[PointwiseCheck]:
        for base, dtypes, (reduction, layout) in product(self.bases(), self.dtypes, REPEATED_AS):
            check = replace(base, dtypes=dtypes, reduction=reduction, layout=layout)
            if reduction in self.reductions:
                check = check if self.selection.shape else self.large(check)
                if self.takes(check):
                    yield check

    def large(self, check: PointwiseCheck) -> PointwiseCheck:
        return check if check.device == "cpu" else replace(check, shape=REPEATED_SHAPE)

    def plain(self) -> list[PointwiseCheck]:
        """The usual call in training: a float32 mean with the gradient of the prediction."""
        return [replace(x, wanted=tuple(i == 0 for i in range(len(self.loss.operands)))) for x in self.bases()]

    def candidates_of_line(self) -> Iterator[PointwiseCheck]:
        (plain,) = self.plain()
        every = replace(plain, wanted=None)
        yield plain
        # These two share the kernels of `plain`.
        yield from (replace(plain, reduction=x, layout="transposed") for x in ("sum", "batchmean"))
        yield from (replace(every, case=x, reduction="none") for x in self.loss.cases)
        yield from (replace(every, case=x, reduction="none", layout=EDGES) for x in self.loss.cases)
        yield replace(every, dtypes=NARROW)
        if self.loss in representatives():
            # The other operands are broadcast, so their gradients are sums, whose kernels do not depend on the loss.
            yield replace(every, wanted=tuple(i > 0 for i in range(len(self.loss.operands))), layout="row")

    def combinations(self) -> list[tuple[bool, ...]]:
        """Every choice of operands that require grad, from all to none."""
        return list(product((True, False), repeat=len(self.loss.operands)))
