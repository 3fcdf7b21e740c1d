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
    """The choices of a run. ``providers`` are the rivals; ``target`` is the time for one measurement of one provider,
    in seconds; ``cases`` has substrings of the titles of the cases to measure, or nothing for all cases; ``count`` and
    ``seed`` are those of random cases.
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
        """The losses of all sections but throughput: in a quick run, those of the figures."""
        return [x for x in self.losses if not self.quick or x.name in figures.QUICK_LOSSES]

    @property
    def swept_losses(self) -> list[Any]:
        """Of these, the losses whose operands may have one shape of any size."""
        return [x for x in self.section_losses if Workload.of(x).sweeps]

    def losses_of(self, kind: type[ByEngine]) -> list[Any]:
        """The losses of an engine, by a class that belongs to it."""
        return [x for x in self.losses if isinstance(x, kind.Definition)]

    def begin(self, what: str) -> bool:
        """True if the budget allows ``what`` to begin; then prints it."""
        allowed = self.budget.allows(what)
        if allowed:
            self.say(what)
        return allowed
