"""The accuracy of losses of boxes: every pair of boxes is a result of its own.

The truth is that of :mod:`cupylosses.testing.boxes.truth`, whose sizes condition the errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from cupylosses.engines.boxes.definition import COMPONENTS, BoxLoss
from cupylosses.testing.boxes.check import BoxCheck
from cupylosses.testing.check import GIVEN
from tools.accuracy import BAR, Accuracy, Sweep, Worst, errors
from tools.exact import Figure

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BoxSweep(Sweep):
    """Pairs of boxes."""

    Definition: ClassVar = BoxLoss

    loss: BoxLoss
    count: int = 1000

    @classmethod
    def sweeps(cls, loss: BoxLoss, dtypes: Sequence[tuple[str, ...]], **where: object) -> Iterator[BoxSweep]:
        found = (cls(loss, case, names, **where) for case, names in product(loss.cases, dtypes))  # type: ignore[arg-type]
        return (x for x in found if x.check.possible)

    @property
    def check(self) -> BoxCheck:
        how = {"layout": GIVEN, "device": self.device, "seed": self.seed, "function": self.function}
        return BoxCheck(self.loss, self.case, self.dtypes, "none", shape=(self.count, COMPONENTS), **how)

    @property
    def labels(self) -> list[str]:
        return [f"{x.name}[{i}]" for x in self.loss.operands for i in range(COMPONENTS)]

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
