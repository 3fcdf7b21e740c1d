"""Losses under torch's transforms: ``torch.func``, forward mode, ``torch.compile``, and second derivatives of any.

Everything rests on one thing: the derivative of a loss along a direction is a loss again
(``directional.py``), with the directions as operands. With D its value,

    forward mode        the tangent of the value is D of the operands and their tangents, reduced like the loss
    double backward     of the gradients g_i = grad_output dL/dx_i with cotangents v_i: D reduced, for grad_output, and
                        the gradients of D, for the operands

so the engine computes them with kernels like any other. The third derivative is that of the reference formula.

The eager path has Functions of its own (``autograd.py``): those here have a ``setup_context``, without which
``torch.func`` does not take them, and which costs as much as the rest of a small loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import Function, forward_ad

from cupylosses import torch_compat
from cupylosses.backends.torch import autograd, operators, ops
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise.call import Call, split
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.pointwise.jvp import Directional, directional
from cupylosses.engines.pointwise.reduction import Reduction, resolve
from cupylosses.engines.softmax.call import RowCall

#: Where the operands begin among the arguments of `_Value` and `_Traced`, and among those of `_Gradients`.
_OF_VALUE, _OF_GRADIENTS = 4, 6


def is_fake(call: Call | RowCall) -> bool:
    """Whether the operands are tensors without memory that stand for ones with."""
    return any(type(x).__name__ == "FakeTensor" for x in call.operands)


def is_traced() -> bool:
    """Whether a compiler traces a transform, in which it takes the derivatives of torch's own operators only."""
    return torch_compat.is_compiling() and (torch_compat.transforms_active() or forward_ad._current_level >= 0)


def evaluate(call: Call, warn: bool) -> torch.Tensor:
    """The loss of tensors that a transform has wrapped, or a compiler traces."""
    tracing = torch_compat.is_compiling()
    if not tracing and torch_compat.is_scripted():
        array, number = _normalizer(call)
        array = None if array is None else autograd.on_device(call, array)
        text = ops.encode(call.loss, call.reduction, call.flags)
        return ops.loss(call.operands, text, call.parameters, array, number)
    if is_traced():
        return autograd.evaluate_reference(call, warn)
    if not tracing and not all(autograd.runs_kernels(x) for x in call.operands):
        return autograd.evaluate_reference(call, warn)
    result = autograd.check(call, warn)
    loss, operands, reduction, parameters, flags, _ = call
    shape = pointwise_checks.broadcast(loss, [tuple(x.shape) for x in operands])
    resolved = resolve(loss, reduction, shape)
    array, number = _normalizer(call)
    if array is not None:
        array = autograd.on_device(call, array)
    differentiated = torch.is_grad_enabled() and resolved.weights and call.wants_weight(autograd.wanted(operands))
    if differentiated or (not tracing and (array is not None or resolved.counted)):
        return autograd.divided(call, resolved, shape, result)
    text = ops.encode(loss, reduction._replace(out_dtype=result), flags)
    if not tracing:
        return _Value.apply(text, parameters, array, number, *operands)
    if not (torch.is_grad_enabled() and any([x.requires_grad for x in operands])):
        # No Function: Dynamo drops the context of one whose forward gets as many tensors as it has named arguments.
        return ops.value(operands, text, parameters, array, number)
    # Dynamo takes no tensor twice.
    different: list[torch.Tensor] = []
    for x in operands:
        different.append(x.view_as(x) if any([x is y for y in different]) else x)
    return _Traced.apply(text, parameters, array, number, *different)


