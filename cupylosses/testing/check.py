"""Checks: a loss on random operands in some layout, compared with the truth and with torch.

A check is a plain value (:class:`Check`), so that tests, comparisons and messages name it alike. Each engine has a
subclass, which provides operands, layouts, truth and torch's twin of its losses. This module has everything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from cupylosses import build, functional
from cupylosses.definition.base import Definition
from cupylosses.definition.registry import registry
from cupylosses.testing import memory
from cupylosses.testing.by_engine import ByEngine
from cupylosses.testing.tolerance import Comparison, compare, dtype_name
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor, dtype

#: Name used instead of a layout for all edges of the domains, stored contiguously.
EDGES = "edges"
#: Name used instead of a layout for a shape that the user requested.
GIVEN = "given"

#: Upstream gradients of a reduced loss: the one that forward expects, and another one.
GRAD_OUTPUTS = (1.0, -1.75)

#: Number of elements below which the truth is computed on the CPU, whose float64 arithmetic is the same everywhere.
TRUTH_ON_CPU = 1 << 22


@dataclass(frozen=True)
class Result:
    """Results of a call: the value, and a gradient for each operand that required one."""

    value: Tensor
    gradients: tuple[Tensor | None, ...]

    def to(self, device: str) -> Result:
        """Returns a copy on another device."""
        return Result(self.value.to(device), tuple(None if g is None else g.to(device) for g in self.gradients))


@dataclass(frozen=True)
class Outcome:
    """Outcome of a check: comparisons of value and gradients, problems, and the function of torch that was compared."""

    value: Comparison | None
    gradients: tuple[Comparison, ...]
    problems: tuple[str, ...]
    torch: Callable[..., Tensor] | None = None

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems


@dataclass(frozen=True)
class Check(ByEngine, ABC, modules="cupylosses.testing.{}.check"):
    """Check of a loss with given parameters, dtypes, reduction and layout.

    ``Check(loss, ...)`` creates an instance of the subclass of the loss's engine. ``case`` has the arguments that
    differ from their defaults. ``dtypes`` has one entry per operand; the last entry applies to all remaining operands.
    ``function``, if given, is tested instead of the library's function of the loss.
    """

    loss: Definition
    case: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dtypes: tuple[str, ...] = ("float32",)
    reduction: str = "mean"
    layout: str = "contiguous"
    device: str = "cpu"
    seed: int = 0
    function: Callable[..., Tensor] | None = None

    #: True if the bits of a gradient depend on the upstream gradient of earlier calls.
    rescales: ClassVar[bool] = False
    #: True if the loss multiplies matrices, with cuBLAS on a GPU.
    multiplies: ClassVar[bool] = False

    # Supplied by the engine's check

    @property
    @abstractmethod
    def possible(self) -> bool:
        """True if the loss accepts these dtypes and arguments, and some shape has this layout."""

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The arguments that are not operands."""

    @property
    @abstractmethod
    def gradients_of(self) -> tuple[bool, ...]:
        """True for each operand that requires grad."""

    @abstractmethod
    def small(self, layout: str | None = None) -> Check:
        """Returns a copy with a small shape, in another layout if one is named."""

    @abstractmethod
    def operands(self) -> list[Tensor]:
        """Returns the operands, in their layout, on the device."""

    @abstractmethod
    def torch(self) -> list[Callable[..., Tensor]]:
        """Returns torch's ways to compute this loss, the preferred one first."""

    @abstractmethod
    def result(self, operands: Sequence[Tensor]) -> tuple[tuple[int, ...], dtype]:
        """Returns the expected shape and dtype of the value."""

    @abstractmethod
    def truth(self, operands: Sequence[Tensor], grad_output: Any, where: str) -> Truth:
        """Computes value and gradients in float64 on the device ``where``."""

    # Overridden by engines that differ

    @property
    def has_truth(self) -> bool:
        """True if a truth exists to compare the loss with."""
        return True

    @property
    def names(self) -> list[str]:
        """The names of the operands."""
        return [x.name for x in self.loss.operands]

    @property
    def title(self) -> str:
        """Name of the loss, with its modification."""
        return self.loss.name

    @property
    def case_words(self) -> str:
        """Case as text for tables."""
        return " ".join(f"{k}={v}" for k, v in self.case.items())

    def biases(self, operands: Sequence[Tensor]) -> Sequence[float | None]:
        """Returns, for each operand, the bias of its gradient that overrides the table's; None for the table's."""
        return [None] * len(operands)

    def reduces(self, operands: Sequence[Tensor]) -> bool:
        """True if the value is one number."""
        return self.reduction != "none"

    # Common

    @property
    def id(self) -> str:
        """Check as text, for test names and messages."""
        return "-".join((self.title, *self.words))

    @property
    def words(self) -> tuple[str, str, str, str, str]:
        """Case, dtypes, reduction, layout and the operands that require grad, as text for tables."""
        names = [x.name for x, w in zip(self.loss.operands, self.gradients_of, strict=False) if w]
        wanted = "all" if len(names) == len(self.loss.operands) else "+".join(names) or "none"
        return self.case_words or "defaults", "+".join(self.dtypes), self.reduction, self.layout, wanted

    @property
    def has_edges(self) -> bool:
        """True if the operands include edges of their domains, at which some of torch's losses assert."""
        return self.layout == EDGES

    def ours(self) -> Callable[..., Tensor]:
        """Returns the function under test with these arguments, as a function of the operands in their order."""
        return _with_names(self.function or function_for(self.loss), self.names, self.options)

    def upstream(self, operands: Sequence[Tensor]) -> list[Any]:
        """Returns the upstream gradients to try: numbers for a reduced loss, one random tensor otherwise."""
        if self.reduces(operands):
            return list(GRAD_OUTPUTS)
        return [drawn_upstream(*self.result(operands), self.device, self.seed)]


