"""Definition of a loss: one object from which everything else is derived.

A :class:`Definition` holds the name, the operands, the parameters, the value as a short CUDA expression, a plain
reference formula written against the array API, and the facts that tests and documentation need (domains, kinks,
formula, publication). Kernels, functions with true signatures, docstrings, type stubs, tables, comparisons, benchmarks
and tests are derived from it. Each engine subclasses it.

Nothing here imports an array library, CUDA or a compiler.
"""

from __future__ import annotations

import json
import keyword
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, ClassVar

from cupylosses.definition.expressions import Part, check, primitives

REDUCTIONS = ("none", "mean", "sum", "batchmean", "weighted_mean")

#: Keyword arguments common to all element-wise losses, with their defaults.
COMMON: Mapping[str, Any] = {
    "reduction": "mean", "weight": None, "mask": None, "normalizer": None, "dim": None, "out_dtype": None,
}  # fmt: skip
#: Common arguments that a Module's constructor accepts and a call can override; those that only a call accepts.
PER_MODULE = ("weight", "dim", "out_dtype")
PER_CALL = ("mask", "normalizer")
#: Deprecated arguments of torch's losses, accepted by the drop-in replacements of those losses that have them.
LEGACY: Mapping[str, Any] = {"size_average": None, "reduce": None}

#: Names that operands, parameters, flags, `constants` and `let` must not use: the common arguments, the loss before
#: its weight is applied (``unweighted``), and the first argument of a Module's methods (``self``).
RESERVED = frozenset({*COMMON, *LEGACY, "unweighted", "self"})

#: Domains of operands by name, with the text that docstrings show.
DOMAINS: Mapping[str, str] = {
    "real": "any number",
    "probability": "[0, 1]",
    "log_probability": "[-inf, 0]",
    "sign": "-1 or +1",
    "binary": "0 or 1",
    "positive": "(0, inf)",
    "nonnegative": "[0, inf)",
}  # fmt: skip

#: Example values for docstrings, by domain. The i-th required operand of a loss gets the i-th choice, or the last one.
SAMPLES: Mapping[str, Sequence[Sequence[float]]] = {
    "real": ((0.5, -1.25, 2.0), (1.0, -1.0, 0.25), (-0.5, 0.75, 1.5)),
    "probability": ((0.7, 0.2, 0.1), (0.5, 0.25, 0.25)),
    "log_probability": ((-0.3567, -1.6094, -2.3026), (-0.6931, -1.3863, -1.3863)),
    "sign": ((1.0, -1.0, -1.0),),
    "binary": ((1.0, 0.0, 1.0),),
    "positive": ((0.5, 1.5, 3.0), (1.0, 1.25, 2.5)),
    "nonnegative": ((0.5, 1.0, 3.0), (1.0, 0.0, 4.0)),
}

#: Keywords of C++ up to the newest standard that are not keywords of Python, and macros of the kernels' compilers.
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

    ``domain``: the range of its values, for sampling and documentation. One of :data:`DOMAINS`, or a pair
    ``(flag, {False: domain, True: domain})`` when a flag of the loss decides.
    ``integer``: integer and bool tensors are accepted too; they are read in their own dtype and have no gradient.
    Every floating operand is differentiable.
    ``number``: a Python number may replace the tensor. If there is a ``default``, None and an omitted argument mean
    that number.
    ``per_row``: the tensor may have one dimension fewer than the first operand, one value per row. It then broadcasts
    along the last dimension, and no other shape of fewer dimensions is accepted.
    """

    name: str
    doc: str
    domain: str | tuple[str, Mapping[Any, str]] = "real"
    integer: bool = False
    number: bool = False
    default: float | None = None
    per_row: bool = False

    @property
    def annotation(self) -> str:
        """Type annotation in the stubs."""
        return f"_Exchangeable{' | float' * self.number}{' | None' * (self.default is not None)}"

    def domain_for(self, parameters: Mapping[str, Any]) -> str:
        """Name of the operand's domain for these values of the flags."""
        if isinstance(self.domain, str):
            return self.domain
        flag, choices = self.domain
        return choices[parameters[flag]]

    @property
    def domain_text(self) -> str:
        """The domain in words, for docstrings; one per choice of the flag if a flag decides."""
        if isinstance(self.domain, str):
            return DOMAINS[self.domain]
        flag, domains = self.domain
        choices: dict[str, list[str]] = {}
        for choice, domain in domains.items():
            choices.setdefault(DOMAINS[domain], []).append(f"{choice!r}")
        return ", ".join(f"{text} if `{flag}` is {' or '.join(x)}" for text, x in choices.items())


