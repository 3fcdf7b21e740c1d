"""The checks of losses with several kinds of target."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

from comparing.matrix import LAYOUT_DTYPES, Matrix
from cupylosses.testing.check import GIVEN

#: Reductions with distinct orders of additions and distinct results.
REPEATED_AS = ("mean", "none")


class TargetMatrix(Matrix):
    """Checks of every kind of target, argument, dtype, reduction and layout.

    Attributes:
        usual: Layouts in which every argument and dtype is tried.
    """

    usual: ClassVar[Sequence[str]]

    @abstractmethod
    def cases(self, kind: str) -> list[dict[str, Any]]:
        """The definition's cases, and cases of further arguments, for one kind of target."""

    def checks(self) -> list[Any]:
        # A shape determines the layout.
        return [] if self.selection.shape and self.selection.layouts else super().checks()

    def everything(self) -> Iterator[Any]:
        if self.selection.shape:
            yield from self.once()
            return
        for base in self.bases():
            for check in self.laid_out(base, dict.fromkeys(self.dtypes, self.reductions)):
                yield from (replace(check, case=x) for x in self.cases(check.kind))

    def once(self) -> Iterator[Any]:
        """Every case and dtype with every reduction, and every layout at least once."""
        shape = self.selection.shape
        base: Any
        for base in self.bases():
            for case, dtypes, reduction in product(self.cases(base.kind), self.dtypes, self.reductions):
                check = replace(base, case=case, dtypes=dtypes, reduction=reduction)
                if shape:
                    yield replace(check, layout=GIVEN, shape=tuple(shape))
                else:
                    yield from (replace(check, layout=x) for x in self.usual)
            if not shape:
                yield from self.laid_out(base, LAYOUT_DTYPES)


def without_repetitions(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Removes repeated cases and keeps the order."""
    return [x for i, x in enumerate(cases) if x not in cases[:i]]