def drawn_upstream(shape: Sequence[int], kind: dtype, device: str, seed: int) -> Tensor:
    """Returns a random upstream gradient in the dtype ``kind``.

    Its elements are at least 1/4 in absolute value, since a gradient times 0 proves nothing.
    """
    import torch

    generator = torch.Generator(device).manual_seed(seed + 1)
    return (torch.rand(shape, generator=generator, dtype=torch.float32, device=device) * 2 + 0.25).to(kind)


def function_for(loss: Definition) -> Callable[..., Any]:
    """Returns the public function of a loss, or a new function for a user's loss.

    A modified loss has the function of its base.
    """
    base = getattr(loss, "base", None) or loss
    public = registry().get(base.name) is base
    return getattr(functional, base.name) if public else build.function_of(base)


def bind(
    function: Callable[..., Tensor],
    loss: Definition,
    values: Mapping[str, Any],
    reduction: str,
    dim: tuple[int, ...] | None = None,
) -> Callable[..., Tensor]:
    """Turns the public function of a loss into a function of the operands of a modified loss, in their order."""
    options = dict(values) | {"reduction": reduction} | ({} if dim is None else {"dim": dim})
    return _with_names(function, [x.name for x in loss.operands], options)


def by_position(loss: Definition) -> Callable[..., Tensor]:
    """Returns the public function of a loss with all operands positional, in their order.

    torch's signature has other arguments between them.
    """
    function, names = getattr(functional, loss.name), [x.name for x in loss.operands]

    def call(*operands: Any, **options: Any) -> Any:
        return function(**dict(zip(names, operands, strict=True)), **options)

    call.loss, call.prepare = loss, function.prepare
    return call


def _with_names(
    function: Callable[..., Tensor], names: Sequence[str], options: Mapping[str, Any]
) -> Callable[..., Tensor]:
    return lambda *operands: function(**dict(zip(names, operands, strict=True)), **options)


def run(
    function: Callable[..., Tensor], operands: Sequence[Tensor], wanted: Sequence[bool], grad_output: Any
) -> Result:
    """Runs forward, and backward with respect to the wanted operands; forward only, without a graph, if there are none.

    Integers are never differentiated.
    """
    import torch

    wanted = [w and x.is_floating_point() for x, w in zip(operands, wanted, strict=True)]
    leaves = [x.detach().requires_grad_(w) for x, w in zip(operands, wanted, strict=True)]
    value = function(*leaves)
    inputs = [x for x in leaves if x.requires_grad]
    upstream = grad_output if isinstance(grad_output, torch.Tensor) else torch.full_like(value, grad_output)
    gradients = iter(torch.autograd.grad(value, inputs, upstream.to(value.dtype)) if inputs else ())
    return Result(value.detach(), tuple(next(gradients) if w else None for w in wanted))


