"""Workloads of element-wise losses: sweeps over sizes, and the shapes and options of the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from benchmarking import figures, workloads
from benchmarking.draw import Draw
from benchmarking.figures import (
    BY_ROW,
    HINGE_COLUMNS,
    KL_PROBABILITIES,
    MASKED,
    RANDOM,
    SWEEP,
    WEIGHTED,
)
from benchmarking.selection import Run
from benchmarking.workloads import Workload
from cupylosses import functional
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import MASK, Loss, ModifiedLoss, modified
from cupylosses.testing import samples
from cupylosses.testing.check import bind
from cupylosses.testing.eager import Call
from cupylosses.testing.pointwise import truth
from cupylosses.testing.pointwise.eager import formula, twin
from cupylosses.testing.truth import flushes

#: Numbers of elements, as powers of two: for host time, for peak memory, and the most for a comparison. The last is
#: 256 MiB of float32, more than any cache holds.
TINY, LARGE, FITTING = 6, 28, 26


def _kl(xp: Any, input: torch.Tensor, target: torch.Tensor, log_target: bool, log_input: bool) -> torch.Tensor:
    log_t = target if log_target else torch.log(target)
    return (torch.exp(target) if log_target else target) * (log_t - (input if log_input else torch.log(input)))


def _hinge(xp: Any, input: torch.Tensor, target: torch.Tensor, margin: float) -> torch.Tensor:
    return torch.clamp(margin - input * target, min=0)


#: Formulas as users write them, for losses whose reference guards edge cases that users would not. Timing the guards
#: would flatter this library.
FORMULAS: dict[str, Callable[..., torch.Tensor]] = {"hinge_loss": _hinge, "kl_div": _kl}


@dataclass(frozen=True)
class PointwiseWorkload(Workload):
    """An element-wise loss. ``dim`` has the dimensions to reduce over; None reduces over all."""

    Definition: ClassVar = Loss
    section = "throughput"
    sweeps = True
    cliffs = "pointwise_cliffs"

    loss: Loss
    dim: tuple[int, ...] | None = None

    @property
    def drawn(self) -> tuple[str, ...]:
        return tuple("bool" if x is MASK else self.dtype for x in self.loss.operands)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(*self.shapes))

    @property
    def reads_again(self) -> bool:
        return self.dim is not None

    @property
    def variant(self) -> str:
        added = [
            x.name
            for x in self.loss.operands
            if x.name not in {y.name for y in registry(Loss)[self.loss.name].operands}
        ]
        return " ".join([*added, *(f"dim={d}" for d in self.dim or ())])

    def draw(self, shapes: Sequence[Sequence[int]], seed: int) -> Sequence[torch.Tensor]:
        values = self.loss.values(self.case)
        return samples.operands(self.loss, values, self.drawn, shapes, workloads.DEVICE, seed)

    def ours(self) -> Call:
        function = getattr(functional, self.loss.name)
        return bind(function, self.loss, self.loss.values(self.case), self.reduction, self.dim)

    def torchs(self) -> Call | None:
        return self.eager or twin(self.loss, self.case, self.reduction)

    def naive(self) -> Call | None:
        loss = self.loss
        if isinstance(loss, ModifiedLoss) or self.dim is not None:
            return None
        written = replace(loss, reference=FORMULAS.get(loss.name, loss.reference))
        return formula(written, loss.values(self.case), self.reduction)

    def compiled_in(self, modes: Sequence[str], quick: bool) -> list[str]:
        return [x for x in modes if self.compiled and (not quick or x == "forward+backward")]

    def truth(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        values, nothing = self.loss.values(self.case), [False] * len(operands)
        found = truth.truth(self.loss, operands, values, self.reduction, wanted=nothing, flush=flushes(operands))
        return found.value.exact

    @classmethod
    def chosen(cls, run: Run) -> list[PointwiseWorkload]:
        found = selection(run.losses_of(cls), run.dtypes, run.sizes, run.compile_sizes)
        return [x for x in found if not run.quick or is_figure(x)]

    @classmethod
    def tiny(cls, loss: Loss) -> PointwiseWorkload:
        return sweep(loss, "float32", TINY)

    @classmethod
    def large(cls, loss: Loss) -> PointwiseWorkload:
        return sweep(loss, "float32", LARGE)

    @classmethod
    def fitting(cls, loss: Loss, free: int) -> PointwiseWorkload:
        fits = free // torch.float32.itemsize
        return sweep(loss, "float32", min(FITTING, max(1, fits.bit_length() - 1)))

    @classmethod
    def random(cls, loss: Loss, draw: Draw) -> PointwiseWorkload:
        """The required operands, of one shape or with broadcast targets.

        Some workloads also have a weight, a mask, or dimensions to reduce over.
        """
        shape = draw.shape(draw.size(1 << 10, 1 << 26), draw.choice((1, 2, 2, 3, 4)))
        needed = [x for x in loss.operands if x.default is None]
        others = draw.broadcast(shape) if draw.random() < 0.3 else shape
        shapes, case = (shape, *(others,) * (len(needed) - 1)), draw.options(loss.cases)
        found = replace(loss_of(loss.name, shapes, draw.dtype(), draw.choice(figures.REDUCTIONS), case), title=RANDOM)
        if loss.mean_of_rows or draw.random() < 0.7:
            return found
        added = draw.choice(("weight", "mask", "dim"))
        if added != "dim":
            return with_array(found, added, draw.choice((shape, draw.broadcast(shape))))
        dim = tuple(d for d in range(len(shape)) if draw.random() < 0.5)
        return over_dimensions(found, dim) if 0 < len(dim) < len(shape) else found

    def __str__(self) -> str:
        where = f"2^{self.elements.bit_length() - 1}" if self.title == SWEEP else f"({self.title})"
        return f"{self.loss.name} {self.dtype} {where}"


def square(exponent: int) -> tuple[int, int]:
    """The shape of the matrix of 2^exponent elements that is closest to a square: rows of 32768 at 2^30."""
    return 1 << exponent // 2, 1 << (exponent + 1) // 2


def sweep(loss: Loss, dtype: str, exponent: int, compiled: bool = False) -> PointwiseWorkload:
    """A workload with all operands of one shape and the default options."""
    return PointwiseWorkload(loss, (square(exponent),) * len(loss.operands), dtype, compiled=compiled)


def loss_of(
    name: str,
    shapes: Sequence[tuple[int, ...]],
    dtype: str,
    reduction: str = "mean",
    case: Mapping[str, Any] | None = None,
) -> PointwiseWorkload:
    """A workload of the loss called ``name``; operands without an entry in ``shapes`` keep their default numbers."""
    base, options = registry(Loss)[name], case or {}
    numbers = frozenset(x.name for x in base.operands[len(shapes) :])
    expression = None
    if numbers and base.torch is not None:
        expression = partial(getattr(torch.nn.functional, base.torch), reduction=reduction, **options)
    elif numbers:
        expression = _with_numbers(base, len(shapes), formula(base, base.values(options), reduction))
    elif len(set(shapes)) > 1:
        expression = twin(base, options, reduction)
    return PointwiseWorkload(
        modified(base, numbers), tuple(shapes), dtype, "", options, reduction, _broadcasting(expression)
    )


def with_array(workload: PointwiseWorkload, added: str, shape: tuple[int, ...]) -> PointwiseWorkload:
    """The workload with a weight or a mask of this shape, which broadcasts to the shape of its operands."""
    numbers = workload.loss.numbers if isinstance(workload.loss, ModifiedLoss) else frozenset()
    unreduced, reduction = _unreduced(workload), workload.reduction
    counts = added == "mask" or workload.loss.mean_of_weights

    def expression(*operands: torch.Tensor) -> torch.Tensor:
        *own, array = operands
        x = unreduced(*own) * array
        if reduction == "mean":
            return x.sum() / array.expand(x.shape).sum() if counts else x.mean()
        return x.sum() if reduction == "sum" else x

    base = registry(Loss)[workload.loss.name]
    form = modified(base, numbers, "array" if added == "weight" else None, mask=added == "mask")
    return replace(workload, loss=form, shapes=(*workload.shapes, shape), eager=unreduced and expression)


def over_dimensions(workload: PointwiseWorkload, dim: tuple[int, ...]) -> PointwiseWorkload:
    """The workload reduced over these dimensions."""
    unreduced, reduction = _unreduced(workload), "sum" if workload.reduction == "sum" else "mean"
    reduce = torch.sum if reduction == "sum" else torch.mean
    expression = unreduced and (lambda *operands: reduce(unreduced(*operands), dim))
    return replace(workload, dim=dim, reduction=reduction, eager=expression)


def _unreduced(workload: PointwiseWorkload) -> Call | None:
    """torch's way to compute the unreduced loss of a workload."""
    plain = loss_of(workload.loss.name, workload.shapes, workload.dtype, "none", workload.case)
    return plain.torchs() or plain.naive()