#: The operands that a call may add to any element-wise loss.
WEIGHT = Operand("weight", "Factor of each element.", domain="nonnegative")
MASK = Operand("mask", "True where an element counts.", domain="binary", integer=True)


@dataclass(frozen=True)
class Parameter:
    """A number that kernels receive at run time. ``minimum`` and ``maximum`` are in range unless ``exclusive``."""

    name: str
    default: float
    doc: str
    minimum: float = -math.inf
    maximum: float = math.inf
    exclusive: bool = False

    #: Type annotation in the stubs.
    annotation: ClassVar[str] = "float"

    @property
    def requirement(self) -> str:
        """The valid range in words, for error messages and docstrings."""
        equal = "" if self.exclusive else "="
        bounds = [f">{equal} {self.minimum:g}"] if self.minimum != -math.inf else []
        bounds += [f"<{equal} {self.maximum:g}"] if self.maximum != math.inf else []
        return f"a number {' and '.join(bounds)}" if bounds else "a number, not NaN"

    def accepts(self, value: float) -> bool:
        """True if ``value`` is in range; NaN never is."""
        if self.exclusive:
            # An infinite maximum means that there is no upper bound, so infinity itself is in range.
            return value > self.minimum and (value < self.maximum or self.maximum == math.inf)
        return self.minimum <= value <= self.maximum


def one_of(choices: Sequence[Any]) -> str:
    """Type annotation of an argument that must be one of these strings and numbers."""
    return f"Literal[{', '.join([json.dumps(x) if isinstance(x, str) else repr(x) for x in choices])}]"


@dataclass(frozen=True)
class Flag:
    """A compile-time choice that selects a variant of the kernel: a bool, or one of ``choices``.

    Expressions see the index of the choice; a bool is its own index.
    """

    name: str
    default: Any
    doc: str
    choices: tuple[Any, ...] = (False, True)

    @property
    def annotation(self) -> str:
        """Type annotation in the stubs."""
        others = [x for x in self.choices if not isinstance(x, bool)]
        bools = ["bool"] * (len(others) < len(self.choices) or self.choices[0] is None)
        return " | ".join([*bools, *([one_of(others)] if others else [])])


@dataclass(frozen=True)
class Kink:
    """A point where the loss has no derivative: its operands, its value, and the gradient returned by convention."""

    operands: tuple[float, ...]
    value: float
    gradient: tuple[float, ...]


