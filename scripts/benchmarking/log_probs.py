"""Workloads of log-probabilities of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch

from benchmarking import workloads
from benchmarking.draw import Draw
from benchmarking.figures import LARGE_LOGITS, MODES, RANDOM, ROWS, TINY_LOGITS
from benchmarking.selection import Run
from benchmarking.workloads import Workload
from cupylosses import functional
from cupylosses.definition.registry import functions
from cupylosses.engines.log_probs.definition import LogProbs
from cupylosses.testing.eager import Call

#: Weight of the entropies in the value of a workload with ``return_entropy``.
BONUS = 0.01


@dataclass(frozen=True)
class LogProbWorkload(Workload):
    """Log-probabilities of labels of rows of logits, one value per label; with entropies, a bonus is added to each.

    Rows may have several labels, in one more dimension of the index.

    ``shapes`` are those of the logits and of the index. There is no reduction.
    """

    Definition: ClassVar = LogProbs
    section = None
    cliffs = "log_probs_cliffs"

    loss: LogProbs

    @property
    def drawn(self) -> tuple[str, ...]:
        return (self.dtype, "int64")

    @property
    def values(self) -> int:
        return prod(self.shapes[1])

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(MODES)[:2]

    def draw(self, shapes: Sequence[Sequence[int]], seed: int) -> Sequence[torch.Tensor]:
        given: dict[str, Any] = {
            "generator": torch.Generator(workloads.DEVICE).manual_seed(seed),
            "device": workloads.DEVICE,
        }
        logits = torch.randn(tuple(shapes[0]), dtype=getattr(torch, self.dtype), **given).mul_(3)
        return [logits, torch.randint(self.shape[-1], tuple(shapes[1]), **given)]

    def ours(self) -> Call:
        function = getattr(functional, self.loss.name)

        def call(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            found = function(logits, index, **self.case)
            result: torch.Tensor = found.log_probs + BONUS * self._spread(found.entropy) if self.entropy else found
            return result

        return call

    def torchs(self) -> Call:
        """The log-softmax of all logits, of which the labels' are gathered."""

        def call(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            softcap = self.case.get("softcap")
            log_p = (logits if softcap is None else softcap * (logits / softcap).tanh()).log_softmax(-1)
            labels = index if index.dim() == logits.dim() else index[..., None]
            found = log_p.gather(-1, labels).view(index.shape)
            return found - BONUS * self._spread((log_p.exp() * log_p).sum(-1)) if self.entropy else found

        return call

    def _spread(self, entropy: torch.Tensor) -> torch.Tensor:
        """The entropy of each row, as it is added to the log-probabilities of the row's labels."""
        return entropy if len(self.shapes[1]) < len(self.shape) else entropy[..., None]

    @property
    def entropy(self) -> bool:
        """True if entropies are computed too."""
        return bool(self.case.get("return_entropy"))

    def compiled_in(self, modes: Sequence[str], quick: bool) -> list[str]:
        return []

    @classmethod
    def chosen(cls, run: Run) -> list[LogProbWorkload]:
        return []  # the section `linear` measures them

    @classmethod
    def tiny(cls, loss: LogProbs) -> LogProbWorkload:
        return log_probs(*TINY_LOGITS)

    @classmethod
    def large(cls, loss: LogProbs) -> LogProbWorkload:
        return log_probs(*LARGE_LOGITS)

    @classmethod
    def fitting(cls, loss: LogProbs, free: int) -> LogProbWorkload:
        (count, classes), dtype = LARGE_LOGITS
        fits = max(1, free // (classes * getattr(torch, dtype).itemsize))
        return log_probs((min(count, fits), classes), dtype)

    @classmethod
    def random(cls, loss: LogProbs, draw: Draw) -> LogProbWorkload:
        elements = draw.size(1 << 10, 1 << 26)
        classes = draw.size(2, min(elements, 300000))
        case: dict[str, Any] = {"return_entropy": True} if draw.random() < 0.4 else {}
        case |= {"softcap": 30.0} if draw.random() < 0.1 else {}
        labels = draw.choice((1, 2, 8)) if draw.random() < 0.3 else 0
        return log_probs((max(1, elements // classes), classes), draw.dtype(), case, RANDOM, labels)


def log_probs(
    shape: Sequence[int], dtype: str, case: Mapping[str, Any] | None = None, title: str = ROWS, labels: int = 0
) -> LogProbWorkload:
    """A workload with logits of this shape, classes last.

    Each row has one label; with ``labels`` that many, in a dimension of their own.
    """
    definition = functions()["token_log_probs"]
    index = (*shape[:-1], *[labels] * bool(labels))
    return LogProbWorkload(definition, (tuple(shape), index), dtype, title, case or {}, "none")