def run_torch(
    check: Check, operands: Sequence[Tensor], grad_output: Any
) -> tuple[Callable[..., Tensor] | None, Result | None]:
    """Returns the first of torch's ways that does not fail, and its result.

    torch's own functions reject some dtypes and combinations of dtypes, some do not broadcast, and some check values.
    """
    for function in check.torch():
        try:
            return function, run(function, operands, check.gradients_of, grad_output)
        except (RuntimeError, ValueError, IndexError):
            continue
    return None, None


def perform(check: Check, operands: Sequence[Tensor] | None = None) -> Outcome:
    """Runs a check: compares the library with the truth and with torch, for each upstream gradient."""
    import torch

    operands = check.operands() if operands is None else operands
    where = "cpu" if max(x.numel() for x in operands) < TRUTH_ON_CPU else check.device
    upstream = check.upstream(operands)
    first = upstream[0]
    exact = check.truth(operands, first if isinstance(first, float) else first.to(where), where)
    values: list[Comparison] = []
    gradients: list[Comparison] = []
    problems: list[str] = []
    for grad_output in upstream:
        # Gradients are linear in the upstream gradient.
        factor = 1.0 if grad_output is upstream[0] else grad_output / upstream[0]
        # On the CPU if torch's loss might assert: on a GPU, an assertion ends all work on the device.
        safe = [x.cpu() for x in operands] if check.has_edges else operands
        upstream_of = grad_output.to(safe[0].device) if isinstance(grad_output, torch.Tensor) else grad_output
        eager_call, theirs = run_torch(check, safe, upstream_of)
        memory.poison(_output_bytes(check, operands), check.device)
        ours = run(check.ours(), operands, check.gradients_of, grad_output)
        wrong = _form(check, operands, ours)
        problems += wrong
        if wrong:
            continue
        value, comparisons = judge(ours.to(where), exact, theirs and theirs.to(where), check.biases(operands), factor)
        values.append(value)
        gradients += comparisons
        if not value.ok:
            problems.append(f"value: {value}")
        names = [x for x, w in zip(check.names, check.gradients_of, strict=True) if w]
        problems += [f"gradient of {name}: {c}" for name, c in zip(names, comparisons, strict=True) if not c.ok]
    return Outcome(values[0] if values else None, tuple(gradients), tuple(problems), eager_call)


def judge(
    ours: Result, expected: Truth, theirs: Result | None, biases: Sequence[float | None], factor: float
) -> tuple[Comparison, list[Comparison]]:
    """Compares the value and each gradient with the truth, next to torch's result.

    ``biases`` are as in `compare`; ``factor`` is the upstream gradient divided by that of the truth.
    """
    value = compare(ours.value, expected.value, None if theirs is None else theirs.value)
    gradients = []
    for i, (gradient, exact) in enumerate(zip(ours.gradients, expected.gradients, strict=True)):
        if gradient is not None and exact is not None:
            other = None if theirs is None else theirs.gradients[i]
            gradients.append(compare(gradient, exact, other, biases[i], factor))
    return value, gradients


def _form(check: Check, operands: Sequence[Tensor], result: Result) -> list[str]:
    """Returns problems with shapes, dtypes and devices."""
    problems = _differences("value", result.value, *check.result(operands), operands[0])
    for name, x, w, gradient in zip(check.names, operands, check.gradients_of, result.gradients, strict=True):
        if w and gradient is not None:
            problems += _differences(f"gradient of {name}", gradient, x.shape, x.dtype, x)
    return problems


def _differences(name: str, x: Tensor, shape: Sequence[int], kind: Any, like: Tensor) -> list[str]:
    problems = []
    if tuple(x.shape) != tuple(shape):
        problems.append(f"{name}: shape {tuple(x.shape)}, expected {tuple(shape)}")
    if x.dtype != kind:
        problems.append(f"{name}: dtype {dtype_name(x.dtype)}, expected {dtype_name(kind)}")
    if x.device != like.device:
        problems.append(f"{name}: on {x.device}, expected {like.device}")
    return problems


def _output_bytes(check: Check, operands: Sequence[Tensor]) -> list[int]:
    """Returns the sizes in bytes of the allocations of a call: the value and the gradients."""
    shape, kind = check.result(operands)
    value = prod(shape) * kind.itemsize
    return [value, *(x.numel() * x.element_size() for x, w in zip(operands, check.gradients_of, strict=True) if w)]
