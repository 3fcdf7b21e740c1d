"""Checks of losses of sequences. A layout has the sizes of a batch and the storage of its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cupylosses import checks
from cupylosses.engines.sequence.definition import SequenceLoss
from cupylosses.testing.check import GIVEN, Check
from cupylosses.testing.sequence import eager
from cupylosses.testing.sequence.truth import truth
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Layout(NamedTuple):
    """Sizes of a batch, and the storage of its arrays.

    ``samples`` is 0 for one sample without a batch dimension. ``lies`` is "" (contiguous), "batch_first", "strided"
    (frames are contiguous) or "concatenated" (targets).
    """

    frames: int
    samples: int
    classes: int
    labels: int
    lies: str = ""


LAYOUTS: Mapping[str, Layout] = {
    "frames": Layout(21, 5, 9, 6),
    "batch_first": Layout(20, 4, 16, 7, "batch_first"),
    "strided": Layout(21, 5, 9, 6, "strided"),
    "concatenated": Layout(21, 5, 9, 6, "concatenated"),
    "one": Layout(17, 0, 9, 5),
    "long": Layout(150, 3, 40, 70),
    "wide": Layout(12, 3, 1200, 4),
}


@dataclass(frozen=True)
class SequenceCheck(Check):
    """Check of a loss of sequences. ``shape`` is a requested shape of the first operand, (T, N, C)."""

    Definition: ClassVar = SequenceLoss

    loss: SequenceLoss
    layout: str = "frames"
    shape: tuple[int, ...] | None = None

    @cached_property
    def laid(self) -> Layout:
        """Sizes and storage."""
        if self.shape:
            return Layout(*self.shape, max(1, self.shape[0] // 4))
        return LAYOUTS[self.layout]

    @cached_property
    def gradients_of(self) -> tuple[bool, ...]:
        return (True, False, False, False)

    @property
    def possible(self) -> bool:
        has_layout = self.layout in LAYOUTS or (self.layout == GIVEN and len(self.shape or ()) == 3)
        return self.dtypes[0] in checks.FLOATING and len(set(self.dtypes)) == 1 and has_layout

    @property
    def options(self) -> dict[str, Any]:
        options = {**self.case, "reduction": self.reduction}
        return {**options, "batch_first": True} if self.laid.lies == "batch_first" else options

    def small(self, layout: str | None = None) -> SequenceCheck:
        return replace(self, layout=layout or next(iter(LAYOUTS)), shape=None)

    def operands(self) -> list[Tensor]:
        import torch

        frames, samples, classes, labels, lies = self.laid
        generator = torch.Generator().manual_seed(self.seed)
        count = max(1, samples)
        x = 2 * torch.randn(frames, count, classes, generator=generator, dtype=torch.float64)
        x = x if self.loss.logits else x.log_softmax(-1)
        targets = torch.randint(1, classes, (count, labels), generator=generator)
        # The first sample has full length, and each sample has an alignment.
        ends = torch.randint(frames // 2, frames + 1, (count,), generator=generator)
        most = (ends // 2).clamp(max=labels)
        lengths = (torch.rand(count, generator=generator) * (most + 1)).long()
        ends[0], lengths[0] = frames, min(labels, frames // 2)
        x = x.to(getattr(torch, self.dtypes[0]))
        if lies == "concatenated":
            targets = torch.cat([targets[n, :k] for n, k in enumerate(lengths.tolist())]).int()
        if lies == "batch_first":
            x = x.transpose(0, 1).contiguous()
        if lies == "strided":
            x = x.movedim(0, -1).contiguous().movedim(-1, 0)
        if not samples:
            x, targets, ends, lengths = x[:, 0], targets[0], ends[0], lengths[0]
        return [y.to(self.device) for y in (x, targets, ends, lengths)]

    def torch(self) -> list[Callable[..., Tensor]]:
        # torch's gradient with respect to log-probabilities differs (truth.py).
        twin = eager.twin(True, self.options) if self.loss.logits else None
        return [] if twin is None else [twin]

    def result(self, operands: Sequence[Tensor]) -> tuple[tuple[int, ...], dtype]:
        shape = tuple(operands[2].shape) if self.reduction == "none" else ()
        return shape, operands[0].dtype

    def truth(self, operands: Sequence[Tensor], grad_output: Any, where: str) -> Truth:
        x, *others = [y.detach().cpu() for y in operands]
        moved = self.laid.lies == "batch_first"
        x = x.transpose(0, 1) if moved else x
        upstream = grad_output.cpu() if hasattr(grad_output, "cpu") else grad_output
        expected = truth(self.loss.logits, x, *others, self.reduction, upstream, self.dtypes[0] == "float64")
        gradient = expected.gradients[0]
        if moved and gradient is not None:
            gradient = replace(gradient, **{k: v.transpose(0, 1) for k, v in vars(gradient).items()})
        return Truth(expected.value, (gradient, None, None, None))
