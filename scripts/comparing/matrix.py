"""The selection of checks: for runs with one line per check, and for the one line of each loss.

With one line per check, every value of every axis occurs at least once, or the full product runs. The checks of a
loss's one line are limited by their number of kernels, since each takes a tenth to half of a second to compile. They
share kernels where possible; `--full` has the rest.
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

#: Dtypes to try. In the last entry, the first operand is narrower than the others.
DTYPES: tuple[Dtypes, ...] = (("float16",), ("bfloat16",), ("float32",), ("float64",), ("bfloat16", "float32"))

#: The second dtype in the line of a loss, after float32: covers rounding to 16 bits and vectors of eight elements.
NARROW: Dtypes = ("bfloat16",)

#: Dtypes and reductions in which every layout is tried by default. A kernel takes about 0.1 s to compile, and each
#: layout has its own. The second dtype has the widest vectors.
LAYOUT_DTYPES: Mapping[Dtypes, Sequence[str]] = {("float32",): ("mean", "none"), ("bfloat16",): ("mean",)}

#: Reductions in which arrays of another library are tried.
ARRAY_REDUCTIONS = ("mean", "none")


@dataclass(frozen=True)
class Selection:
    """The user's choices; None means the default.

    Attributes:
        device: "cuda" or "cpu".
        seed: Seed of the random operands.
        shape: Shape of the operands, instead of layouts.
        dtypes: Dtypes to try.
        reductions: Reductions to try.
        layouts: Layouts to try.
        full: True for the full product instead of every value once.
        few: True to keep only the checks that `Matrix.among_few` selects.
        covered: True to keep only the checks that `Matrix.among_covered` selects.
    """

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
    """The checks of one loss; ``Matrix(loss, selection)`` makes the matrix of the loss's engine.

    Attributes:
        section: Title of the section with one line per check of the engine's losses.
        heading: Title of the table with one line per loss of the engine.
        layouts: Names of all layouts.
        array_layouts: Layouts in which arrays of another library are tried.
    """

    section: ClassVar[str]
    heading: ClassVar[str]
    layouts: ClassVar[Sequence[str]]
    array_layouts: ClassVar[Sequence[str]]

    def __init__(self, loss: Definition, selection: Selection) -> None:
        self.loss, self.selection = loss, selection
        #: The requested reductions that the loss supports.
        self.reductions = [x for x in loss.reductions if selection.reductions is None or x in selection.reductions]
        #: The requested layouts that this engine has; others belong to other engines.
        self.chosen_layouts = [x for x in self.layouts if selection.layouts is None or x in selection.layouts]
        self.where: Mapping[str, Any] = {"device": selection.device, "seed": selection.seed}

    @property
    def dtypes(self) -> tuple[Dtypes, ...]:
        """The dtypes to try."""
        return tuple(self.selection.dtypes or DTYPES)

    # Supplied by the engine's matrix

    @abstractmethod
    def bases(self) -> Sequence[Check]:
        """A float32 mean for each kind of target; all other checks are modified copies of one of these."""

    @abstractmethod
    def everything(self) -> Iterator[Check]:
        """The full product."""

    @abstractmethod
    def once(self) -> Iterator[Check]:
        """Every value of every axis at least once."""

    @abstractmethod
    def among_few(self, check: Check) -> bool:
        """True if a check runs even where kernels are expensive.

        Each loss, dtype, reduction and gradient occurs, but not each combination.
        """

    @abstractmethod
    def among_covered(self, check: Check) -> bool:
        """True if a check runs although the user made no particular choices."""

    @abstractmethod
    def repeated(self) -> Iterator[Check]:
        """Checks to repeat, which add in distinct orders."""

    @abstractmethod
    def plain(self) -> Sequence[Check]:
        """The usual call in training, for each kind of target."""

    @abstractmethod
    def candidates_of_line(self) -> Iterator[Check]:
        """Checks for the one line of the loss, including impossible ones."""

    def large(self, check: Check) -> Check:
        """A copy of a check whose shape needs many blocks on a GPU, if its layout allows shapes of any size."""
        return check

    # Common

    def takes(self, check: Check) -> bool:
        """True if a check is possible and requested."""
        kept = not self.selection.few or self.among_few(check)
        kept &= not self.selection.covered or self.among_covered(check)
        return check.possible and check.has_truth and kept

    def checks(self) -> list[Check]:
        """The checks of a run with one line per check, each once."""
        found = self.everything() if self.selection.full or self.selection.layouts else self.once()
        return list({x.id: x for x in found if self.takes(x)}.values())

    def line(self) -> list[Check]:
        """The checks that the one line of the loss sums up, each once."""
        return list({x.id: x for x in self.candidates_of_line() if x.possible and x.has_truth}.values())

    def laid_out(self, base: Check, reductions: Mapping[Dtypes, Sequence[str]]) -> Iterator[Check]:
        """``base`` in every chosen layout, for the dtypes and reductions in ``reductions`` that the selection has."""
        for dtypes in self.dtypes:
            wanted = set_of(reductions.get(dtypes, ()), self.reductions)
            for layout, reduction in product(self.chosen_layouts, wanted):
                yield replace(base, dtypes=dtypes, reduction=reduction, layout=layout)

    def arrays(self) -> Iterator[Check]:
        """Checks with arrays of another library: one per kind of target, dtype, reduction and layout."""
        reductions = set_of(ARRAY_REDUCTIONS, self.reductions)
        for base, *chosen in product(self.bases(), self.dtypes, reductions, self.array_layouts):
            check = replace(base, **dict(zip(("dtypes", "reduction", "layout"), chosen, strict=True)))
            if check.possible:
                yield check


class SizedMatrix(Matrix):
    """The checks of losses whose layouts are a table of sizes, or a requested shape.

    Attributes:
        usual: Layout in which every case and dtype is tried.
        repeated_as: Reductions and layouts that add in distinct orders.
        of_line: Reductions in the line of a loss, besides the mean.
        layouts_of_first: Layouts in the line of the engine's first loss. Its other losses share the kernel skeletons.
        layouts_of_others: Layouts in the lines of the engine's other losses.
        narrow_others: True if the lines of the other losses include a 16-bit check, too.
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
        """True for checks that need few kernels.

        Layouts have kernels of their own, so each is tried in one dtype. Parameters are kernel arguments and need no
        kernel of their own.
        """
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