def _with_numbers(loss: Loss, count: int, function: Call | None) -> Call | None:
    """A call with the first ``count`` operands; the others are scalar tensors with their default numbers."""
    numbers = [x.default for x in loss.operands[count:]]
    return function and (lambda *operands: function(*operands, *(operands[0].new_tensor(x) for x in numbers)))


def _broadcasting(function: Call | None) -> Call | None:
    """A call that broadcasts the operands first, because some of torch's functions do not, or warn about it."""
    return function and (lambda *operands: function(*torch.broadcast_tensors(*operands)))


def pair(name: str, shape: tuple[int, ...], dtype: str, **fields: Any) -> PointwiseWorkload:
    """A workload whose required operands have one shape."""
    needed = [x for x in registry(Loss)[name].operands if x.default is None]
    return loss_of(name, (shape,) * len(needed), dtype, **fields)


def special() -> tuple[PointwiseWorkload, ...]:
    """The shapes and options of the project's figures."""
    losses = registry(Loss)
    return (
        PointwiseWorkload(
            losses["kl_div"],
            ((16384, 16384),) * 2,
            "float32",
            KL_PROBABILITIES,
            {"log_input": False},
            "batchmean",
            lambda p, t: torch.nn.functional.kl_div(torch.log(p), t, reduction="batchmean"),
            compiled=True,
        ),
        PointwiseWorkload(losses["hinge_loss"], ((32768, 32768), (32768,)), "float32", HINGE_COLUMNS, compiled=True),
        *(x for dtype in figures.DTYPES for x in added(losses, dtype)),
    )


