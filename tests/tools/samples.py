"""Accuracy of losses whose samples, such as rows or pairs of boxes, each have a result of their own.

The points and the truth are those of the engine's check; errors are conditioned by the sizes in the truth.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from cupylosses.testing import check as checks
from tools.accuracy import BAR, Accuracy, Sweep, Worst, errors
from tools.exact import Figure

if TYPE_CHECKING:
    from torch import Tensor

Kind = TypeVar("Kind", bound="SampleSweep")


@dataclass(frozen=True)
class SampleSweep(Sweep):
    """Sweep over ``count`` samples of one shape."""

    #: The engine's class of checks.
    Check: ClassVar[type[checks.Check]]

    count: int = 1000

    @classmethod
    def sweeps(cls: type[Kind], loss: Any, dtypes: Sequence[tuple[str, ...]], **where: Any) -> Iterator[Kind]:
        found = (cls(loss, case, names, **where) for case, names in product(loss.cases, dtypes))
        return (x for x in found if x.check.possible)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the first operand."""

    @property
    def reduction(self) -> str:
        """The reduction that leaves each sample its own result."""
        return "none"

    @property
    def computed(self) -> str:
        """The dtype of the arithmetic."""
        return "float64"

    @property
    def check(self) -> checks.Check:
        how = {"layout": checks.GIVEN, "device": self.device, "seed": self.seed, "function": self.function}
        return self.Check(self.loss, self.case, self.dtypes, self.reduction, shape=self.shape, **how)

    def operands(self) -> list[Tensor]:
        return self.check.operands()

    def samples_first(self, x: Tensor) -> Tensor:
        """Returns an operand or a result with its samples in the first dimension."""
        return x

    def point(self, operands: Sequence[Tensor], result: Tensor, i: int) -> list[float]:
        """Returns the numbers of the sample to which the result's element ``i`` belongs."""
        sample = i // (result.numel() // self.count)
        return [v for x in operands for v in self.samples_first(x)[sample].double().flatten().tolist()]

    def measure(self) -> list[Accuracy]:
        import torch

        check, operands = self.check, self.operands()
        upstream = torch.ones(check.result(operands)[0], dtype=torch.float64)
        expected = check.truth(operands, upstream, "cpu")
        names = ["value", *(n for n, w in zip(check.names, check.gradients_of, strict=True) if w)]
        figures = [expected.value, *(x for x in expected.gradients if x is not None)]
        found = []
        for name, result, figure in zip(names, self.results(operands), figures, strict=True):
            truth = figure.exact, torch.zeros_like(figure.exact), figure.rms
            got, *flat = [self.samples_first(x).flatten() for x in (result, *truth)]
            conditioned, plain = errors(got, Figure(*flat), self.computed)
            i = int(conditioned.argmax())
            worst = Worst(
                float(conditioned[i]), tuple(self.point(operands, result, i)), float(got[i]), float(flat[0][i])
            )
            found.append(Accuracy(name, conditioned.numel(), int((conditioned > BAR).sum()), float(plain.max()), worst))
        return found
