"""The checks of a run: those with a line each, every value once or the full product, and those behind the one line of a
loss.

The number of kernels limits the latter, since each takes a tenth to a half of a second to compile. They share kernels
where possible, and `--full` has the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

from cupylosses.definition.base import Definition
from cupylosses.definition.registry import registry
from cupylosses.testing.by_engine import ByEngine
from cupylosses.testing.check import GIVEN, Check

Dtypes = tuple[str, ...]

#: The last one mixes dtypes: the first operand is narrower than the others.
DTYPES: tuple[Dtypes, ...] = (("float16",), ("bfloat16",), ("float32",), ("float64",), ("bfloat16", "float32"))

#: The dtype beside float32 in the line of a loss: it covers rounding to 16 bits and the kernels' vectors of eight.
NARROW: Dtypes = ("bfloat16",)

#: Dtypes and reductions that try every layout by default. A kernel takes about 0.1 s to compile, and each layout has
#: its own. The second dtype has the widest vectors.
LAYOUT_DTYPES: Mapping[Dtypes, Sequence[str]] = {("float32",): ("mean", "none"), ("bfloat16",): ("mean",)}

#: Reductions in which arrays of another library are tried.
ARRAY_REDUCTIONS = ("mean", "none")


@dataclass(frozen=True)
class Selection:
    """The user's choices; None means the default."""

    device: str = "cpu"
    seed: int = 0
    shape: tuple[int, ...] | None = None
    dtypes: Sequence[Dtypes] | None = None
    reductions: Sequence[str] | None = None
    layouts: Sequence[str] | None = None
    full: bool = False
    few: bool = False
    covered: bool = False


class Matrix(ByEngine, ABC, modules="comparing.{}"):
    """The checks of one loss; ``Matrix(loss, selection)`` makes that of the loss's engine.

    Attributes:
        section: Title of the section with a line for each check of such losses.
        heading: Title of the table with a line for each such loss.
        layouts: Names of all layouts.
        array_layouts: Layouts in which arrays of another library are tried.
    """

    section: ClassVar[str]
    heading: ClassVar[str]
    layouts: ClassVar[Sequence[str]]
    array_layouts: ClassVar[Sequence[str]]

    def __init__(self, loss: Definition, selection: Selection) -> None:
        self.loss, self.selection = loss, selection
        #: The requested reductions that the loss has.
        self.reductions = [x for x in loss.reductions if selection.reductions is None or x in selection.reductions]
        #: Some of the requested layouts belong to losses of other engines.
        self.chosen_layouts = [x for x in self.layouts if selection.layouts is None or x in selection.layouts]
        self.where: Mapping[str, Any] = {"device": selection.device, "seed": selection.seed}

    @property
    def dtypes(self) -> tuple[Dtypes, ...]:
        """The dtypes to try."""
        return tuple(self.selection.dtypes or DTYPES)

    # Supplied by the engine's matrix

    @abstractmethod
    def bases(self) -> Sequence[Check]:
        """A float32 mean for each kind of target, of which all other checks are copies."""

    @abstractmethod
    def everything(self) -> Iterator[Check]:
        """The full product."""

    @abstractmethod
    def once(self) -> Iterator[Check]:
        """Every value of every axis at least once."""

    @abstractmethod
    def among_few(self, check: Check) -> bool:
        """True if a check remains where kernels are expensive: each loss, dtype, reduction and gradient occurs, but not
        each combination.
        """

    @abstractmethod
    def among_covered(self, check: Check) -> bool:
        """True if a check remains in a run without particular choices."""

    @abstractmethod
    def repeated(self) -> Iterator[Check]:
        """Checks with distinct orders of additions, to be repeated."""

    @abstractmethod
    def plain(self) -> Sequence[Check]:
        """The usual call in training, for each kind of target."""

    @abstractmethod
    def candidates_of_line(self) -> Iterator[Check]:
        """The checks behind the line of the loss, possible or not."""

    def large(self, check: Check) -> Check:
        """A copy of a check with many blocks on a GPU, if shapes of its layout may be of any size."""
        return check

    # Common

    def takes(self, check: Check) -> bool:
        """True if a check is possible and requested."""
        kept = not self.selection.few or self.among_few(check)
        kept &= not self.selection.covered or self.among_covered(check)
        return check.possible and check.has_truth and kept

    def checks(self) -> list[Check]:
        """The checks with a line each, without repetition."""
        found = self.everything() if self.selection.full or self.selection.layouts else self.once()
        return list({x.id: x for x in found if self.takes(x)}.values())

    def line(self) -> list[Check]:
        """The checks behind the line of the loss, without repetition."""
        return list({x.id: x for x in self.candidates_of_line() if x.possible and x.has_truth}.values())

    def laid_out(self, base: Check, reductions: Mapping[Dtypes, Sequence[str]]) -> Iterator[Check]:
        """A check in every layout, for these dtypes and reductions."""
        for dtypes in self.dtypes:
            wanted = set_of(reductions.get(dtypes, ()), self.reductions)
            for layout, reduction in product(self.chosen_layouts, wanted):
                yield replace(base, dtypes=dtypes, reduction=reduction, layout=layout)

    def arrays(self) -> Iterator[Check]:
        """One check per kind of target, dtype, reduction and layout, for arrays of another library."""
        reductions = set_of(ARRAY_REDUCTIONS, self.reductions)
        for base, *chosen in product(self.bases(), self.dtypes, reductions, self.array_layouts):
            check = replace(base, **dict(zip(("dtypes", "reduction", "layout"), chosen, strict=True)))
            if check.possible:
                yield check


