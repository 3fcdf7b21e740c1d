"""The accuracy of losses of row statistics: every row of a few features is a result of its own.

The truth is that of :mod:`cupylosses.testing.row_statistics.truth`, whose sizes condition the errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.testing.check import GIVEN
from cupylosses.testing.row_statistics.check import StatisticsCheck
from tools.accuracy import BAR, Accuracy, Sweep, Worst, errors
from tools.exact import Figure

if TYPE_CHECKING:
    from torch import Tensor

#: Features of a row: more than one, and no multiple of a vector.
FEATURES = 5


@dataclass(frozen=True)
class StatisticsSweep(Sweep):
    """Rows of vectors."""

    Definition: ClassVar = StatisticsLoss

    loss: StatisticsLoss
    count: int = 1000

    @classmethod
    def sweeps(
        cls, loss: StatisticsLoss, dtypes: Sequence[tuple[str, ...]], **where: object
    ) -> Iterator[StatisticsSweep]:
        found = (cls(loss, case, names, **where) for case, names in product(loss.cases, dtypes))  # type: ignore[arg-type]
        return (x for x in found if x.check.possible)

    @property
    def check(self) -> StatisticsCheck:
        how = {"layout": GIVEN, "device": self.device, "seed": self.seed, "function": self.function}
        return StatisticsCheck(self.loss, self.case, self.dtypes, "none", shape=(self.count, FEATURES), **how)

    @property
    def labels(self) -> list[str]:
        found: list[str] = []
        for x in self.loss.operands:
            label = x.name in self.loss.row_operands
            found += [x.name] if label else [f"{x.name}[{i}]" for i in range(FEATURES)]
        return found

    def operands(self) -> list[Tensor]:
        return self.check.operands()

    def measure(self) -> list[Accuracy]:
        import torch

        check, operands = self.check, self.operands()
        expected = check.truth(operands, torch.ones(self.count, dtype=torch.float64), "cpu")
        names = ["value", *(n for n, w in zip(check.names, check.gradients_of, strict=True) if w)]
        figures = [expected.value, *(x for x in expected.gradients if x is not None)]
        at = torch.cat([x.double().cpu().reshape(self.count, -1) for x in operands], 1)
        found = []
        for name, result, figure in zip(names, self.results(operands), figures, strict=True):
            flat = [x.flatten() for x in (figure.exact, torch.zeros_like(figure.exact), figure.rms)]
            conditioned, plain = errors(result.flatten(), Figure(*flat), "float64")  # type: ignore[arg-type]
            i = int(conditioned.argmax())
            row = i // (result.numel() // self.count)
            got, wanted = float(result.flatten()[i]), float(flat[0][i])
            worst = Worst(float(conditioned[i]), tuple(at[row].tolist()), got, wanted)
            found.append(Accuracy(name, conditioned.numel(), int((conditioned > BAR).sum()), float(plain.max()), worst))
        return found
