"""Plans of calls that take several launches with matrix products between them, and run themselves.

:mod:`.execute` hands them the arrays in place of their addresses, because matrix products are the array library's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from cupylosses.engines.base import Plan, Step, Wanted
from cupylosses.engines.device import Device, Divisor
from cupylosses.jit import compiler


class Inputs(NamedTuple):
    """A launch without its plan (`execute`), with the arrays themselves."""

    device: Device
    arrays: Sequence[Any]
    scalars: Sequence[float]
    divisor: Divisor


class CompositePlan(Plan):
    """A plan that runs itself. ``auxiliary`` are the addresses of auxiliary outputs; of a plan with a residual, its
    array is the last one.
    """

    composite = True

    @abstractmethod
    def run_value(self, inputs: Inputs, auxiliary: Sequence[Any]) -> Any:
        """The value, reduced or not."""

    @abstractmethod
    def run_value_and_gradients(self, inputs: Inputs, wanted: Wanted, auxiliary: Sequence[int]) -> tuple[Any, Any]:
        """The reduced value, and the speculation of `execute.value_and_gradients`, or None."""

    @abstractmethod
    def run_gradients(
        self,
        inputs: Inputs,
        wanted: Wanted,
        grad_output: int,
        per_row: bool,
        speculation: Any,
    ) -> list[Any]:
        """The wanted gradients for a ``grad_output``, which is one number or has the shape of the value."""

    def run_from_residual(
        self,
        inputs: Inputs,
        wanted: Wanted,
        residual: Any,
        grad_output: int,
        per_row: bool,
    ) -> list[Any]:
        """The gradients from the residual of forward, for plans that have one."""
        raise NotImplementedError("this plan has no residual")

    def run_hvp(self, inputs: Inputs, wanted: Wanted, grad_output: int) -> tuple[Any, list[Any]]:
        """Of the plan of a derivative along tangents: the derivative of a value per row, and its gradients."""
        raise NotImplementedError("this plan has no second derivatives")

    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        raise NotImplementedError("a composite plan runs itself")

    def unreduced_step(self, counted: bool) -> Step:
        raise NotImplementedError("a composite plan runs itself")

    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        raise NotImplementedError("a composite plan runs itself")