def gradients(
    call: Call, result: str, grad_output: torch.Tensor, wanted: tuple[bool, ...]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of an eager loss of dtype ``result`` as a function that autograd can differentiate again."""
    text = ops.encode(call.loss, call.reduction._replace(out_dtype=result), call.flags)
    array, number = _normalizer(call)
    return _all_of(_Gradients.apply(grad_output, wanted, text, call.parameters, array, number, *call.operands), wanted)


def _normalizer(call: Call) -> tuple[Any, float | None]:
    """The normalizer as an array and as a number, of which it is one or neither."""
    return (None, call.normalizer) if type(call.normalizer) is float else (call.normalizer, None)


def _all_of(found: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, ...]:
    """One entry per operand: None for those that are not wanted."""
    rest = iter(found)
    return tuple([next(rest) if w else None for w in wanted])


class _Traced(Function):
    """A loss in a graph of ``torch.compile``, which takes no Function that has more than these two methods."""

    @staticmethod
    def forward(
        ctx: Any,
        text: str,
        parameters: tuple[float, ...],
        normalizer: torch.Tensor | None,
        divisor: float | None,
        *operands: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(normalizer, *operands)
        ctx.rest = text, parameters, divisor
        return ops.value(operands, text, parameters, normalizer, divisor)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        normalizer, *operands = ctx.saved_tensors
        text, parameters, divisor = ctx.rest
        wanted = ctx.needs_input_grad[_OF_VALUE:]
        found = ops.gradients(grad_output, wanted, operands, text, parameters, normalizer, divisor)
        return *(None,) * _OF_VALUE, *_all_of(found, wanted)


class _Spec(NamedTuple):
    """A call without its operands, whose sum is divided by ``divisor``, or by the double that ``normalizer`` is."""

    text: str
    parameters: tuple[float, ...]
    normalizer: torch.Tensor | None
    divisor: float | None

    def plain(self, operands: Sequence[torch.Tensor]) -> _Plain:
        """The same call as a sum over dimensions that are named, and what it is divided by."""
        loss, reduction, flags = ops.decode(self.text)
        shape = pointwise_checks.broadcast(loss, [tuple(x.shape) for x in operands])
        resolved = resolve(loss, reduction, shape)
        divisor = resolved.divisor * (1.0 if self.divisor is None else self.divisor)
        if resolved.weighted:
            divisor *= self.parameters[-1]
        normalizer = self.normalizer
        if resolved.counted:
            call = Call(loss, tuple(operands), reduction, self.parameters, flags)
            _, below, factor = split(call, resolved, shape)
            assert below is not None  # as there is no normalizer
            normalizer, divisor = autograd.evaluate(below), factor
        if normalizer is not None:
            normalizer = normalizer * divisor
        each = resolved.dims == ()
        dims = tuple(range(len(shape))) if resolved.dims is None else resolved.dims
        out_dtype, empty = reduction.out_dtype, resolved.divisor == 0
        return _Plain(loss, flags, len(shape), each, dims, out_dtype, self.parameters, normalizer, divisor, empty)


class _Plain(NamedTuple):
    """A call of operands of ``rank`` as a sum over ``dims``, divided by ``normalizer``, or else by ``divisor``; or, if
    ``each``, without sums and divisors.
    """

    loss: Loss
    flags: tuple[int, ...]
    rank: int
    each: bool
    dims: tuple[int, ...]
    out_dtype: str | None
    parameters: tuple[float, ...]
    normalizer: torch.Tensor | None
    divisor: float
    #: A mean of no elements.
    empty: bool

    def spec(self) -> _Spec:
        """The arguments of the Functions for it."""
        if self.each:
            # A loss that is a mean over rows is none here: that is a sum over dimensions.
            text = ops.encode(self.loss, Reduction("none", (), self.out_dtype), self.flags)
            return _Spec(text, self.parameters, None, None)
        text = ops.encode(self.loss, Reduction("sum", self.dims or None, self.out_dtype, True), self.flags)
        return _Spec(text, self.parameters, self.normalizer, self.divisor if self.normalizer is None else None)

    def along(self, directions: Sequence[Any]) -> _Plain:
        """The derivative along the directions that are not None. That of a mean of nothing is 0, as in torch: a sum of
        nothing, which 0 / 0 must not replace.
        """
        loss = directional(self.loss, tuple([v is not None for v in directions]))
        return self._replace(loss=loss, divisor=1.0 if self.empty else self.divisor)

    def batched(self) -> _Plain:
        """The same call of operands that have a further dimension in front, which is kept."""
        return self._replace(rank=self.rank + 1, dims=tuple([d + 1 for d in self.dims]))


class _Value(Function):
    """A loss under a transform."""

    @staticmethod
    def forward(
        text: str,
        parameters: tuple[float, ...],
        normalizer: torch.Tensor | None,
        divisor: float | None,
        *operands: torch.Tensor,
    ) -> torch.Tensor:
        return ops.value(operands, text, parameters, normalizer, divisor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        text, parameters, normalizer, divisor, *operands = inputs
        ctx.save_for_backward(normalizer, *operands)
        ctx.save_for_forward(normalizer, *operands)
        ctx.rest = text, parameters, divisor

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        spec, operands = _saved(ctx)
        wanted = ctx.needs_input_grad[_OF_VALUE:]
        found = _Gradients.apply(grad_output, wanted, *spec, *operands)
        return *(None,) * _OF_VALUE, *_all_of(found, wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        spec, operands = _saved(ctx)
        directions = tangents[_OF_VALUE:]
        plain = spec.plain(operands)
        if isinstance(plain.loss, Directional):
            return _jvp(_formula(spec), operands, _directed(operands, directions))
        return _Value.apply(*plain.along(directions).spec(), *operands, *_given(directions))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[torch.Tensor, int]:
        spec, operands = _Spec(*inputs[:_OF_VALUE]), inputs[_OF_VALUE:]
        plain, aligned = _aligned(spec, operands, in_dims[_OF_VALUE:], info.batch_size)
        return _Value.apply(*plain.spec(), *aligned), 0


class _Gradients(Function):
    """The gradients of operands that are wanted, as a function of grad_output and operands."""

    @staticmethod
    def forward(
        grad_output: torch.Tensor,
        wanted: tuple[bool, ...],
        text: str,
        parameters: tuple[float, ...],
        normalizer: torch.Tensor | None,
        divisor: float | None,
        *operands: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return tuple(ops.gradients(grad_output, wanted, operands, text, parameters, normalizer, divisor))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grad_output, wanted, text, parameters, normalizer, divisor, *operands = inputs
        ctx.save_for_backward(normalizer, *operands, grad_output)
        ctx.save_for_forward(normalizer, *operands, grad_output)
        ctx.rest = text, parameters, divisor
        ctx.wanted = wanted
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        spec, (*operands, grad_output) = _saved(ctx)
        directions = _all_of(cotangents, ctx.wanted)
        by_grad_output, wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[_OF_GRADIENTS:]
        nothing = (None,) * (_OF_GRADIENTS - 1)
        if not any(v is not None for v in directions):
            return None, *nothing, *(None,) * len(operands)
        plain = spec.plain(operands)
        if isinstance(plain.loss, Directional):
            needed = needed_inputs(ctx, (grad_output, spec.normalizer, *operands))
            by_operands = needed[2 : 2 + len(plain.loss.along)]
            if not needed[0] and not any(by_operands):
                return None, *nothing, *_by_directions(grad_output, plain, operands, directions, wanted)
            primals, pull = torch.func.vjp(_gradients_of_formula(spec, ctx.wanted), grad_output, *operands)
            first, *others = pull(_directed(primals, cotangents))
            return first, *nothing, *others
        along = plain.along(directions).spec()
        inputs = (*operands, *_given(directions))
        first = None
        if by_grad_output:
            first = _Value.apply(*along, *inputs).to(grad_output.dtype)
        found: Sequence[Any] = ()
        if any(wanted):
            asked = (*wanted, *(False,) * (len(inputs) - len(operands)))
            found = _Gradients.apply(grad_output, asked, *along, *inputs)
        return first, *nothing, *_all_of(found, wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[torch.Tensor, ...]:
        spec, (*operands, grad_output) = _saved(ctx)
        of_grad_output, directions = tangents[0], tangents[_OF_GRADIENTS:]
        terms = []
        if of_grad_output is not None:
            terms.append(_Gradients.apply(of_grad_output, ctx.wanted, *spec, *operands))
        if any(v is not None for v in directions):
            plain = spec.plain(operands)
            if isinstance(plain.loss, Directional):
                primals = (grad_output, *operands)
                moved = _directed(primals, (None, *directions))
                terms.append(_jvp(_gradients_of_formula(spec, ctx.wanted), primals, moved))
            else:
                inputs = (*operands, *_given(directions))
                asked = (*ctx.wanted, *(False,) * (len(inputs) - len(operands)))
                terms.append(_Gradients.apply(grad_output, asked, *plain.along(directions).spec(), *inputs))
        return tuple([sum(x[1:], x[0]) for x in zip(*terms, strict=True)])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        grad_output, wanted, *rest = inputs[:_OF_GRADIENTS]
        spec, size = _Spec(*rest), info.batch_size
        # The gradient of an operand that is the same for all is one for each.
        dims, operands = list(in_dims[_OF_GRADIENTS:]), list(inputs[_OF_GRADIENTS:])
        for i, w in enumerate(wanted):
            if w and dims[i] is None:
                operands[i], dims[i] = operands[i].expand(size, *operands[i].shape), 0
        shapes = [x.shape[:d] + x.shape[d + 1 :] if d is not None else x.shape for x, d in zip(operands, dims)]
        plain, aligned = _aligned(spec, operands, dims, size)
        if in_dims[0] is None:
            grad_output = grad_output.expand(size, *grad_output.shape)
        else:
            grad_output = grad_output.movedim(in_dims[0], 0)
        found = _Gradients.apply(grad_output, wanted, *plain.spec(), *aligned)
        kept = [s for s, w in zip(shapes, wanted, strict=True) if w]
        return tuple([g.reshape(size, *s) for g, s in zip(found, kept, strict=True)]), (0,) * len(kept)


def _saved(ctx: Any) -> tuple[_Spec, Any]:
    normalizer, *tensors = ctx.saved_tensors
    text, parameters, divisor = ctx.rest
    return _Spec(text, parameters, normalizer, divisor), tensors


def needed_inputs(ctx: Any, inputs: Sequence[torch.Tensor | None]) -> list[bool]:
    """Of which tensors that a node was made from this backward pass wants a gradient. ``needs_input_grad`` says only of
    which one could be wanted.
    """
    nodes = iter(ctx.next_functions)
    return [x is not None and _will_run(next(nodes)[0]) for x in inputs]


def _will_run(node: Any) -> bool:
    if node is None:
        return False
    try:
        return torch_compat.will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient was asked for
        return True


def _by_directions(
    grad_output: torch.Tensor,
    plain: _Plain,
    inputs: Sequence[torch.Tensor],
    cotangents: Sequence[Any],
    wanted: Sequence[bool],
) -> list[torch.Tensor | None]:
    """The gradients of a derivative along directions, differentiated by these: second derivatives of the loss itself,
    along the cotangents. This is how Hessian-vector products are taken backwards twice.
    """
    assert isinstance(plain.loss, Directional) and plain.loss.base is not None
    along = plain.loss.along
    operands, count = inputs[: len(along)], len(along)
    rest = iter(wanted[count:])
    asked = [a and next(rest) for a in along]
    found: Sequence[Any] = (None,) * count
    if any(v is not None for v in cotangents[:count]):
        moved = plain._replace(loss=plain.loss.base).along(cotangents[:count]).spec()
        given = _given(cotangents[:count])
        padded = (*asked, *(False,) * len(given))
        found = _all_of(_Gradients.apply(grad_output, padded, *moved, *operands, *given), padded)
    by_directions = [g for g, a in zip(found, along, strict=False) if a]
    return [*(None,) * count, *by_directions]


def _formula(spec: _Spec) -> Any:
    """A derivative along directions as a function of operands and directions that torch can differentiate."""
    loss, reduction, flags = ops.decode(spec.text)
    assert isinstance(loss, Directional) and loss.base is not None
    base, along = loss.base, loss.along
    normalizer = spec.divisor if spec.normalizer is None else spec.normalizer

    def derivative(*inputs: torch.Tensor) -> torch.Tensor:
        operands, directions = inputs[: len(along)], inputs[len(along) :]

        def value(*moved: torch.Tensor) -> torch.Tensor:
            rest = iter(moved)
            given = tuple([next(rest) if a else x for x, a in zip(operands, along, strict=True)])
            call = Call(base, given, reduction, spec.parameters, flags, normalizer)
            return autograd.evaluate_reference(call, warn=False)

        moving = [x for x, a in zip(operands, along, strict=True) if a]
        # A batch of directions may have come to one operand.
        shapes = [torch.broadcast_shapes(x.shape, v.shape) for x, v in zip(moving, directions, strict=True)]
        moved = [x.expand(s) for x, s in zip(moving, shapes, strict=True)]
        return _jvp(value, moved, [v.expand(s) for v, s in zip(directions, shapes, strict=True)])

    return derivative


def _jvp(function: Any, primals: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> Any:
    """The derivative of a function along tangents. Dual numbers are made of copies: torch refuses tensors that are
    expanded, which is what a batch makes of an operand that all of its samples share.
    """
    copies = [[x.clone(memory_format=torch.contiguous_format) for x in xs] for xs in (primals, tangents)]
    return torch.func.jvp(function, *map(tuple, copies))[1]


def _gradients_of_formula(spec: _Spec, wanted: Sequence[bool]) -> Any:
    """The gradients of that derivative, as a function of grad_output and inputs."""
    derivative = _formula(spec)

    def found(grad_output: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value, pull = torch.func.vjp(derivative, *inputs)
        return tuple([g for g, w in zip(pull(grad_output.to(value.dtype)), wanted, strict=True) if w])

    return found


def _directed(primals: Sequence[torch.Tensor], tangents: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Tangents, of zeros where there is none."""
    return tuple([torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True)])


