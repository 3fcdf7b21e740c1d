"""Kernels of engines whose subsets are small sets of kernels that cover all traits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tools.gate_subsets import BROADEST, cover
from tools.variants import Compiled, Variants

#: A function that yields the traits of a kernel.
Traits = Callable[[Any], Iterator[Hashable]]


@dataclass(frozen=True)
class Subsets:
    """Traits that the kernels of each subset cover.

    Attributes:
        dtypes: Traits of the broad subset for BROADEST.
        structure: Traits of the broad subset for other architectures, and of the fast one for BROADEST.
        in_turn: Traits of the fast subset for other architectures in turn.
        older: Traits of the fast subset for an older compiler.
        training: The kinds of the kernels that are compiled for other architectures.
    """

    dtypes: Traits
    structure: Traits
    in_turn: Traits
    older: Traits
    training: Collection[str]

    def trained(self, kernels: Sequence[Any]) -> list[Any]:
        """Returns the training kernels."""
        return [x for x in kernels if x.kind in self.training]


class CoveredVariants(Variants):
    """Kernels of one loss, of an engine that defines the traits of its ``subsets``."""

    @staticmethod
    @abstractmethod
    def subsets() -> Subsets:
        """Returns the traits of each subset."""

    def broad(self, architecture: str, whole: bool = True) -> list[Any]:
        """Covers each dtype and structure for BROADEST; each structure of training kernels for others."""
        if architecture == BROADEST:
            return cover(self.kernels(), self.subsets().dtypes)
        return cover(self.subsets().trained(self.kernels(fast=True)), self.subsets().structure)

    @classmethod
    def newest(
        cls, losses: Sequence[Any], whole: Collection[Any], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        """Covers each structure; training kernels also for the other architectures in turn."""
        kernels = cls.fast(losses)
        for variant in cover(kernels, cls.subsets().structure):
            yield variant, broadest
        for variant in cover(cls.subsets().trained(kernels), cls.subsets().in_turn):
            yield variant, next(others)

    @classmethod
    def older(
        cls, losses: Sequence[Any], whole: Collection[Any], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        yield from ((x, broadest) for x in cover(cls.fast(losses), cls.subsets().older))
