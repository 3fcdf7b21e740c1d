"""Definition of an element-wise loss, and the registry of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cupylosses.definition.base import Definition, Kink, code_of
from cupylosses.definition.expressions import Part, check


def _no_kinks(**_: Any) -> Sequence[Kink]:
    return ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Loss(Definition):
    """An element-wise loss."""

    value: str
    reference: Callable[..., Any] | None = None
    let: Mapping[str, str] = field(default_factory=dict)
    derivatives: Mapping[str, str] = field(default_factory=dict)
    mean_of_rows: bool = False
    warn_broadcast: bool = False
    heavy: int = 0
    kinks: Callable[..., Sequence[Kink]] = _no_kinks

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.constants, *self.let)

    def check_expressions(self) -> None:
        super().check_expressions()
        names = [*(x.name for x in self.operands), *(x.name for x in self.options), *self.constants]
        for name, expression in self.let.items():
            check(expression, names, Part(self.name, name, self.places.get(name)))
            names.append(name)
        check(self.value, names, Part(self.name, "value", self.places.get("value")))
        for name, expression in self.derivatives.items():
            if name not in {x.name for x in self.operands}:
                raise ValueError(f"{self.name}: a derivative for {name!r}, which is no operand")
            part = f"derivatives.{name}"
            check(expression, names, Part(self.name, part, self.places.get(part)))

    @property
    def shipped(self) -> bool:
        return _registry.get(self.name) is self

    @property
    def identity(self) -> tuple[Any, ...]:
        own = (self.operands, self.value, self.let, self.constants, self.derivatives, self.parameters, self.flags)
        return (*own, code_of(self.reference))

    @cached_property
    def forms(self) -> Mapping[Any, Loss]:
        """What a call can make of the loss (:func:`cupylosses.engines.pointwise.modifiers.all_forms`)."""
        from cupylosses.engines.pointwise.modifiers import all_forms

        return all_forms(self)

    @cached_property
    def takes_numbers(self) -> bool:
        """Whether a number may stand for one of the operands."""
        return any(x.number or x.default is not None for x in self.operands)


_registry: dict[str, Loss] = {}


def define(**fields: Any) -> Loss:
    """Make a :class:`Loss` and enter it in the registry, from which the public functions are built."""
    loss = Loss(**fields)
    if loss.name in _registry:
        raise ValueError(f"a loss named {loss.name!r} is defined already")
    _registry[loss.name] = loss
    return loss


def registry() -> Mapping[str, Loss]:
    """Every defined loss by name, in the order of definition."""
    return _registry
