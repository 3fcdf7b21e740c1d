"""Kernels of a loss for the compile gate: all of them, those of each subset, and the requirements for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from cupylosses.definition.base import Definition
from cupylosses.testing.by_engine import ByEngine
from tools.nvrtc import Resources

#: A kernel, and the architecture to compile it for.
Compiled = tuple[Any, str]


class Variants(ByEngine, ABC, modules="tools.{}.variants"):
    """Kernels of one loss; ``Variants(loss)`` makes an instance of the subclass for the loss's engine.

    ``spills`` are the bytes of registers that each kernel may spill.
    """

    spills: ClassVar[float] = 0

    def __init__(self, loss: Definition) -> None:
        self.loss = loss

    @abstractmethod
    def kernels(self, fast: bool = False) -> list[Any]:
        """Returns every kernel that calls of the loss can reach; with ``fast``, for two dtypes and common layouts."""

    @classmethod
    def fast(cls, losses: Sequence[Any]) -> list[Any]:
        """Returns the kernels of several losses, for two dtypes and the common layouts."""
        return [v for x in losses for v in cls(x).kernels(fast=True)]

    @abstractmethod
    def broad(self, architecture: str, whole: bool = True) -> list[Any]:
        """Returns the kernels of the broad subset; without ``whole``, those of a loss that others stand for."""

    @classmethod
    @abstractmethod
    def newest(
        cls, losses: Sequence[Any], whole: Collection[Any], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        """Yields the kernels of the fast subset for the newest compiler.

        They cover each formula, and of the losses ``whole`` each kernel, layout and access to memory. Most are for the
        architecture ``broadest``, some for the ``others`` in turn.
        """

    @classmethod
    @abstractmethod
    def older(
        cls, losses: Sequence[Any], whole: Collection[Any], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        """Yields the kernels of the fast subset for an older compiler: each kernel and layout."""

    @classmethod
    def may_spill(cls, variant: Any) -> float:
        """Returns the bytes of registers that a kernel may spill."""
        return cls.spills

    @staticmethod
    @abstractmethod
    def wide_accesses(variant: Any) -> tuple[int, int]:
        """Returns the minimum of 16-byte loads and stores of a kernel whose operands are contiguous."""

    @staticmethod
    @abstractmethod
    def described(variant: Any) -> Mapping[str, str]:
        """Returns columns of the gate's table: dtypes, layout, access, gradients and flags of a kernel."""


def variants(loss: Definition, fast: bool = False) -> list[Any]:
    """Returns the kernels of a loss; with ``fast``, for two dtypes and the common layouts."""
    return Variants(loss).kernels(fast)


def wide_accesses(variant: Any) -> tuple[int, int]:
    """Returns the minimum of 16-byte loads and stores of a kernel whose operands are contiguous."""
    return Variants.of(variant.loss).wide_accesses(variant)


def complaints(variant: Any, found: Resources, spills: int = 0) -> tuple[str, ...]:
    """Returns the defects of a compiled kernel.

    These are warnings, spills beyond the allowed bytes, and narrow accesses to contiguous operands.
    """
    wrong = list(found.warnings)
    if found.entries != (variant.entry,):
        wrong.append(f"the entry points are {found.entries}, expected {variant.entry}")
    if found.spills > max(spills, Variants.of(variant.loss).may_spill(variant)):
        wrong.append(f"{found.spills} bytes of registers spilled")
    loads, stores = wide_accesses(variant)
    if found.wide_loads < loads:
        wrong.append(f"{found.wide_loads} 16-byte loads in the kernel, expected at least {loads}")
    if found.wide_stores < stores:
        wrong.append(f"{found.wide_stores} 16-byte stores in the kernel, expected at least {stores}")
    return tuple(wrong)
