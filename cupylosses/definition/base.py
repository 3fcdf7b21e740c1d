"""What a loss is: one object from which everything else is derived.

A :class:`Loss` holds the name, the operands, the parameters, the value as a short CUDA expression, a naive reference
formula through the array API, and what tests and documentation need to know (domains, kinks, formula, source).
Kernels, functions with true signatures, docstrings, stubs, tables, comparisons, benchmarks and tests read it.

Nothing here imports an array library, CUDA or a compiler.
"""

from __future__ import annotations

import keyword
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

from cupylosses.definition.expressions import Part, check, primitives

REDUCTIONS = ("none", "mean", "sum", "batchmean", "weighted_mean")

#: Arguments that every loss takes beside its own, by name, with their defaults.
COMMON: Mapping[str, Any] = {
    "reduction": "mean", "weight": None, "mask": None, "normalizer": None, "dim": None, "out_dtype": None,
}  # fmt: skip
#: Of these, what a Module keeps unless a call says otherwise, and what is given anew with each call.
PER_MODULE = ("weight", "dim", "out_dtype")
PER_CALL = ("mask", "normalizer")
LEGACY: Mapping[str, Any] = {"size_average": None, "reduce": None}

#: Names that operands, parameters, flags, `constants` and `let` must not have: the common arguments, the loss before
#: its weight, and the first argument of a Module's methods.
RESERVED = frozenset({*COMMON, *LEGACY, "unweighted", "self"})

#: What operands hold: any number; [0, 1]; the logarithm of one of these; -1 or +1; 0 or 1; (0, inf); [0, inf).
DOMAINS = ("real", "probability", "log_probability", "sign", "binary", "positive", "nonnegative")


#: The words of C++ up to its newest, those of Python aside, and what is a macro where kernels are compiled.
_KEYWORDS = frozenset({
    "alignas", "alignof", "and_eq", "asm", "auto", "bitand", "bitor", "bool", "case", "catch", "char", "char16_t",
    "char32_t", "char8_t", "co_await", "co_return", "co_yield", "compl", "concept", "const", "const_cast", "consteval",
    "constexpr", "constinit", "decltype", "default", "delete", "do", "double", "dynamic_cast", "enum", "explicit",
    "export", "extern", "false", "float", "friend", "goto", "inline", "int", "long", "mutable", "namespace", "new",
    "noexcept", "not_eq", "nullptr", "operator", "or_eq", "private", "protected", "public", "register",
    "reinterpret_cast", "requires", "short", "signed", "sizeof", "static", "static_assert", "static_cast", "struct",
    "switch", "template", "this", "thread_local", "throw", "true", "typedef", "typeid", "typename", "union", "unsigned",
    "using", "virtual", "void", "volatile", "wchar_t", "xor", "xor_eq",
    "NULL", "blockDim", "blockIdx", "gridDim", "threadIdx",
})  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """A tensor argument of a loss.

    ``domain`` names what its values are, for sampling and documentation: one of :data:`DOMAINS`, or a pair
    ``(flag, {False: domain, True: domain})`` when a flag of the loss decides.
    ``integer`` says that integer and bool tensors are accepted too; they are read in their own dtype and have no
    gradient. Every floating operand is differentiable.
    ``number`` says that a number may stand for the tensor. With a ``default`` that number does if the argument is left
    out, or None.
    ``per_row`` says that the tensor may have one dimension fewer than the first operand: one value per row. It then
    broadcasts along the last dimension, and no other shape of fewer dimensions is taken.
    """

    name: str
    doc: str
    domain: str | tuple[str, Mapping[Any, str]] = "real"
    integer: bool = False
    number: bool = False
    default: float | None = None
    per_row: bool = False

    def domain_for(self, parameters: Mapping[str, Any]) -> str:
        """The domain under the given parameter values."""
        if isinstance(self.domain, str):
            return self.domain
        flag, choices = self.domain
        return choices[parameters[flag]]


#: The operands that a call may add to any loss.
WEIGHT = Operand("weight", "What each element is multiplied by.", domain="nonnegative")
MASK = Operand("mask", "True where an element counts.", domain="binary", integer=True)


