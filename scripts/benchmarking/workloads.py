"""Workloads: losses at sizes, shapes, dtypes and modes, with random operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any

import torch

from benchmarking import figures
from benchmarking.figures import (
    BY_ROW,
    HINGE_COLUMNS,
    KL_PROBABILITIES,
    MASKED,
    MODES,
    SWEEP,
    WEIGHTED,
    spell_case,
    spell_shape,
)
from cupylosses import functional
from cupylosses.checks import FLOATING
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import MASK, Loss, modified
from cupylosses.testing import samples
from cupylosses.testing.check import bind
from cupylosses.testing.eager import Call
from cupylosses.testing.pointwise.eager import twin

DEVICE = "cuda"

#: Maximum number of operand sets: as many as a measurement makes calls, so no call finds its operands in the cache.
MOST_SETS = 1024


_seeds = count()


@dataclass(frozen=True)
class Workload:
    """One loss with its options, on operands of one dtype.

    ``eager`` is the expression that torch users write, if it is not torch's own function with these options; ``beside``
    is the workload to compare with, if any.
    """

    loss: Loss
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    title: str = SWEEP
    case: Mapping[str, Any] = field(default_factory=dict)
    reduction: str = "mean"
    eager: Callable[..., Any] | None = None
    compiled: bool = False
    dim: tuple[int, ...] | None = None
    beside: Workload | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtype of each operand."""
        return tuple("bool" if x is MASK else self.dtype for x in self.loss.operands)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the loss before it is reduced."""
        return tuple(torch.broadcast_shapes(*self.shapes))

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that this workload has."""
        return tuple(MODES)

    @property
    def elements(self) -> int:
        """The number of elements of the loss."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of one set of operands."""
        return sum(self.operand_bytes)

    @property
    def operand_bytes(self) -> tuple[int, ...]:
        """Bytes of each operand."""
        sizes = [getattr(torch, x).itemsize for x in self.dtypes]
        return tuple(prod(shape) * size for shape, size in zip(self.shapes, sizes, strict=True))

    def differentiated(self, mode: str) -> int:
        """The number of operands, counted from the first, that have a gradient in ``mode``."""
        count = MODES[mode]
        floating = sum(x in FLOATING for x in self.dtypes)
        return floating if count is None else count

    def traffic(self, mode: str) -> int:
        """The minimal traffic of ``mode`` in bytes: each operand read once, each gradient written once."""
        gradients = sum(self.operand_bytes[: self.differentiated(mode)])
        # A value per row is differentiated by reading everything again, like `none`.
        again = self.bytes if self.dim is not None and gradients else 0
        return self.bytes + gradients + again

    def draw(self, shapes: Sequence[Sequence[int]], seed: int) -> Sequence[torch.Tensor]:
        """Random operands of these shapes."""
        return samples.operands(self.loss, self.loss.values(self.case), self.dtypes, shapes, DEVICE, seed)

    def ours(self) -> Call:
        """This library's function."""
        function = getattr(functional, self.loss.name)
        return bind(function, self.loss, self.loss.values(self.case), self.reduction, self.dim)

    def torchs(self) -> Call | None:
        """The call that torch users make: torch's own function, or the expression of the workload."""
        return self.eager or twin(self.loss, self.case, self.reduction)

    def describe(self, mode: str, columns: Sequence[str]) -> dict[str, Any]:
        """The columns that identify a measurement, as far as they are in ``columns``."""
        everything = {
            "workload": self.title,
            "loss": self.loss.name,
            "case": spell_case(self.case),
            "reduction": self.reduction,
            "shape": spell_shape(self.shape),
            "elements": self.elements,
            "dtype": self.dtype,
            "mode": mode,
        }
        return {name: value for name, value in everything.items() if name in columns}

    def __str__(self) -> str:
        where = f"2^{self.elements.bit_length() - 1}" if self.title == SWEEP else f"({self.title})"
        return f"{self.loss.name} {self.dtype} {where}"


def square(exponent: int) -> tuple[int, int]:
    """The matrix of 2^exponent elements nearest to a square: rows of 32768 at 2^30."""
    return 1 << exponent // 2, 1 << (exponent + 1) // 2


