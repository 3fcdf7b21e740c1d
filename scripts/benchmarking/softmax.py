"""Workloads of losses of rows of logits: the shapes of the figures, options, and operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from benchmarking import workloads
from benchmarking.draw import Draw
from benchmarking.figures import (
    EXTREMES,
    IMAGES,
    LARGE_LOGITS,
    LOGITS,
    MODES,
    ODD,
    OPTIONS,
    PLAIN_LOGITS,
    RANDOM,
    REDUCTIONS,
    ROW_OPTIONS,
    ROWS,
    TINY_LOGITS,
)
from benchmarking.selection import Run
from benchmarking.workloads import Workload
from cupylosses import functional
from cupylosses.definition.base import Operand
from cupylosses.definition.registry import registry
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing.eager import Call
from cupylosses.testing.softmax.eager import twin

#: In workloads with ignored labels, one label in this many is ignored.
IGNORED_OF = 8

#: The label of pixels without a class.
VOID = 255


@dataclass(frozen=True)
class SoftmaxWorkload(Workload):
    """A loss of rows of logits.

    ``shapes`` are those of the logits (classes in the second dimension), of the target and, with a ``weight`` in
    ``case``, of the class weights. ``kind`` is the kind of target, as in `SoftmaxLoss`; ``beside`` is the workload to
    compare with.
    """

    Definition: ClassVar = SoftmaxLoss
    section = "rows"
    more_columns = ("plain_ratio",)
    cliffs = "softmax_cliffs"

    loss: SoftmaxLoss
    kind: str = "indices"
    beside: SoftmaxWorkload | None = None

    @property
    def names(self) -> list[str]:
        """Names of the arguments that are operands."""
        found = [x.name for x in self.loss.operands]
        return found if len(self.shapes) == 2 else [*found, str(self.loss.weights)]

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that are not operands."""
        return {k: v for k, v in self.case.items() if k != self.loss.weights}

    @property
    def drawn(self) -> tuple[str, ...]:
        target = "int64" if self.kind == "indices" else self.dtype
        return (self.dtype, target, self.dtype)[: len(self.shapes)]

    @property
    def least_read(self) -> int:
        if self.loss.softmax or self.kind != "indices":
            return self.bytes
        # Of each row, only the label's log-probability must be read.
        row = getattr(torch, self.dtype).itemsize * self.shape[1]
        return self.bytes - self.operand_bytes[0] + self.operand_bytes[0] // row * getattr(torch, self.dtype).itemsize

    @property
    def values(self) -> int:
        return self.elements // self.shape[1]

    @property
    def variant(self) -> str:
        return "" if self.kind == self.loss.targets[0] else f"target={self.kind}"

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(MODES)[:2]

    def draw(self, shapes: Sequence[Sequence[int]], seed: int) -> Sequence[torch.Tensor]:
        generator = torch.Generator(workloads.DEVICE).manual_seed(seed)
        # Count from the last dimension, because several sets of operands are drawn with one more dimension in front.
        classes = 1 - len(self.shape)
        drawn = [self._scores(self.loss.operands[0], shapes[0], classes, generator)]
        if self.kind == "indices":
            drawn.append(self._labels(shapes[1], generator))
        else:
            drawn.append(self._scores(self.loss.operands[1], shapes[1], classes, generator))
        if len(shapes) > 2:
            weights = torch.rand(tuple(shapes[2]), generator=generator, device=workloads.DEVICE)
            drawn.append((weights + 0.25).to(getattr(torch, self.dtype)))
        return drawn

    def _scores(self, operand: Operand, shape: Sequence[int], classes: int, generator: torch.Generator) -> torch.Tensor:
        """Random logits, or the log-probabilities or probabilities that the operand consists of."""
        kind, domain = getattr(torch, self.dtype), operand.domain_for(self.loss.values(self.options))
        x = torch.randn(tuple(shape), generator=generator, device=workloads.DEVICE, dtype=kind).mul_(3)
        if domain == "log_probability":
            return x.log_softmax(classes)
        target = operand is self.loss.operands[1]
        return x.softmax(classes) if target and self.kind == "probabilities" else x

    def _labels(self, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
        given = {"generator": generator, "device": workloads.DEVICE}
        labels = torch.randint(self.shape[1], tuple(shape), **given)
        if "ignore_index" not in self.case:
            return labels
        return labels.masked_fill_(torch.randint(IGNORED_OF, tuple(shape), **given) == 0, self.case["ignore_index"])

    def ours(self) -> Call:
        function, names = getattr(functional, self.loss.name), self.names
        # Name the class dimension, because its default differs between losses.
        options = {**self.options, "reduction": self.reduction, "class_dim": 1}
        return lambda *operands: function(**dict(zip(names, operands, strict=True)), **options)

    def torchs(self) -> Call | None:
        return twin(self.loss, self.options, self.reduction)

    def compiled_in(self, modes: Sequence[str], quick: bool) -> list[str]:
        return ["forward+backward"] if self.compiled and (not quick or self.title == EXTREMES) else []

    @classmethod
    def chosen(cls, run: Run) -> list[SoftmaxWorkload]:
        return selection(run.losses_of(cls), run.dtypes, run.quick)

    @classmethod
    def tiny(cls, loss: SoftmaxLoss) -> SoftmaxWorkload:
        return rows(loss, *TINY_LOGITS, ROWS)

    @classmethod
    def large(cls, loss: SoftmaxLoss) -> SoftmaxWorkload:
        return rows(loss, *LARGE_LOGITS, ROWS)

    @classmethod
    def fitting(cls, loss: SoftmaxLoss, free: int) -> SoftmaxWorkload:
        (count, classes), dtype = PLAIN_LOGITS
        fits = free // (classes * getattr(torch, dtype).itemsize)
        # Round the number of rows down to a power of two, like that of a full batch.
        return rows(loss, (min(count, 1 << max(0, fits.bit_length() - 1)), classes), dtype, ROWS)

    @classmethod
    def random(cls, loss: SoftmaxLoss, draw: Draw) -> SoftmaxWorkload:
        elements, image = draw.size(1 << 10, 1 << 26), draw.random() < 0.3
        classes = draw.size(2, min(elements, 1500 if image else 300000))
        count = max(1, elements // classes)
        samples = draw.size(1, min(count, 16)) if image else count
        shape = (samples, classes, *(draw.pixels(max(1, count // samples)) if image else ()))
        kind = draw.choice(loss.targets)
        case = draw.options(loss.cases)
        if loss.weights and draw.random() < 0.2:
            case = {**case, loss.weights: True}
        if kind != "indices":
            case = {k: v for k, v in case.items() if k not in loss.only_of_indices}
        found = rows(loss, shape, draw.dtype(), RANDOM, case, kind=kind)
        return replace(found, reduction=draw.choice(REDUCTIONS))

    def describe(self, mode: str, columns: Sequence[str]) -> dict[str, Any]:
        found = super().describe(mode, columns)
        if "case" in found:
            found["case"] = " ".join(filter(None, [self.variant, found["case"]]))
        return found


def rows(
    loss: SoftmaxLoss,
    shape: Sequence[int],
    dtype: str,
    title: str,
    case: Mapping[str, Any] | None = None,
    **fields: Any,
) -> SoftmaxWorkload:
    """A workload with logits of this shape.

    ``case`` has parameters, flags and other arguments; a ``weight`` of True stands for class weights.
    """
    case, kind = case or {}, fields.pop("kind", loss.targets[0])
    of_rows = (*shape[:1], *shape[2:])
    shapes = [tuple(shape), of_rows if kind == "indices" else tuple(shape)]
    if loss.weights in case:
        shapes.append(tuple(shape[1:2]))
    return SoftmaxWorkload(loss, tuple(shapes), dtype, title, case, loss.reduction, kind=kind, **fields)


def plain() -> SoftmaxWorkload:
    """The workload of cross entropy without options."""
    return rows(registry(SoftmaxLoss)["cross_entropy"], *PLAIN_LOGITS, OPTIONS)


def shapes(loss: SoftmaxLoss, *titles: str) -> list[SoftmaxWorkload]:
    """Workloads with the shapes that the figures list under these titles."""
    found = []
    for title in titles:
        for shape, dtype, _ in LOGITS[title]:
            case = {"ignore_index": VOID} if title == IMAGES else {}
            beside = plain() if shape == ODD else None
            found.append(rows(loss, shape, dtype, title, case, compiled=True, beside=beside))
    return found


def options() -> list[SoftmaxWorkload]:
    """Workloads of cross entropy with options and with probabilities, and of the other losses, beside plain ones."""
    losses, beside = registry(SoftmaxLoss), plain()
    found = [rows(losses["cross_entropy"], *PLAIN_LOGITS, OPTIONS, case, beside=beside) for case in ROW_OPTIONS]
    found.append(rows(losses["cross_entropy"], *PLAIN_LOGITS, OPTIONS, kind="probabilities", beside=beside))
    for loss in losses.values():
        if loss.name != "cross_entropy":
            found += [rows(loss, *PLAIN_LOGITS, OPTIONS, case, beside=beside) for case in loss.cases]
    return found


def selection(losses: Sequence[SoftmaxLoss], dtypes: Sequence[str], quick: bool) -> list[SoftmaxWorkload]:
    """The workloads of a run. Those that may leave the GPU unusable come last."""
    first = registry(SoftmaxLoss)["cross_entropy"]
    every = [*shapes(first, ROWS, IMAGES), *options(), *shapes(first, EXTREMES)]
    chosen = [x for x in every if x.loss in losses and x.dtype in dtypes]
    return [x for x in chosen if x.loss.name == "cross_entropy" and x.kind == "indices"] if quick else chosen