@dataclass(frozen=True)
class Parameter:
    """A number that a kernel takes at run time. ``minimum`` and ``maximum`` are allowed unless ``exclusive``."""

    name: str
    default: float
    doc: str
    minimum: float = -math.inf
    maximum: float = math.inf
    exclusive: bool = False

    @property
    def requirement(self) -> str:
        """The range in words, as error messages and docstrings put it."""
        equal = "" if self.exclusive else "="
        bounds = [f">{equal} {self.minimum:g}"] if self.minimum != -math.inf else []
        bounds += [f"<{equal} {self.maximum:g}"] if self.maximum != math.inf else []
        return f"a number {' and '.join(bounds)}" if bounds else "a number, not NaN"

    def accepts(self, value: float) -> bool:
        """Whether ``value`` is in range; NaN never is."""
        if self.exclusive:
            # An infinity that is the default of a bound is a bound that was not given.
            return value > self.minimum and (value < self.maximum or self.maximum == math.inf)
        return self.minimum <= value <= self.maximum


@dataclass(frozen=True)
class Flag:
    """A choice that selects a variant of the kernel when it is compiled: a bool, or one of ``choices``.

    Expressions see the position of the choice, so a bool as itself.
    """

    name: str
    default: Any
    doc: str
    choices: tuple[Any, ...] = (False, True)