#: Type annotations of the common arguments in the stubs.
ANNOTATIONS: Mapping[str, str] = {
    "reduction": "_Reduction",
    "weight": "_Exchangeable | float | None",
    "mask": "_Exchangeable | None",
    "normalizer": "_Exchangeable | float | None",
    "dim": "int | tuple[int, ...] | None",
    "out_dtype": "Any",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Definition:
    """Fields common to the definitions of all engines, and the signature, names and documentation derived from them.

    ``docs/adding-a-loss.md`` describes the fields; :meth:`__post_init__` validates them.
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
    example: str = ""
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
                        f"{self.name}: domain of `{operand.name}` must be one of {tuple(DOMAINS)}, got {domain!r}"
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
            # Generated code uses underscores in these places for names of its own.
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
        """Raises :class:`ExpressionError` unless every expression is well formed."""
        names = [x.name for x in self.parameters]
        for name, expression in self.constants.items():
            check(expression, names, Part(self.name, name, self.places.get(name)), functions={})
            names.append(name)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the intermediate results that are computed before the value."""
        return tuple(self.constants)

    #: The engine that computes the loss.
    engine: ClassVar[Any] = None

    #: The derivatives, in words, that no kernel computes: those of the reference formula serve instead.
    derivatives_by_formula: ClassVar[str] = "third derivatives"

    #: Return type in the stubs, unless options add results; by default the type of the first operand.
    result_type: ClassVar[str] = "_Array"

    #: True if backends return several differentiable results in one array, which `Engine.unpacked` splits.
    packs: ClassVar[bool] = False

    @cached_property
    def array_names(self) -> tuple[str, ...]:
        """Names of the array arguments: the operands, then those that every loss of the engine accepts."""
        return (*(x.name for x in self.operands), "weight", "mask", "normalizer")

    @cached_property
    def setting_names(self) -> tuple[str, ...]:
        """The other arguments, in the order in which the engine binds them; a literal for one that the loss lacks."""
        return ("reduction", *(x.name for x in self.options), "dim", "out_dtype")

    @cached_property
    def default_settings(self) -> tuple[Any, ...]:
        """Default of each setting.

        A literal is compiled as in the public function, to the same object, because calls are compared by identity.
        """
        defaults = dict(self.arguments)
        return tuple([defaults[x] if x in defaults else eval(x, {}) for x in self.setting_names])

    def resolve(self) -> None:
        """Computes all cached properties: torch.compile cannot trace the lock of a first access."""
        for kind in type(self).__mro__:
            for name, member in vars(kind).items():
                if isinstance(member, cached_property):
                    getattr(self, name)

    @property
    def common(self) -> Mapping[str, Any]:
        """Arguments shared by the losses of the engine, by name, with their defaults."""
        return COMMON

    @property
    def annotations(self) -> Mapping[str, str]:
        """Type annotations of arguments in :attr:`common` and :attr:`layer`, and of operands that override theirs."""
        return ANNOTATIONS

    def annotation(self, name: str) -> str:
        """Type annotation of an argument in the stubs.

        The first operand has the type of the result; torch's deprecated arguments are bools.
        """
        if name == self.operands[0].name:
            return "_Array"
        arguments: tuple[Operand | Parameter | Flag, ...] = (*self.operands, *self.parameters, *self.flags)
        declared = {x.name: x.annotation for x in arguments}
        return self.annotations.get(name) or declared.get(name, "bool | None")

    @property
    def reserved(self) -> Collection[str]:
        """Names that operands, options and intermediate results must not use."""
        return RESERVED

    #: Constructor arguments of a Module that owns a layer, whose parameters serve as operands: defaults by name, with
    #: ``...`` if there is none. Empty if the Module has no layer.
    layer: ClassVar[Mapping[str, Any]] = {}

    @property
    def called_with(self) -> list[str]:
        """Operands that a call of the loss's Module accepts."""
        return [x.name for x in self.operands if x.default is None]

    @property
    def keywords(self) -> tuple[str, ...]:
        """Keyword arguments that a call of the loss's Module accepts in addition to the operands."""
        return tuple([x for x in self.common if x != "reduction"])

    @property
    def keyword_only(self) -> tuple[str, ...]:
        """Keyword-only arguments of the public function."""
        names = [x for x, _ in self.arguments]
        return tuple(names[names.index("*") + 1 :])

    @property
    def reductions(self) -> tuple[str, ...]:
        """Accepted values of ``reduction``."""
        return REDUCTIONS

    @property
    def options(self) -> tuple[Parameter | Flag, ...]:
        """The parameters, then the flags: the loss's own arguments that are not arrays."""
        return (*self.parameters, *self.flags)

    @cached_property
    def legacy(self) -> bool:
        """True if the loss accepts torch's deprecated arguments."""
        return "size_average" in self.positional.split()

    @cached_property
    def arguments(self) -> tuple[tuple[str, Any], ...]:
        """``(name, default)`` of each argument of the function, in order; a default of ``...`` means there is none.

        ``positional`` lists the arguments that can be passed by position, in torch's order for torch's losses; without
        it they are the operands, the options and the reduction. All others follow ``("*", ...)`` and are keyword-only.
        """
        declared: dict[str, Any] = {x.name: ... if x.default is None else None for x in self.operands}
        declared |= {x.name: x.default for x in self.options}
        first = self.positional.split() or [*declared, "reduction"]
        defaults = declared | dict(LEGACY if self.legacy else {}) | dict(self.common)
        keyword_only = [x for x in defaults if x not in first]
        return tuple(
            (x, defaults[x] if x != "*" else ...) for x in (*first, "*", *keyword_only) if x == "*" or x in defaults
        )

    #: True for the library's own definitions, which every process has under the name alone.
    shipped: ClassVar[bool] = False

    @property
    def identity(self) -> tuple[Any, ...]:
        """Everything that distinguishes the loss from another one of the same name."""
        raise NotImplementedError

    @cached_property
    def key(self) -> str:
        """Name of the loss in a serialized graph: its own name, with a digest appended if it is a user's loss."""
        if self.shipped:
            return self.name
        return f"{self.name}-{sha256(repr(self.identity).encode()).hexdigest()[:16]}"

    @cached_property
    def class_name(self) -> str:
        """Class name of the loss's Module: ``HingeLoss`` for ``hinge_loss``."""
        name = self.module or "".join(x.capitalize() for x in self.name.split("_"))
        return name if name.endswith("Loss") else f"{name}Loss"

    @cached_property
    def kept(self) -> dict[str, Any]:
        """Arguments that a Module stores, with their defaults.

        These are all but the required operands, the arguments that only a call accepts, and torch's deprecated ones.
        """
        needed = {x.name for x in self.operands if x.default is None}
        return {n: v for n, v in self.arguments if n not in {*needed, *PER_CALL, *LEGACY, "*"}}

    def values(self, case: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Values of all parameters and flags by name: the defaults, overridden by ``case``."""
        return {x.name: x.default for x in self.options} | dict(case or {})

    def bind(self, parameters: Sequence[float], flags: Sequence[int]) -> dict[str, Any]:
        """Parameters and flags of a call by name, as keyword arguments of the reference formula."""
        values = [x.choices[i] for x, i in zip(self.flags, flags, strict=True)]
        return dict(zip((x.name for x in self.options), (*parameters, *values), strict=True))

    def choose(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """Index of each flag's choice; kernels are specialised on these indices."""
        return tuple(
            next(i for i, c in enumerate(x.choices) if c is values[x.name] or c == values[x.name]) for x in self.flags
        )

    # ------------------------------------------------------------------------------------------------------------------
    # Texts that `definition/docstring.py` assembles into docstrings. An engine overrides those that differ for its
    # losses.

    def describe_operand(self, operand: Operand) -> str:
        """Describes an operand: meaning, shape, dtypes and domain."""
        return f"{operand.doc} Floating. Domain: {operand.domain_text}."

    def default_text(self, name: str, default: Any) -> str:
        """Sentence that states the default of an argument, with a leading space; empty if there is none to state."""
        return "" if default is ... or default is None else f" Default {default!r}."

    @property
    def common_texts(self) -> Mapping[str, str]:
        """Descriptions of the arguments in :attr:`common`, by name. A default is appended unless it is None."""
        return COMMON_TEXTS

    @property
    def symbols(self) -> str:
        """Sentence that explains symbols of the formula that are not arguments; empty if there are none."""
        return ""

    @property
    def result_text(self) -> str:
        """Text of the section "Returns": shape, divisors of the means, dtype and device."""
        return (
            "The reduced loss, or with 'none' all of its values, in the promoted dtype of the floating operands unless "
            "`out_dtype` is given, on their device."
        )

    @property
    def gradient_text(self) -> str:
        """Text of the section "Gradient": differentiable operands and the conventions at kinks."""
        return f"Every floating operand is differentiable. {self.convention} Where the loss is NaN, so is the gradient."

    @property
    def errors(self) -> Mapping[str, str]:
        """Causes of each exception, by the exception's name."""
        errors = {
            "TypeError": "An operand is not an array, or has a dtype that the loss does not take (floating ones are "
            "float16, bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy "
            "on a GPU; an option has the wrong type.",
            "ValueError": "Shapes do not fit, operands are on different devices, or an option is out of range.",
            "ImportError": "The operands are on a GPU, and CuPy is not installed.",
            "cupylosses.KernelError": "A kernel cannot be compiled or loaded.",
        }
        if not self.runs_on_cpu:
            errors["NotImplementedError"] = (
                f"The operands are on the CPU, or {self.derivatives_by_formula} are asked for: the loss has no "
                "`reference`."
            )
        return errors

    @property
    def example_operands(self) -> Mapping[str, Any]:
        """Operands of the documented example, by name, as nested sequences of numbers."""
        values, samples = self.values(), {}
        for i, operand in enumerate(x for x in self.operands if x.default is None):
            domain = operand.domain_for(values)
            # An operand that accepts probabilities and integers is a label.
            choices = SAMPLES["binary" if domain == "probability" and operand.integer else domain]
            samples[operand.name] = choices[min(i, len(choices) - 1)]
        return samples

    @property
    def runs_on_cpu(self) -> bool:
        """True if the loss has the reference formula that CPU arrays need."""
        return getattr(self, "reference", True) is not None


#: Descriptions of common arguments of losses, by name.
COMMON_TEXTS: dict[str, str] = {
    "normalizer": "Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the "
    "number of tokens of all accumulated batches. Default None.",
    "out_dtype": "Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the "
    "operands.",
}


#: Maximum number of operands of a definition, without the weight and the mask of a call.
MAX_OWN_OPERANDS = 4

#: Maximum number of operands including a weight and a mask. A directional derivative adds at most as many tangents; the
#: kernels hold one tangent per operand (``kernels/core/dual.cuh``).
MAX_OPERANDS = 6


def code_of(reference: Callable[..., Any] | None) -> Any:
    """The parts of a reference formula's bytecode that are equal in every process."""
    code = getattr(reference, "__code__", None)
    return (code.co_code, code.co_names, code.co_varnames) if code else reference is None