class SizedMatrix(Matrix):
    """The checks of losses whose layouts are a table of sizes, or a requested shape.

    Attributes:
        usual: The layout with every case and dtype.
        repeated_as: Reductions and layouts with distinct orders of additions.
        of_line: Reductions of the checks behind a line.
        layouts_of_first: The layouts behind the line of the engine's first loss, whose skeletons of kernels the others
            share.
        layouts_of_others: The layouts behind the lines of the others.
        narrow_others: True if these have a check in 16 bits, too.
    """

    usual: ClassVar[str]
    repeated_as: ClassVar[Sequence[tuple[str, str]]]
    of_line: ClassVar[Sequence[str]] = ("none", "sum", "batchmean")
    layouts_of_first: ClassVar[Sequence[str]]
    layouts_of_others: ClassVar[Sequence[str]] = ()
    narrow_others: ClassVar[bool] = True

    @property
    def cases(self) -> Sequence[Mapping[str, Any]]:
        """The parameters, flags and further arguments to try, the defaults first."""
        return self.loss.cases

    def bases(self) -> list[Check]:
        shape = self.selection.shape
        fields = {"layout": GIVEN, "shape": tuple(shape)} if shape else {"layout": self.usual}
        return [Check(self.loss, self.cases[0], **fields, **self.where)]

    def checks(self) -> list[Check]:
        # A shape has no layout.
        return [] if self.selection.shape and self.selection.layouts else super().checks()

    def everything(self) -> Iterator[Check]:
        if self.selection.shape:
            yield from self.once()
            return
        (base,) = self.bases()
        for case in self.cases:
            yield from self.laid_out(replace(base, case=case), dict.fromkeys(self.dtypes, self.reductions))

    def once(self) -> Iterator[Check]:
        """Every case and dtype with every reduction, and every layout at least once."""
        (base,) = self.bases()
        for case, dtypes, reduction in product(self.cases, self.dtypes, self.reductions):
            yield replace(base, case=case, dtypes=dtypes, reduction=reduction)
        if not self.selection.shape:
            yield from self.laid_out(base, LAYOUT_DTYPES)

    def among_few(self, check: Check) -> bool:
        """Layouts have kernels of their own, for one dtype. Parameters are numbers that a kernel takes."""
        if check.dtypes != ("float32",):
            return check.layout == self.usual and check.reduction == "mean" and check.case == self.cases[0]
        return check.layout in (self.usual, *self.layouts_of_others) or check.reduction == "mean"

    def among_covered(self, check: Check) -> bool:
        return True

    def repeated(self) -> Iterator[Check]:
        for base, dtypes, (reduction, layout) in product(self.bases(), self.dtypes, self.repeated_as):
            laid = {} if self.selection.shape else {"layout": layout}
            check = replace(base, dtypes=dtypes, reduction=reduction, **laid)
            if reduction in self.reductions and self.takes(check):
                yield check

    def plain(self) -> list[Check]:
        """A float32 mean."""
        return self.bases()

    def candidates_of_line(self) -> Iterator[Check]:
        (plain,) = self.plain()
        first = self.loss is next(iter(registry(self.Definition).values()))
        yield from (replace(plain, case=x) for x in self.cases)
        yield from (replace(plain, reduction=x) for x in self.of_line if x in self.loss.reductions)
        if first or self.narrow_others:
            yield replace(plain, dtypes=NARROW)
        if not self.selection.shape:
            yield from (replace(plain, layout=x) for x in (self.layouts_of_first if first else self.layouts_of_others))


def set_of(wanted: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """The values of ``wanted`` that are allowed."""
    return [x for x in wanted if x in allowed]