@dataclass(frozen=True)
class Kink:
    """A point where the derivative is a convention, and that convention."""

    operands: tuple[float, ...]
    value: float
    gradient: tuple[float, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Definition:
    """What every loss says of itself, and what follows: names, arguments, parameters and flags.

    Fields are described in ``docs/adding-a-loss.md``; :meth:`__post_init__` validates them.
    """

    name: str
    summary: str
    formula: str
    operands: tuple[Operand, ...]
    constants: Mapping[str, str] = field(default_factory=dict)
    parameters: tuple[Parameter, ...] = ()
    flags: tuple[Flag, ...] = ()
    torch: str | None = None
    module: str | None = None
    positional: str = ""
    mean_of_weights: bool = False
    convention: str = "The loss is differentiable everywhere."
    cases: tuple[Mapping[str, Any], ...] = ({},)
    notes: str = ""
    source: str = ""
    places: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [*(x.name for x in self.operands), *(x.name for x in self.options)]
        self._check_names([*names, *self.parts])
        if not 1 <= len(self.operands) <= MAX_OWN_OPERANDS:
            raise ValueError(f"{self.name}: 1 to {MAX_OWN_OPERANDS} operands, got {len(self.operands)}")
        if self.operands[0].default is not None:
            raise ValueError(f"{self.name}: the first operand, `{self.operands[0].name}`, must not have a default")
        for parameter in self.parameters:
            number = isinstance(parameter.default, numbers.Real) and not isinstance(parameter.default, bool)
            if not (number and parameter.accepts(parameter.default)):
                raise ValueError(
                    f"{self.name}: the default of `{parameter.name}` must be {parameter.requirement}, "
                    f"got {parameter.default!r}"
                )
        for flag in self.flags:
            if not any(flag.default is x for x in flag.choices):
                raise ValueError(
                    f"{self.name}: the default of `{flag.name}` must be one of {flag.choices}, got {flag.default!r}"
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
        self.check_expressions()
        known = {*names, *self.common, *LEGACY}
        for name in self.positional.split():
            if name not in known:
                raise ValueError(f"{self.name}: `positional` names the unknown argument {name!r}")

    def _check_names(self, named: Sequence[str]) -> None:
        for name in (self.name, *named):
            identifier = isinstance(name, str) and name.isascii() and name.isidentifier()
            if not identifier or keyword.iskeyword(name) or name in _KEYWORDS:
                raise ValueError(f"{self.name}: the name {name!r} must be an identifier of Python and of C++")
            # Generated code has names of its own with underscores there.
            if name.startswith("_") or name.endswith("_") or "__" in name:
                raise ValueError(
                    f"{self.name}: the name {name!r} must not begin or end with an underscore, nor have two in a row"
                )
        added = {x.name for x in self.operands if x is WEIGHT or x is MASK}
        for name in named:
            if name in self.reserved and name not in added:
                raise ValueError(f"{self.name}: the name {name!r} is taken by every loss; choose another")
        if len(set(named)) != len(named):
            raise ValueError(
                f"{self.name}: operands, parameters, flags, `constants` and `let` names must differ, got {list(named)}"
            )
        for name in named:
            if name in primitives():
                raise ValueError(f"{self.name}: the name {name!r} is that of a primitive; choose another")

    def check_expressions(self) -> None:
        """Raises unless the expressions are ones."""
        names = [x.name for x in self.parameters]
        for name, expression in self.constants.items():
            check(expression, names, Part(self.name, name, self.places.get(name)), functions={})
            names.append(name)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of what is computed from operands and options before the value."""
        return tuple(self.constants)

    @property
    def common(self) -> Mapping[str, Any]:
        """Arguments that every loss of this kind takes beside its own, by name, with their defaults."""
        return COMMON

    @property
    def reserved(self) -> Collection[str]:
        """Names that the loss must not use."""
        return RESERVED

    @property
    def keywords(self) -> tuple[str, ...]:
        """What a call of its Module takes by keyword beside the operands."""
        return tuple(x for x in COMMON if x != "reduction")

    @property
    def reductions(self) -> tuple[str, ...]:
        """The reductions that the loss accepts."""
        return REDUCTIONS

    @property
    def options(self) -> tuple[Parameter | Flag, ...]:
        """The parameters, then the flags: what a function takes besides operands and what every loss takes."""
        return (*self.parameters, *self.flags)

    @cached_property
    def legacy(self) -> bool:
        """Whether the loss takes torch's deprecated arguments."""
        return "size_average" in self.positional.split()

    @cached_property
    def arguments(self) -> tuple[tuple[str, Any], ...]:
        """``(name, default)`` of each argument of the function, in order; ``...`` is no default.

        ``positional`` decides what stands first, as torch has it for its losses; without it, the operands, the options
        and the reduction do. What every loss takes besides can be given by keyword only, behind ``("*", ...)``.
        """
        own: dict[str, Any] = {x.name: ... if x.default is None else None for x in self.operands}
        own |= {x.name: x.default for x in self.options}
        first = self.positional.split() or [*own, "reduction"]
        every = own | dict(LEGACY if self.legacy else {}) | dict(self.common)
        rest = [x for x in every if x not in first]
        return tuple((x, every[x] if x != "*" else ...) for x in (*first, "*", *rest) if x == "*" or x in every)

    @property
    def shipped(self) -> bool:
        """Whether every process has the loss by its name alone."""
        return False

    @property
    def identity(self) -> tuple[Any, ...]:
        """What makes it another loss than one of the same name."""
        raise NotImplementedError

    @cached_property
    def key(self) -> str:
        """What names the loss in a graph that outlives it: its name, with a digest if it is a user's loss."""
        if self.shipped:
            return self.name
        return f"{self.name}-{sha256(repr(self.identity).encode()).hexdigest()[:16]}"

    @cached_property
    def class_name(self) -> str:
        """The name of its Module: ``HingeLoss`` for ``hinge_loss``."""
        name = self.module or "".join(x.capitalize() for x in self.name.split("_"))
        return name if name.endswith("Loss") else f"{name}Loss"

    @cached_property
    def kept(self) -> dict[str, Any]:
        """What a Module keeps, with the defaults: the arguments but operands, and what is given anew with each call."""
        needed = {x.name for x in self.operands if x.default is None}
        return {n: v for n, v in self.arguments if n not in {*needed, *PER_CALL, *LEGACY, "*"}}

    def values(self, case: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Every parameter and flag by name, the defaults overridden by ``case``."""
        return {x.name: x.default for x in self.options} | dict(case or {})

    def bind(self, parameters: Sequence[float], flags: Sequence[int]) -> dict[str, Any]:
        """The parameters and flags of a call by name, as the reference formula takes them."""
        chosen = [x.choices[i] for x, i in zip(self.flags, flags, strict=True)]
        return dict(zip((x.name for x in self.options), (*parameters, *chosen), strict=True))

    def choose(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """The positions of the choices of the flags: what kernels are compiled for."""
        return tuple(
            next(i for i, c in enumerate(x.choices) if c is values[x.name] or c == values[x.name]) for x in self.flags
        )


#: Operands of a definition; the weight and the mask come on top.
MAX_OWN_OPERANDS = 4

#: Operands of a loss with a weight and a mask. A derivative along directions has as many directions on top at most; the
#: kernels keep one tangent for each (``kernels/core/dual.cuh``).
MAX_OPERANDS = 6


#: Losses with a function by their keys, those of users too.
_named: dict[str, Any] = {}


def remember(loss: Definition) -> None:
    """Makes a loss known by its key; the newest of that key."""
    _named[loss.key] = loss


def code_of(reference: Callable[..., Any] | None) -> Any:
    """What of a formula is the same in every process."""
    code = getattr(reference, "__code__", None)
    return (code.co_code, code.co_names, code.co_varnames) if code else reference is None


def named(key: str) -> Any:
    """The loss of a key."""
    found = _named.get(key)
    if found is None:
        name = key.partition("-")[0]
        raise LookupError(
            f"cupylosses: a graph needs the loss {name!r} ({key}), which this process has not defined. Import what "
            "calls `define_loss` for it, with the same expressions, before the graph runs."
        )
    return found
