"""Losses as operators of torch's dispatcher, ``torch.ops.cupylosses``: the nodes of compiled and exported graphs.

Imported at the first torch tensor. A process that only loads an exported program must import this module itself.

Four operators serve every loss of every engine:

    value      the value; on request, the residual of forward and further results (lse per row, accuracy)
    gradients  the wanted gradients of the arrays
    hvp        the value of a derivative along tangents, which are the last arrays, and its wanted gradients
    loss       value and further results, differentiable by autograd, for torch.jit.trace

Autograd can differentiate only the last by itself; the Functions of :mod:`.transforms` differentiate the others. A
string encodes the loss and the static part of the call, since a graph holds no objects and outlives its process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from cupylosses import torch_compat
from cupylosses.backends.torch import formulas, launches
from cupylosses.backends.torch.device import DTYPES, copied
from cupylosses.call import Call
from cupylosses.definition.base import Definition
from cupylosses.definition.registry import named
from cupylosses.engines.base import TensorSpec
from cupylosses.engines.strides import dense_strides

library = torch.library.Library("cupylosses", "DEF")
# Sums run in memory order: with other strides than in eager mode, a result would have other bits.
EXACT = [getattr(torch.Tag, x) for x in ("pt2_compliant_tag", "needs_exact_strides") if hasattr(torch.Tag, x)]

_ARGUMENTS = "Tensor[] arrays, str loss, float[] scalars, Tensor? normalizer, float? divisor"
library.define(f"value({_ARGUMENTS}) -> Tensor[]", tags=EXACT)
library.define(f"gradients(Tensor grad_output, Tensor? residual, bool[] wanted, {_ARGUMENTS}) -> Tensor[]", tags=EXACT)
library.define(f"hvp(Tensor grad_output, bool[] wanted, {_ARGUMENTS}) -> Tensor[]", tags=EXACT)
# Composite, with autograd inside: TorchScript runs its graphs like programs, and they hold no autograd Functions.
library.define(f"loss({_ARGUMENTS}) -> Tensor[]")

value = torch.ops.cupylosses.value.default
gradients = torch.ops.cupylosses.gradients.default
hvp = torch.ops.cupylosses.hvp.default
loss = torch.ops.cupylosses.loss.default


# ----------------------------------------------------------------------------------------------------------------------
# Calls as text


def encode(loss: Definition, static: Any, residual: bool = False) -> str:
    """Encodes a loss, the static part of a call, and the request for the residual as text."""
    return "|".join([str(int(residual)), loss.key, *[_field(x) for x in static]])


@cache
def decode(text: str) -> tuple[Any, Any, bool]:
    """Returns the arguments that `encode` made the text from."""
    residual, key, *fields = text.split("|")
    definition = named(key)
    return definition, definition.engine.Static(*[_parsed(x) for x in fields]), residual == "1"


def _field(x: Any) -> str:
    if x is None:
        return ""
    if isinstance(x, bool):
        return f"b{int(x)}"
    if isinstance(x, tuple):
        return "t" + ",".join([str(int(y)) for y in x])
    return f"s{x}" if isinstance(x, str) else f"i{x}"


def _parsed(text: str) -> Any:
    kind, content = text[:1], text[1:]
    if kind == "b":
        return content == "1"
    if kind == "t":
        return tuple([int(x) for x in content.split(",") if x])
    return content if kind == "s" else int(content) if kind == "i" else None


class Spec(NamedTuple):
    """Arguments of the operators that describe a call without its arrays."""

    text: str
    scalars: tuple[float, ...]
    normalizer: torch.Tensor | None
    divisor: float | None

    @classmethod
    def of(cls, call: Call, residual: bool = False) -> Spec:
        """Returns the spec of a call."""
        number = isinstance(call.normalizer, (int, float))
        array, divisor = (None, float(call.normalizer)) if number else (call.normalizer, None)
        return cls(encode(call.loss, call.static, residual), call.scalars, array, divisor)

    def call(self, arrays: Sequence[Any]) -> Call:
        """Returns the call on these arrays."""
        definition, static, _ = decode(self.text)
        normalizer = self.divisor if self.normalizer is None else self.normalizer
        return Call(definition, tuple(arrays), static, tuple(self.scalars), normalizer)

    @property
    def residual(self) -> bool:
        """True if the residual is asked for."""
        return decode(self.text)[2]

    def without_residual(self) -> Spec:
        """Returns the spec without the request for the residual."""
        return self._replace(text="0" + self.text[1:])


# ----------------------------------------------------------------------------------------------------------------------
# Implementations on tensors with memory


def _value(arrays: Sequence[torch.Tensor], *fields: Any) -> list[torch.Tensor]:
    spec = Spec(*fields)
    call, residual = spec.call(arrays), spec.residual
    specs = _specs(call, residual)
    with torch.no_grad():
        outputs = launches.values(call, residual)
        if outputs is None:
            result = formulas.evaluate(call)
            first, *more = result if isinstance(result, tuple) else (result,)
            zeros = [torch.zeros(s.shape, dtype=DTYPES[s.dtype], device=first.device) for s in specs[1:2] if residual]
            outputs = [first, *zeros, *[x for x in more if x is not None]]
        return [laid_out(x, s.strides, _tensors(call)) for x, s in zip(outputs, specs, strict=True)]


def _gradients(
    grad_output: torch.Tensor,
    residual: torch.Tensor | None,
    wanted: Sequence[bool],
    arrays: Sequence[torch.Tensor],
    *fields: Any,
) -> list[torch.Tensor]:
    call = Spec(*fields).call(arrays)
    with torch.no_grad():
        grads = launches.gradients(call, grad_output, residual, tuple(wanted))
        if grads is None:
            grads = formulas.gradients(call, grad_output, tuple(wanted))
        return _like(arrays, grads, [*_tensors(call), grad_output, residual])


def _hvp(
    grad_output: torch.Tensor, wanted: Sequence[bool], arrays: Sequence[torch.Tensor], *fields: Any
) -> list[torch.Tensor]:
    call = Spec(*fields).call(arrays)
    with torch.no_grad():
        outputs = launches.hvp(call, grad_output, tuple(wanted))
        if outputs is None:
            outputs = formulas.hvp(call, grad_output, tuple(wanted))
        along, changed = outputs
        assert along is not None
        inputs = [*_tensors(call), grad_output]
        return [laid_out(along, _specs(call, False)[0].strides, inputs), *_like(arrays, changed, inputs)]


def product(
    grad_output: torch.Tensor, wanted: Sequence[bool], arrays: Sequence[torch.Tensor], *fields: Any
) -> list[torch.Tensor]:
    """Computes the products of second derivatives with tangents on plain tensors: `hvp` without its value.

    No graph expects a layout here: products for operands that are read from copies keep the layout of the copies.
    """
    call = Spec(*fields).call(arrays)
    with torch.no_grad():
        outputs, inputs = (
            launches.hvp(call, grad_output, tuple(wanted), has_value=False),
            [*_tensors(call), grad_output],
        )
        if outputs is not None:
            return [laid_out(g, g.stride(), inputs) for g in outputs[1] if g is not None]
        return _like(arrays, formulas.hvp(call, grad_output, tuple(wanted))[1], inputs)


def _tensors(call: Call) -> list[torch.Tensor | None]:
    normalizer = call.normalizer if isinstance(call.normalizer, torch.Tensor) else None
    return [*call.arrays, normalizer]


def _like(
    arrays: Sequence[torch.Tensor], grads: Sequence[Any], inputs: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    pairs = zip(arrays, grads, strict=False)
    return [laid_out(g, dense_strides(x.shape, x.stride()), inputs) for x, g in pairs if g is not None]


def laid_out(x: torch.Tensor, strides: Sequence[int], inputs: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Returns ``x`` with these strides and in memory of its own, as the dispatcher is promised; copies if necessary.

    Results of kernels need no copy. ``inputs`` are the tensor arguments of the operator.
    """
    unshared = x.numel() == 0 or all(y is None or x.data_ptr() != y.data_ptr() for y in inputs)
    if unshared and x.stride() == tuple(strides):
        return x
    return copied(x, tuple(strides))


