"""The choices of a benchmark run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarking import figures
from benchmarking.timing import Budget
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.softmax.definition import SoftmaxLoss


@dataclass(frozen=True)
class Run:
    """The choices of a run. ``providers`` are the rivals; ``target`` is the time for one measurement of one provider,
    in seconds.
    """

    losses: Sequence[Loss]
    row_losses: Sequence[SoftmaxLoss]
    dtypes: Sequence[str]
    sizes: Sequence[int]
    compile_sizes: Sequence[int]
    modes: Sequence[str]
    providers: Sequence[str]
    quick: bool
    target: float
    budget: Budget
    say: Callable[[str], None]

    @property
    def section_losses(self) -> list[Loss]:
        """The losses of all sections but throughput: in a quick run, those of the figures."""
        return [x for x in self.losses if not self.quick or x.name in figures.LOSSES]

    @property
    def section_row_losses(self) -> list[SoftmaxLoss]:
        """The losses of rows of these sections."""
        return [x for x in self.row_losses if not self.quick or x.name == "cross_entropy"]

    def begin(self, what: str) -> bool:
        """True if the budget allows ``what`` to begin; then prints it."""
        allowed = self.budget.allows(what)
        if allowed:
            self.say(what)
        return allowed
