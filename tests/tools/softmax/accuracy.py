"""Accuracy of losses of rows.

Every row of a few classes is a result of its own (``reduction="none"``, upstream gradient 1). Its value and each
element of its gradients are compared with :func:`cupylosses.testing.softmax.truth.exact_gradients`. The size that
conditions an error is that of ``truth`` in the same module: the distance that a rounding of the logits moves the
result.

Rows hold usual logits, logits of all magnitudes, nearly equal logits, and one logit far above all others, so that the
probability of the label is nearly 1 or nearly 0. Teachers are near their students or far from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy

from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing.check import GIVEN
from cupylosses.testing.softmax.check import SoftmaxCheck
from cupylosses.testing.softmax.truth import exact_gradients, truth
from cupylosses.testing.tolerance import Expected, arithmetic
from tools.accuracy import BAR, Accuracy, Sweep, Worst, errors
from tools.exact import Figure

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Rows = NDArray[numpy.float64]

#: Classes of a row: more than one, and not a multiple of a vector.
CLASSES = 5

#: The largest logit. Probabilities go down to 2^-739, which only float64 distinguishes from 0.
LARGEST = 2.0**8

#: The smallest probability of a target: the truth's difference quotients take a step to both sides.
SMALLEST = 2.0**-180

#: Decimal digits of the truth: a gradient is as small as the smallest probability, and comes from a difference.
DIGITS = 400


@dataclass(frozen=True)
class SoftmaxSweep(Sweep):
    """Sweep over rows of a loss with one kind of target, by default its first.

    ``dtypes`` are those of the logits and of dense targets, or one for both.
    """

    Definition: ClassVar = SoftmaxLoss

    loss: SoftmaxLoss
    count: int = 100
    kind: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", self.kind or self.loss.targets[0])

    @classmethod
    def sweeps(cls, loss: SoftmaxLoss, dtypes: Sequence[tuple[str, ...]], **where: Any) -> Iterator[SoftmaxSweep]:
        chosen = product(loss.targets, loss.cases, dtypes)
        found = (cls(loss, case, names, kind=kind, **where) for kind, case, names in chosen)
        return (x for x in found if x.check.possible)

    @property
    def check(self) -> SoftmaxCheck:
        how = {"layout": GIVEN, "device": self.device, "function": self.function}
        shape = (self.count, CLASSES)
        return SoftmaxCheck(self.loss, self.case, self.dtypes, "none", kind=self.kind, shape=shape, **how)

    @property
    def labels(self) -> list[str]:
        first, second = (x.name for x in self.loss.operands)
        dense = [second] if self.kind == "indices" else [f"{second}[{c}]" for c in range(CLASSES)]
        return [*(f"{first}[{c}]" for c in range(CLASSES)), *dense]

    @property
    def case_words(self) -> str:
        target = self.kind if len(self.loss.targets) > 1 and self.kind != "indices" else ""
        return " ".join(filter(None, (target, super().case_words)))

    def operands(self) -> list[Tensor]:
        import torch

        generator = numpy.random.default_rng(self.seed)
        rows = _rows(self.count, generator)
        kinds = [getattr(torch, x) for x in (self.dtypes[0], self.dtypes[-1])]
        if not self.loss.softmax:
            rows = _log_softmax(rows)
        target = self._targets(rows, generator)
        drawn = [torch.from_numpy(rows).to(kinds[0]), torch.from_numpy(target)]
        if self.kind == "probabilities" and not self._logarithmic:
            drawn[1] = drawn[1].clamp_min(max(torch.finfo(kinds[1]).tiny, SMALLEST))
        if drawn[1].is_floating_point():
            drawn[1] = drawn[1].to(kinds[1])
        return [x.to(self.device) for x in drawn]

    @property
    def _logarithmic(self) -> bool:
        return self.loss.operands[1].domain_for(self.loss.values(self.case)) == "log_probability"

    @property
    def ignored(self) -> tuple[str, ...]:
        """Parameters without a meaning for this kind of target."""
        return () if self.kind == "indices" else self.loss.only_of_indices

    def _targets(self, rows: Rows, generator: numpy.random.Generator) -> NDArray[Any]:
        if self.kind == "indices":
            return generator.integers(CLASSES, size=len(rows))
        other = _rows(len(rows), generator)
        near = rows * (1 + numpy.exp2(-generator.uniform(1, 12, rows.shape)) * generator.choice([-1, 1], rows.shape))
        other = numpy.where(generator.random((len(rows), 1)) < 0.5, near, other)
        if self.kind == "logits":
            return other
        log_t = _log_softmax(other)
        return log_t if self._logarithmic else numpy.exp(log_t)

    def measure(self) -> list[Accuracy]:
        operands = self.operands()
        names = [x for x, w in zip(self.check.names, self.check.gradients_of, strict=True) if w]
        computed = max(map(arithmetic, self.dtypes), key=lambda x: x == "float64")
        expected = truth(self.loss.name, {**dict(zip(self.check.names, operands, strict=True)), **self.check.options})
        wide = [x.double().cpu() if x.is_floating_point() else x.cpu() for x in operands]
        figures = _figures(self, wide, expected.value, [expected.gradients[x] for x in names])
        at = numpy.concatenate([x.reshape(len(x), -1).double().numpy() for x in wide], axis=1)
        found = []
        for name, result, figure in zip(("value", *names), self.results(operands), figures, strict=True):
            conditioned, plain = errors(result.flatten(), Figure(*(x.flatten() for x in figure)), computed)
            absolute = (result.double() - figure.high).abs().reshape(len(result), -1)
            none = (absolute <= _underflow(at, computed)[:, None]).flatten()
            conditioned, plain = (x.masked_fill(none, 0.0) for x in (conditioned, plain))
            i = int(conditioned.argmax())
            row = i // (result.numel() // len(result))
            got, wanted = float(result.flatten()[i]), float(figure.high.flatten()[i])
            worst = Worst(float(conditioned[i]), tuple(at[row].tolist()), got, wanted)
            over = int((conditioned > BAR).sum())
            found.append(Accuracy(name, conditioned.numel(), over, float(plain.max()), worst))
        return found


def _rows(count: int, generator: numpy.random.Generator) -> Rows:
    shape = (count, CLASSES)
    usual = 3 * generator.standard_normal(shape)
    sizes = numpy.minimum(numpy.exp2(generator.uniform(-12, 8, shape)), LARGEST)
    any_size = sizes * generator.choice([-1.0, 1.0], shape)
    base = numpy.exp2(generator.uniform(-4, 6, (count, 1)))
    close = base * (1 + numpy.exp2(-generator.uniform(2, 24, shape)) * generator.choice([-1.0, 1.0], shape))
    ahead = usual + numpy.exp2(generator.uniform(1, 7, (count, 1))) * (
        numpy.arange(CLASSES) == generator.integers(CLASSES, size=(count, 1))
    )
    kind = generator.integers(4, size=(count, 1))
    return numpy.select([kind == 0, kind == 1, kind == 2], [usual, any_size, close], ahead)


def _log_softmax(rows: Rows) -> Rows:
    shifted = rows - rows.max(1, keepdims=True)
    return shifted - numpy.log(numpy.exp(shifted).sum(1, keepdims=True))


def _underflow(at: Rows, computed: str) -> Tensor:
    """Returns for each row the error of a probability that underflows to 0.

    The probability is below the smallest normal number, and is multiplied by differences of logits.
    """
    import torch

    return torch.from_numpy(4 * numpy.abs(at).max(1) + 4) * torch.finfo(getattr(torch, computed)).tiny


def _figures(
    sweep: SoftmaxSweep, operands: Sequence[Tensor], value: Expected, gradients: Sequence[Expected]
) -> list[Figure]:
    """Returns the exact value and gradients, with sizes from the float64 truth."""
    import torch

    targets = operands[1].tolist()
    options = {k: v for k, v in sweep.loss.values(sweep.case).items() if k not in sweep.ignored}
    numbers: list[list[Any]] = [[] for _ in range(1 + len(gradients))]
    for x, target in zip(operands[0].tolist(), targets, strict=True):
        found = exact_gradients(sweep.loss.name, x, target, digits=DIGITS, **options)
        for kept, exact in zip(numbers, found, strict=False):
            kept.append(exact)
    figures = []
    for kept, size in zip(numbers, (value, *gradients), strict=True):
        flat = [x for row in kept for x in (row if isinstance(row, list) else [row])]
        high = torch.tensor([float(x) for x in flat], dtype=torch.float64)
        low = torch.tensor([float(x - h) for x, h in zip(flat, high.tolist(), strict=True)], dtype=torch.float64)
        shape = size.rms.shape
        figures.append(Figure(high.reshape(shape), low.reshape(shape), size.rms))  # type: ignore[arg-type]
    return figures
