"""The choices of a benchmark run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarking import figures
from benchmarking.timing import Budget
from benchmarking.workloads import Workload
from cupylosses.definition.base import Definition
from cupylosses.testing.by_engine import ByEngine


@dataclass(frozen=True)
class Run:
    """The choices of a run.

    Attributes:
        losses: Losses to measure.
        dtypes: Dtypes to measure.
        sizes: Sizes of element-wise losses, as powers of two.
        compile_sizes: Sizes at which torch.compile is measured, as powers of two.
        modes: Modes of the throughput sections.
        providers: Rivals to measure.
        quick: True to measure only the project's figures.
        target: Seconds for one measurement of one provider.
        budget: The time after which no measurement begins.
        say: Prints a line.
        cases: Substrings of the titles of the off-headline cases to measure; empty for all.
        count: Number of random cases.
        seed: Seed of random cases.
    """

    losses: Sequence[Definition]
    dtypes: Sequence[str]
    sizes: Sequence[int]
    compile_sizes: Sequence[int]
    modes: Sequence[str]
    providers: Sequence[str]
    quick: bool
    target: float
    budget: Budget
    say: Callable[[str], None]
    cases: Sequence[str] = ()
    count: int = 0
    seed: int = 0

    @property
    def section_losses(self) -> list[Definition]:
        """The losses of the sections other than throughput; in a quick run, only those of the figures."""
        return [x for x in self.losses if not self.quick or x.name in figures.QUICK_LOSSES]

    @property
    def swept_losses(self) -> list[Any]:
        """The `section_losses` whose operands may share one shape of any size."""
        return [x for x in self.section_losses if Workload.of(x).sweeps]

    def losses_of(self, kind: type[ByEngine]) -> list[Any]:
        """The losses of the engine that ``kind`` belongs to."""
        return [x for x in self.losses if isinstance(x, kind.Definition)]

    def begin(self, what: str) -> bool:
        """Returns True, and prints ``what``, if the budget allows it to begin."""
        allowed = self.budget.allows(what)
        if allowed:
            self.say(what)
        return allowed