def _given(directions: Sequence[Any]) -> list[torch.Tensor]:
    return [v for v in directions if v is not None]


def _aligned(
    spec: _Spec, operands: Sequence[torch.Tensor], dims: Sequence[int | None], size: int
) -> tuple[_Plain, list[torch.Tensor]]:
    """The call for a whole batch, and its operands with the batch in front, where they have it."""
    samples = [x if d is None else x.select(d, 0) for x, d in zip(operands, dims, strict=True)]
    plain = spec.plain(samples)
    if plain.rank == 0 and not plain.each:
        # So that there is a dimension to sum over.
        operands = [x.unsqueeze(-1) for x in operands]
        plain = plain._replace(rank=1, dims=(0,))
        dims = [d if d is None else d % (x.ndim - 1) for x, d in zip(operands, dims, strict=True)]
    aligned = []
    for x, d in zip(operands, dims, strict=True):
        if d is not None:
            x = x.movedim(d, 0)
            x = x.reshape(size, *(1,) * (plain.rank - x.ndim + 1), *x.shape[1:])
        aligned.append(x)
    return plain.batched(), aligned


# ----------------------------------------------------------------------------------------------------------------------
# The vectorized modes of autograd


def _batched_value(info: Any, in_dims: Sequence[Any], operands: Sequence[torch.Tensor], *rest: Any) -> Any:
    """`_Value.vmap` on the arguments of the operator, which has the operands in front."""
    return _Value.vmap(info, (*in_dims[1:], *in_dims[0]), *rest, *operands)


def _batched_gradients(
    info: Any,
    in_dims: Sequence[Any],
    grad_output: torch.Tensor,
    wanted: Sequence[bool],
    operands: Sequence[torch.Tensor],
    *rest: Any,
) -> Any:
    """Rule of torch.vmap for the operator of `_Gradients`."""
    of_grad_output, _, of_operands, *of_rest = in_dims
    dims = of_grad_output, None, *of_rest, *of_operands
    return _Gradients.vmap(info, dims, grad_output, tuple(wanted), *rest, *operands)


operators.batching_rule("value", _batched_value)
operators.batching_rule("gradients", _batched_gradients)
