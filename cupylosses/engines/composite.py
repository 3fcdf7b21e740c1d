"""Composite plans: plans that take several launches with matrix products between them, and run themselves.

:mod:`.execute` passes them arrays instead of addresses, because the array library computes the matrix products.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from cupylosses.engines.base import Plan, Step, Wanted
from cupylosses.engines.device import Device, Divisor
from cupylosses.jit import compiler


class Inputs(NamedTuple):
    """Description of a launch without its plan (see `execute`), with arrays instead of addresses."""

    device: Device
    arrays: Sequence[Any]
    scalars: Sequence[float]
    divisor: Divisor


class CompositePlan(Plan):
    """A plan that runs itself.

    ``auxiliary`` are the addresses of auxiliary outputs. If a plan has a residual, the last entry is its array.
    """

    composite = True

    @abstractmethod
    def run_value(self, inputs: Inputs, auxiliary: Sequence[Any]) -> Any:
        """Returns the value, reduced or not."""

    @abstractmethod
    def run_value_and_gradients(self, inputs: Inputs, wanted: Wanted, auxiliary: Sequence[int]) -> tuple[Any, Any]:
        """Returns the reduced value, and the speculation of `execute.value_and_gradients` or None."""

    @abstractmethod
    def run_gradients(
        self,
        inputs: Inputs,
        wanted: Wanted,
        grad_output: int,
        per_row: bool,
        speculation: Any,
    ) -> list[Any]:
        """Returns the wanted gradients for a ``grad_output``.

        It has the shape of the value if ``per_row``; otherwise it is one number.
        """

    def run_from_residual(
        self,
        inputs: Inputs,
        wanted: Wanted,
        residual: Any,
        grad_output: int,
        per_row: bool,
    ) -> list[Any]:
        """Returns the gradients, computed from the residual of forward, for plans that have one."""
        raise NotImplementedError("this plan has no residual")

    def run_hvp(self, inputs: Inputs, wanted: Wanted, grad_output: int) -> tuple[Any, list[Any]]:
        """Returns a derivative along tangents, one value per row, and its gradients, for plans of such a derivative."""
        raise NotImplementedError("this plan has no second derivatives")

    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        raise NotImplementedError("a composite plan runs itself")

    def unreduced_step(self, counted: bool) -> Step:
        raise NotImplementedError("a composite plan runs itself")

    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        raise NotImplementedError("a composite plan runs itself")
