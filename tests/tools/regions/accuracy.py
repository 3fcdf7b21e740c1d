"""The accuracy of region losses: each sample and class is a result of its own.

The truth is that of :mod:`cupylosses.testing.regions.truth`, whose sizes condition the errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.testing.check import GIVEN
from cupylosses.testing.regions.check import RegionCheck
from tools.accuracy import BAR, Accuracy, Sweep, Worst, errors
from tools.exact import Figure

if TYPE_CHECKING:
    from torch import Tensor

#: Classes and voxels of a sample.
CLASSES, VOXELS = 3, 64


@dataclass(frozen=True)
class RegionSweep(Sweep):
    """Samples of a few voxels."""

    Definition: ClassVar = RegionLoss

    loss: RegionLoss
    count: int = 100

    @classmethod
    def sweeps(cls, loss: RegionLoss, dtypes: Sequence[tuple[str, ...]], **where: object) -> Iterator[RegionSweep]:
        found = (cls(loss, case, names[:1], **where) for case, names in product(loss.cases, dtypes))  # type: ignore[arg-type]
        return (x for x in dict.fromkeys(found) if x.check.possible)

    def __hash__(self) -> int:
        return hash((self.loss, self.dtypes, tuple(self.case.items())))

    @property
    def check(self) -> RegionCheck:
        how = {"layout": GIVEN, "device": self.device, "seed": self.seed, "function": self.function}
        reduction = "mean" if self.loss.has_voxels else "none"
        return RegionCheck(self.loss, self.case, self.dtypes, reduction, shape=(self.count, CLASSES, VOXELS), **how)

    @property
    def labels(self) -> list[str]:
        return ["sample", "class"]

    def operands(self) -> list[Tensor]:
        return self.check.operands()

    def measure(self) -> list[Accuracy]:
        import torch

        check, operands = self.check, self.operands()
        upstream = torch.ones((), dtype=torch.float64)
        expected = check.truth(operands, upstream, "cpu")
        names = ["value", *(n for n, w in zip(check.names, check.gradients_of, strict=True) if w)]
        figures = [expected.value, *(x for x in expected.gradients if x is not None)]
        found = []
        for name, result, figure in zip(names, self.results(operands), figures, strict=True):
            flat = [x.flatten() for x in (figure.exact, torch.zeros_like(figure.exact), figure.rms)]
            computed = "float64" if "float64" in self.dtypes else "float32"
            conditioned, plain = errors(result.flatten(), Figure(*flat), computed)  # type: ignore[arg-type]
            i = int(conditioned.argmax())
            at = [float(j) for j in torch.unravel_index(torch.tensor(i), result.shape)][:2] if result.dim() else [0.0]
            got, wanted = float(result.flatten()[i]), float(flat[0][i])
            worst = Worst(float(conditioned[i]), tuple(at), got, wanted)
            found.append(Accuracy(name, conditioned.numel(), int((conditioned > BAR).sum()), float(plain.max()), worst))
        return found
