"""Workloads: losses with their options, shapes, dtypes and modes, on random operands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from benchmarking.draw import Draw
from benchmarking.figures import MODES, SWEEP, spell_case, spell_shape
from cupylosses import functional
from cupylosses.checks import FLOATING, promote
from cupylosses.definition.base import Definition
from cupylosses.testing.by_engine import ByEngine
from cupylosses.testing.eager import Call

if TYPE_CHECKING:
    from benchmarking.selection import Run

DEVICE = "cuda"

#: Maximum number of operand sets. A measurement makes no more calls, so no call finds its operands in the cache.
MOST_SETS = 1024


_seeds = count()


@dataclass(frozen=True)
class Workload(ByEngine, ABC, modules="benchmarking.{}"):
    """One loss with its options, on operands of one dtype; ``Workload(loss, ...)`` makes the workload of its engine.

    ``eager`` is the expression that torch users write, if that is not torch's own function with these options.
    ``beside`` is the workload to compare with, if any. ``others`` is the dtype of the floating operands other than the
    first, if it differs from ``dtype``.

    Attributes:
        section: Section of the report that measures the throughput of the engine's losses; None if a section of its own
            measures them.
        moves_memory: True if moving the operands bounds the time of a loss, so that a copy is its lower bound.
        more_columns: Columns of that section that only the engine's losses have.
        mixes: True if floating operands may differ in dtype.
        sweeps: True if the operands may share one shape of any size.
        cliffs: Module with the engine's cases of the section ``cliffs``.
    """

    section: ClassVar[str | None]
    moves_memory: ClassVar[bool] = True
    more_columns: ClassVar[tuple[str, ...]] = ()
    mixes: ClassVar[bool] = True
    sweeps: ClassVar[bool] = False
    cliffs: ClassVar[str]

    loss: Definition
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    title: str = SWEEP
    case: Mapping[str, Any] = field(default_factory=dict)
    reduction: str = "mean"
    eager: Callable[..., Any] | None = None
    compiled: bool = False
    beside: Workload | None = None
    others: str = ""

    # Supplied by the engine's workload

    @property
    @abstractmethod
    def drawn(self) -> tuple[str, ...]:
        """The dtype of each operand if all floating operands have the dtype of the workload."""

    @abstractmethod
    def draw(self, shapes: Sequence[Sequence[int]], seed: int) -> Sequence[torch.Tensor]:
        """Random operands with these shapes and the dtypes in ``drawn``."""

    @abstractmethod
    def torchs(self) -> Call | None:
        """The call that torch users make: torch's own function, or the expression of the workload."""

    @abstractmethod
    def compiled_in(self, modes: Sequence[str], quick: bool) -> Sequence[str]:
        """The modes of a run in which torch.compile is measured."""

    @classmethod
    @abstractmethod
    def chosen(cls, run: Run) -> Sequence[Workload]:
        """The workloads of a run's throughput. Those of the figures come first: the budget may cut off the rest."""

    @classmethod
    @abstractmethod
    def tiny(cls, loss: Any) -> Workload:
        """The workload for host time."""

    @classmethod
    @abstractmethod
    def large(cls, loss: Any) -> Workload:
        """The workload for peak memory."""

    @classmethod
    @abstractmethod
    def fitting(cls, loss: Any, free: int) -> Workload:
        """The workload that ``compare.py`` times; its largest operand fits into ``free`` bytes."""

    @classmethod
    @abstractmethod
    def random(cls, loss: Any, draw: Draw) -> Workload:
        """A workload with random shapes, dtype, reduction and options."""

    # Replaced where an engine differs

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the loss before it is reduced."""
        return self.shapes[0]

    def ours(self) -> Call:
        """This library's function."""
        function, options = getattr(functional, self.loss.name), {**self.case, "reduction": self.reduction}
        return lambda *operands: function(*operands, **options)

    def __str__(self) -> str:
        words = [self.loss.name, self.spelled_dtype, spell_shape(self.shape), self.variant, spell_case(self.case)]
        return " ".join(filter(None, words))

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes in which this workload can be measured."""
        return tuple(MODES)

    @property
    def reads_again(self) -> bool:
        """True if backward must read every operand again, as it must if the loss is not reduced to one number."""
        return False

    @property
    def least_read(self) -> int:
        """Minimum number of bytes that a pass over the operands reads."""
        return self.bytes

    @property
    def values(self) -> int:
        """Number of elements of the unreduced loss."""
        return self.elements

    @property
    def variant(self) -> str:
        """Words for variations that neither the case nor the shapes show."""
        return ""

    def naive(self) -> Call | None:
        """The formula with the requested reduction, one torch operation at a time.

        None if the workload has no such formula.
        """
        return None

    # Common

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtype of each operand."""
        first, *rest = self.drawn
        return (first, *(self.others if self.others and x in FLOATING else x for x in rest))

    @property
    def spelled_dtype(self) -> str:
        """The dtypes of the floating operands as text."""
        return f"{self.dtype} and {self.others}" if self.others else self.dtype

    @property
    def promoted(self) -> str:
        """The dtype of the result: the promoted dtype of the loss's own operands. Added arrays do not widen it."""
        return promote(self.dtypes[: len(self.loss.operands)])

    @property
    def elements(self) -> int:
        """Number of elements of `shape`."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of one set of operands in bytes."""
        return sum(self.operand_bytes)

    @property
    def operand_bytes(self) -> tuple[int, ...]:
        """Size of each operand in bytes."""
        sizes = [getattr(torch, x).itemsize for x in self.dtypes]
        return tuple(prod(shape) * size for shape, size in zip(self.shapes, sizes, strict=True))

    def differentiated(self, mode: str) -> int:
        """Number of operands, counted from the first, that require grad in ``mode``."""
        count = MODES[mode]
        floating = sum(x in FLOATING for x in self.dtypes)
        return floating if count is None else count

    def traffic(self, mode: str) -> int:
        """Minimal memory traffic of ``mode`` in bytes: each operand read once, each gradient written once.

        If backward must read the operands again (`reads_again`), that counts, too.
        """
        gradients = sum(self.operand_bytes[: self.differentiated(mode)])
        again = self.least_read if self.reads_again and gradients else 0
        return self.least_read + gradients + again

    def describe(self, mode: str, columns: Sequence[str]) -> dict[str, Any]:
        """Values of those ``columns`` that identify a measurement."""
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


def set_count(bytes_of_set: int, footprint: int) -> int:
    """Number of operand sets to rotate among: they exceed ``footprint`` bytes, or no call repeats a set."""
    return min(MOST_SETS, footprint // bytes_of_set + 1)


class Inputs:
    """Sets of random operands of a workload; indices beyond the last set wrap around."""

    def __init__(self, workload: Workload, sets: int = 1) -> None:
        # Draw all sets together. Many small tensors would otherwise be drawn on the CPU, one by one.
        shapes = workload.shapes if sets == 1 else [(sets, *shape) for shape in workload.shapes]
        drawn = workload.draw(shapes, next(_seeds))
        drawn = [x.to(getattr(torch, dtype)) for x, dtype in zip(drawn, workload.dtypes, strict=True)]
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
    """Runs forward, and backward if an operand requires grad. Drops gradients immediately, as an optimizer does."""
    value = call(*operands)
    if value.requires_grad:
        value.sum().backward() if value.dim() else value.backward()
        for x in operands:
            x.grad = None
