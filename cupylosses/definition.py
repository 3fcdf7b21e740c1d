"""What a loss is: one object from which everything else is derived.

A :class:`Loss` holds the name, the operands, the parameters, the value as a short CUDA expression, a naive reference
formula through the array API, and what tests and documentation need to know (domains, kinks, formula, source).
Kernels, functions with true signatures, docstrings, stubs, tables, comparisons, benchmarks and tests read it.

Nothing here imports an array library, CUDA or a compiler.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

REDUCTIONS = ("none", "mean", "sum")

#: Names that a definition may use for operands and parameters must not collide with these arguments.
RESERVED = frozenset({"reduction", "size_average", "reduce"})

DOMAINS = ("real", "probability", "log_probability", "sign")


@dataclass(frozen=True)
class Operand:
    """A tensor argument of a loss.

    ``domain`` names what its values are, for sampling and documentation: one of :data:`DOMAINS`, or a pair
    ``(flag, {False: domain, True: domain})`` when a flag of the loss decides.
    ``integer`` says that integer and bool tensors are accepted too; they are read in their own dtype and have no
    gradient. Every floating operand is differentiable.
    """

    name: str
    doc: str
    domain: str | tuple[str, Mapping[bool, str]] = "real"
    integer: bool = False

    def domain_for(self, parameters: Mapping[str, Any]) -> str:
        """The domain under the given parameter values."""
        if isinstance(self.domain, str):
            return self.domain
        flag, choices = self.domain
        return choices[bool(parameters[flag])]


@dataclass(frozen=True)
class Parameter:
    """A number that a kernel takes at run time. ``minimum`` is allowed itself unless ``exclusive``."""

    name: str
    default: float
    doc: str
    minimum: float = -math.inf
    exclusive: bool = False

    @property
    def requirement(self) -> str:
        """The range in words, as error messages and docstrings put it."""
        if self.minimum == -math.inf:
            return "a number, not NaN"
        return f"a number {'>' if self.exclusive else '>='} {self.minimum:g}"

    def accepts(self, value: float) -> bool:
        """Whether ``value`` is in range; NaN never is."""
        return value > self.minimum if self.exclusive else value >= self.minimum


@dataclass(frozen=True)
class Flag:
    """A bool that selects a variant of the kernel when it is compiled."""

    name: str
    default: bool
    doc: str


@dataclass(frozen=True)
class Kink:
    """A point where the derivative is a convention, and that convention."""

    operands: tuple[float, ...]
    value: float
    gradient: tuple[float, ...]


def _no_kinks(**_: Any) -> Sequence[Kink]:
    return ()


@dataclass(frozen=True, eq=False)
class Loss:
    """An element-wise loss. Fields are described in ``docs/adding-a-loss.md``; :meth:`__post_init__` validates them."""

    name: str
    summary: str
    formula: str
    operands: tuple[Operand, ...]
    value: str
    reference: Callable[..., Any]
    let: Mapping[str, str] = field(default_factory=dict)
    parameters: tuple[Parameter, ...] = ()
    flags: tuple[Flag, ...] = ()
    torch: str | None = None
    legacy: bool = False
    batchmean: bool = False
    warn_broadcast: bool = False
    kinks: Callable[..., Sequence[Kink]] = _no_kinks
    convention: str = "The loss is differentiable everywhere."
    cases: tuple[Mapping[str, Any], ...] = ({},)
    notes: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        names = [*(x.name for x in self.operands), *(x.name for x in self.options)]
        for name in (self.name, *names, *self.let):
            if not name.isidentifier() or keyword.iskeyword(name):
                raise ValueError(f"{self.name}: {name!r} must be a Python identifier")
        for name in names:
            if name in RESERVED:
                raise ValueError(f"{self.name}: the name {name!r} is taken by every loss; choose another")
        if len({*names, *self.let}) != len(names) + len(self.let):
            raise ValueError(f"{self.name}: operands, parameters, flags and `let` names must differ, got {names}")
        if not 1 <= len(self.operands) <= MAX_OPERANDS:
            raise ValueError(f"{self.name}: 1 to {MAX_OPERANDS} operands, got {len(self.operands)}")
        for parameter in self.parameters:
            if not parameter.accepts(parameter.default):
                raise ValueError(
                    f"{self.name}: the default of `{parameter.name}` must be {parameter.requirement}, "
                    f"got {parameter.default!r}"
                )
        for operand in self.operands:
            for domain in [operand.domain] if isinstance(operand.domain, str) else operand.domain[1].values():
                if domain not in DOMAINS:
                    raise ValueError(
                        f"{self.name}: domain of `{operand.name}` must be one of {DOMAINS}, got {domain!r}"
                    )
        for case in self.cases:
            for name in case:
                if name not in names:
                    raise ValueError(f"{self.name}: a case names the unknown parameter {name!r}")

    @cached_property
    def reductions(self) -> tuple[str, ...]:
        """The reductions that the loss accepts."""
        return (*REDUCTIONS, "batchmean") if self.batchmean else REDUCTIONS

    @property
    def options(self) -> tuple[Parameter | Flag, ...]:
        """The parameters, then the flags: what a function takes besides operands and reduction."""
        return (*self.parameters, *self.flags)

    @property
    def arguments(self) -> tuple[tuple[str, Any], ...]:
        """``(name, default)`` of each argument of the function, in order; operands have no default (``...``).

        A loss with a twin in torch has torch's order, where the reduction stands before the parameters.
        """
        operands = tuple((x.name, ...) for x in self.operands)
        legacy = (("size_average", None), ("reduce", None)) if self.legacy else ()
        options = tuple((x.name, x.default) for x in self.options)
        reduction = (("reduction", "mean"),)
        return (*operands, *legacy, *reduction, *options) if self.torch else (*operands, *options, *reduction)

    def values(self, case: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Every parameter and flag by name, the defaults overridden by ``case``."""
        return {x.name: x.default for x in self.options} | dict(case or {})

    def bind(self, parameters: Sequence[float], flags: Sequence[bool]) -> dict[str, Any]:
        """The parameters and flags of a call by name, as the reference formula takes them."""
        return dict(zip((x.name for x in self.options), (*parameters, *flags), strict=True))


#: The kernels keep one tangent per operand; ``kernels/dual.cuh`` has the same number.
MAX_OPERANDS = 4

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
    from cupylosses import losses  # noqa: F401  (importing the package makes the definitions)

    return _registry