def added(losses: Mapping[str, Loss], dtype: str) -> tuple[PointwiseWorkload, ...]:
    """Workloads with the options that every loss has: a mask, a weight, and a mean per row."""
    full, row = (16384, 16384), (16384,)
    mse, huber = losses["mse_loss"], losses["huber_loss"]
    return (
        PointwiseWorkload(
            modified(mse, mask=True),
            (full, full, full),
            dtype,
            MASKED,
            eager=lambda p, t, m: ((p - t) ** 2 * m).sum() / m.sum(),
            compiled=True,
        ),
        PointwiseWorkload(
            modified(huber, weight="array"),
            (full, full, row),
            dtype,
            WEIGHTED,
            eager=lambda p, t, w: (torch.nn.functional.huber_loss(p, t, reduction="none") * w).mean(),
            compiled=True,
        ),
        PointwiseWorkload(
            mse, (full, full), dtype, BY_ROW, eager=lambda p, t: ((p - t) ** 2).mean(1), compiled=True, dim=(1,)
        ),
    )


def is_figure(workload: PointwiseWorkload) -> bool:
    """True if the workload is part of one of the project's figures."""
    sizes = [1 << n for n in figures.SIZES]
    known = workload.loss.name in figures.LOSSES and workload.dtype in figures.DTYPES and workload.elements in sizes
    return known or workload.title != SWEEP


def selection(
    losses: Sequence[Loss], dtypes: Sequence[str], sizes: Sequence[int], compile_sizes: Sequence[int]
) -> list[PointwiseWorkload]:
    """The workloads of a run. Those of the figures come first, because the budget may cut off the rest."""
    names = {x.name for x in losses}
    chosen = [x for x in special() if x.loss.name in names and x.dtype in dtypes]
    for exponent in sorted(sizes, reverse=True):
        chosen += [sweep(loss, dtype, exponent, exponent in compile_sizes) for loss in losses for dtype in dtypes]
    return sorted(chosen, key=lambda x: not is_figure(x))