library.impl("value", _value, "CompositeExplicitAutograd")
library.impl("gradients", _gradients, "CompositeExplicitAutograd")
library.impl("hvp", _hvp, "CompositeExplicitAutograd")


# ----------------------------------------------------------------------------------------------------------------------
# Fake implementations: shapes, strides and dtypes of results


def _specs(call: Call, residual: bool) -> list[TensorSpec]:
    engine = call.loss.engine
    specs = engine.outputs(call, [x.stride() for x in call.arrays], str(call.static.out_dtype))
    if engine.has_residual(call) and not residual:
        del specs[1]
    return list(specs)


def _empty(call: Call, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    device = call.arrays[0].device
    return [torch.empty_strided(x.shape, x.strides, dtype=DTYPES[x.dtype], device=device) for x in specs]


# torch records the file of each rule, and asks `inspect` for the module of that file. If `inspect` has no entry for it,
# it touches every module, and so triggers lazy imports: half a second of CuPy, SciPy and pytest.
inspect.modulesbyfile.setdefault(__file__, __name__)


@torch.library.register_fake(value, lib=library)
def _fake_value(arrays: Sequence[torch.Tensor], *fields: Any) -> list[torch.Tensor]:
    spec = Spec(*fields)
    call = spec.call(arrays)
    return _empty(call, _specs(call, spec.residual))


@torch.library.register_fake(gradients, lib=library)
def _fake_gradients(
    grad_output: torch.Tensor,
    residual: torch.Tensor | None,
    wanted: Sequence[bool],
    arrays: Sequence[torch.Tensor],
    *_: Any,
) -> list[torch.Tensor]:
    return [
        torch.empty_strided(x.shape, dense_strides(x.shape, x.stride()), dtype=x.dtype, device=x.device)
        for x, w in zip(arrays, wanted, strict=False)
        if w
    ]


@torch.library.register_fake(hvp, lib=library)
def _fake_hvp(
    grad_output: torch.Tensor, wanted: Sequence[bool], arrays: Sequence[torch.Tensor], *fields: Any
) -> list[torch.Tensor]:
    call = Spec(*fields).call(arrays)
    return [*_empty(call, _specs(call, False)[:1]), *_fake_gradients(grad_output, None, wanted, arrays)]


# ----------------------------------------------------------------------------------------------------------------------
# Vectorized modes of autograd

#: Maximum nesting depth of torch's legacy vmap.
DEEPEST = 64


class _Batch(NamedTuple):
    """Size and randomness of a batch, as torch.vmap passes them to a rule."""

    batch_size: int
    randomness: str = "error"


def batching_rule(name: str, rule: Callable[..., tuple[Any, Any]]) -> None:
    """Lets the vectorized modes of autograd call an operator: ``is_grads_batched``, ``hessian(vectorize=True)``.

    These modes use a legacy vmap, older than torch.func's. An operator that takes or returns lists needs a kernel of
    its own for it. ``rule(info, in_dims, *arguments)`` is the `vmap` of the operator's Function, on the operator's
    arguments.
    """
    is_batched = torch_compat.is_legacy_batched
    if is_batched is None:
        return

    def levels(x: Any) -> Iterator[int]:
        if isinstance(x, (list, tuple)):
            for y in x:
                yield from levels(y)
        elif isinstance(x, torch.Tensor):
            for level in range(1, DEEPEST + 1):
                if not is_batched(x):
                    return
                # A tensor without this level gets a dimension of the given size, 0.
                plain = torch._remove_batch_dim(x, level, 0, 0)
                if plain.shape[0] or not is_batched(plain):
                    yield level
                    x = plain

    def call(*arguments: Any) -> Any:
        # The innermost level of the arguments, not torch's own vmap depth: that is counted per thread, and a backward
        # pass on a GPU runs in a thread whose count is 0.
        level = max(levels(arguments))
        sizes: list[int] = []

        def unwrap(x: Any) -> tuple[Any, Any]:
            if isinstance(x, (list, tuple)):
                pairs = [unwrap(y) for y in x]
                return [y for y, _ in pairs], [d for _, d in pairs]
            if level not in levels(x):
                return x, None
            x = torch._remove_batch_dim(x, level, 0, 0)
            sizes.append(x.shape[0])
            return x, 0

        plain, dims = unwrap(arguments)
        result, _ = rule(_Batch(sizes[0]), dims, *plain)
        if isinstance(result, torch.Tensor):
            return torch._add_batch_dim(result, 0, level)
        return [torch._add_batch_dim(x, 0, level) for x in result]

    library.impl(name, call, "Batched")
