"""The accuracy of losses of sequences: every sample of a few frames is a result of its own.

The truth is that of :mod:`cupylosses.testing.sequence.truth`, whose sizes condition the errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from cupylosses.engines.sequence.definition import SequenceLoss
from cupylosses.testing.check import GIVEN
from cupylosses.testing.sequence.check import SequenceCheck
from tools.accuracy import BAR, Accuracy, Sweep, Worst, errors
from tools.exact import Figure

if TYPE_CHECKING:
    from torch import Tensor

#: Frames and classes of a sample.
FRAMES, CLASSES = 13, 5


@dataclass(frozen=True)
class SequenceSweep(Sweep):
    """Samples of a few frames."""

    Definition: ClassVar = SequenceLoss

    loss: SequenceLoss
    count: int = 500

    @classmethod
    def sweeps(cls, loss: SequenceLoss, dtypes: Sequence[tuple[str, ...]], **where: object) -> Iterator[SequenceSweep]:
        found = (cls(loss, case, names, **where) for case, names in product(loss.cases, dtypes))  # type: ignore[arg-type]
        return (x for x in found if x.check.possible)

    @property
    def check(self) -> SequenceCheck:
        how = {"layout": GIVEN, "device": self.device, "seed": self.seed, "function": self.function}
        return SequenceCheck(self.loss, self.case, self.dtypes, "none", shape=(FRAMES, self.count, CLASSES), **how)

    @property
    def labels(self) -> list[str]:
        return [f"{self.loss.operands[0].name}[{t}, {c}]" for t in range(FRAMES) for c in range(CLASSES)]

    def operands(self) -> list[Tensor]:
        return self.check.operands()

    def measure(self) -> list[Accuracy]:
        import torch

        check, operands = self.check, self.operands()
        expected = check.truth(operands, torch.ones(self.count, dtype=torch.float64), "cpu")
        names = ["value", *(n for n, w in zip(check.names, check.gradients_of, strict=True) if w)]
        figures = [expected.value, *(x for x in expected.gradients if x is not None)]
        at = operands[0].double().cpu().transpose(0, 1).reshape(self.count, -1)
        found = []
        for name, result, figure in zip(names, self.results(operands), figures, strict=True):
            flat = [
                x.transpose(0, 1).flatten() if x.dim() > 1 else x
                for x in (result, figure.exact, torch.zeros_like(figure.exact), figure.rms)
            ]
            conditioned, plain = errors(flat[0], Figure(*flat[1:]), "float64")  # type: ignore[arg-type]
            i = int(conditioned.argmax())
            sample = i // (result.numel() // self.count)
            worst = Worst(float(conditioned[i]), tuple(at[sample].tolist()), float(flat[0][i]), float(flat[1][i]))
            found.append(Accuracy(name, conditioned.numel(), int((conditioned > BAR).sum()), float(plain.max()), worst))
        return found