def sweep(loss: Loss, dtype: str, exponent: int, compiled: bool = False) -> Workload:
    """A loss of operands of one shape, with its default options."""
    return Workload(loss, (square(exponent),) * len(loss.operands), dtype, compiled=compiled)


def special() -> tuple[Workload, ...]:
    """The shapes and options of the project's figures."""
    losses = registry(Loss)
    return (
        Workload(
            losses["kl_div"],
            ((16384, 16384),) * 2,
            "float32",
            KL_PROBABILITIES,
            {"log_input": False},
            "batchmean",
            lambda p, t: torch.nn.functional.kl_div(torch.log(p), t, reduction="batchmean"),
            compiled=True,
        ),
        Workload(losses["hinge_loss"], ((32768, 32768), (32768,)), "float32", HINGE_COLUMNS, compiled=True),
        *(x for dtype in figures.DTYPES for x in added(losses, dtype)),
    )


def added(losses: Mapping[str, Loss], dtype: str) -> tuple[Workload, ...]:
    """The options that every loss takes, on one loss: a mask, a weight, and a result per row."""
    full, row = (16384, 16384), (16384,)
    mse, huber = losses["mse_loss"], losses["huber_loss"]
    return (
        Workload(
            modified(mse, mask=True),
            (full, full, full),
            dtype,
            MASKED,
            eager=lambda p, t, m: ((p - t) ** 2 * m).sum() / m.sum(),
            compiled=True,
        ),
        Workload(
            modified(huber, weight="array"),
            (full, full, row),
            dtype,
            WEIGHTED,
            eager=lambda p, t, w: (torch.nn.functional.huber_loss(p, t, reduction="none") * w).mean(),
            compiled=True,
        ),
        Workload(mse, (full, full), dtype, BY_ROW, eager=lambda p, t: ((p - t) ** 2).mean(1), compiled=True, dim=(1,)),
    )


def is_figure(workload: Workload) -> bool:
    """True if the workload is part of one of the project's figures."""
    sizes = [1 << n for n in figures.SIZES]
    known = workload.loss.name in figures.LOSSES and workload.dtype in figures.DTYPES and workload.elements in sizes
    return known or workload.title != SWEEP


def selection(
    losses: Sequence[Loss], dtypes: Sequence[str], sizes: Sequence[int], compile_sizes: Sequence[int]
) -> list[Workload]:
    """The workloads of a run, those of the figures first: the budget may cut the rest."""
    names = {x.name for x in losses}
    chosen = [x for x in special() if x.loss.name in names and x.dtype in dtypes]
    for exponent in sorted(sizes, reverse=True):
        chosen += [sweep(loss, dtype, exponent, exponent in compile_sizes) for loss in losses for dtype in dtypes]
    return sorted(chosen, key=lambda x: not is_figure(x))


def set_count(bytes_of_set: int, footprint: int) -> int:
    """The number of sets to rotate among: more than ``footprint`` bytes, or enough that no call repeats one."""
    return min(MOST_SETS, footprint // bytes_of_set + 1)


class Inputs:
    """Rotating sets of fresh random operands of a workload."""

    def __init__(self, workload: Workload, sets: int = 1) -> None:
        # Drawn together: many small tensors would be drawn one by one on the CPU.
        shapes = workload.shapes if sets == 1 else [(sets, *shape) for shape in workload.shapes]
        drawn = workload.draw(shapes, next(_seeds))
        stacks = [[x] if sets == 1 else x.unbind() for x in drawn]
        self.sets = [tuple(x.detach() for x in operands) for operands in zip(*stacks, strict=True)]

    def __getitem__(self, number: int) -> tuple[torch.Tensor, ...]:
        return self.sets[number % len(self.sets)]

    def differentiate(self, count: int) -> None:
        """Makes exactly the first ``count`` operands of every set require gradients."""
        for operands in self.sets:
            for i, x in enumerate(operands):
                x.requires_grad_(i < count)


def step(call: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
    """Runs one forward, and backward if an operand requires grad; gradients are dropped at once, as by an optimizer."""
    value = call(*operands)
    if value.requires_grad:
        value.sum().backward() if value.dim() else value.backward()
        for x in operands:
            x.grad = None
