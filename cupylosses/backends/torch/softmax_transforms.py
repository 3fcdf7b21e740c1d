"""Losses of rows under torch's transforms: ``torch.func``, forward mode, ``torch.compile``, second derivatives of any.

In a graph stand the operators of ``row_ops.py``, with the reduction in the kernels as in eager mode. ``torch.func`` and
forward mode take the rows apart: kernels compute a value per row, and from a grad_output per row the gradients, for
which a batch is one more dimension of rows; torch adds up the values, which are few, and divides.

A tangent of a row's value is the sum of its gradient times the tangents of its logits. Second derivatives are kernels'
too, third ones the formula's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from cupylosses import interop, torch_compat
from cupylosses.backends.torch import autograd, operators, softmax_ops, transforms
from cupylosses.engines.softmax import reference as softmax_reference
from cupylosses.engines.softmax.call import RowCall, RowResult
from cupylosses.reference_math import divide

#: Where the first operand stands among the arguments of `_Traced`, of `_Values`, of `_Gradients` and of `_Second`.
_OF_TRACED, _OF_VALUES, _OF_GRADIENTS, _OF_SECOND = 7, 4, 8, 8


def evaluate(call: RowCall) -> Any:
    """The loss of tensors that a transform has wrapped, or a compiler traces."""
    tracing = torch_compat.is_compiling()
    if not tracing and torch_compat.is_scripted():
        call = _placed(call)
        array, number = (None, call.normalizer) if type(call.normalizer) is float else (call.normalizer, None)
        text, tensors = softmax_ops.encode(call, call.out_dtype or ""), (call.weight, call.mask, *call.operands)
        return _results(call, *softmax_ops.loss(text, softmax_ops.numbers(call), array, number, *tensors))
    # Only the formula has a gradient for class weights.
    weighed = torch.is_grad_enabled() and call.weight is not None and call.weight.requires_grad
    kernels = tracing or all([autograd.runs_kernels(x) for x in call.arrays.values()])
    if weighed or transforms.is_traced() or not kernels:
        return autograd.evaluate_rows_by_formula(call, readable=False)
    promoted = autograd.check_rows(call)
    return (_traced if tracing else _apart)(_placed(call), call.out_dtype or promoted)


def gradients(call: RowCall, grad_output: torch.Tensor, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
    """The gradients of an eager loss as functions that autograd can differentiate again."""
    upstream = grad_output.double()
    if call.reduction != "none":
        below = _divisor(_placed(call))
        # With nothing to divide by no row has a gradient, nor has that gradient one: 0 * inf must not arise. The
        # reciprocal is what kernels multiply by.
        if isinstance(below, float):
            upstream = upstream * (1.0 / below if below else 0.0)
        else:
            upstream = torch.where(below == 0, 0.0, upstream) * torch.where(below == 0, inf, below).reciprocal()
        upstream = upstream.expand(call.row_shape)
    indices = call.kind == "indices"
    text = _per_row(call._replace(lse=False, check="off"), indices)
    arguments = text, softmax_ops.numbers(call), call.weight, call.mask, *call.operands
    slopes = None
    if indices:
        with torch.no_grad():
            _, slopes = _Values.forward(*arguments)
    return _all_of(_Gradients.apply(upstream, slopes, tuple(wanted), False, *arguments), wanted)


def _placed(call: RowCall) -> RowCall:
    """The call with a normalizer that is an array as a double on the device."""
    if call.normalizer is None or type(call.normalizer) is float:
        return call
    return call._replace(normalizer=autograd.on_device(call, call.normalizer))


# ----------------------------------------------------------------------------------------------------------------------
# Graphs


def _traced(call: RowCall, result: str) -> Any:
    differentiable = torch.is_grad_enabled() and any([x.requires_grad for x in call.operands])
    slopes = differentiable and call.kind == "indices"
    text = softmax_ops.encode(call, result, slopes)
    array, number = (None, call.normalizer) if type(call.normalizer) is float else (call.normalizer, None)
    if not differentiable:
        tensors = call.weight, call.mask, *call.operands
        return _results(call, *softmax_ops.values(text, softmax_ops.numbers(call), array, number, *tensors))
    # Dynamo takes no tensor twice.
    different: list[Any] = []
    x: Any
    for x in (array, call.weight, call.mask, *call.operands):
        twice = isinstance(x, torch.Tensor) and any([x is y for y in different])
        different.append(x.view_as(x) if twice else x)
    array, *others = different
    return _results(call, *_Traced.apply(slopes, text, softmax_ops.numbers(call), array, number, *others))


def _results(call: RowCall, value: torch.Tensor, *more: torch.Tensor) -> Any:
    """The value, or the value and what the call asks for besides, of which slopes are no part."""
    if not (call.lse or call.accuracy):
        return value
    return RowResult(value, more[0] if call.lse else None, more[-1] if call.accuracy else None)


class _Traced(Function):
    """A loss in a graph of ``torch.compile``, which takes no Function that has more than these two methods."""

    @staticmethod
    def forward(
        ctx: Any,
        has_slopes: bool,
        text: str,
        numbers: tuple[float, ...],
        normalizer: torch.Tensor | None,
        divisor: float | None,
        weight: torch.Tensor | None,
        mask: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        value, *more = softmax_ops.values(text, numbers, normalizer, divisor, weight, mask, first, second)
        slopes, more = (more[0], more[1:]) if has_slopes else (None, more)
        ctx.save_for_backward(slopes, normalizer, weight, mask, first, second)
        ctx.mark_non_differentiable(*more)
        ctx.rest = text, numbers, divisor
        return value, *more

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> Any:
        slopes, normalizer, weight, mask, first, second = ctx.saved_tensors
        text, numbers, divisor = ctx.rest
        wanted = ctx.needs_input_grad[_OF_TRACED:]
        found = softmax_ops.gradients(
            grad_output, slopes, wanted, text, numbers, normalizer, divisor, weight, mask, first, second
        )
        return *(None,) * _OF_TRACED, *_all_of(found, wanted)


# ----------------------------------------------------------------------------------------------------------------------
# Row by row


def _apart(call: RowCall, result: str) -> Any:
    slopes = call.kind == "indices"
    text = _per_row(call, slopes)
    value, *more = _Values.apply(text, softmax_ops.numbers(call), call.weight, call.mask, *call.operands)
    if call.reduction != "none":
        value = divide(torch, value.sum(), _divisor(call))
    value = value.to(autograd.DTYPES[result])
    if not (call.lse or call.accuracy):
        return value
    return RowResult(value, more[-1] if call.lse else None, _accuracy(call) if call.accuracy else None)


def _per_row(call: RowCall, slopes: bool) -> str:
    """A value per row, in float64, which gradients per row are then asked for with."""
    return softmax_ops.encode(call._replace(reduction="none", accuracy=False), "float64", slopes)


def _divisor(call: RowCall) -> Any:
    xp = interop.namespace(call.operands[0])
    return softmax_reference.divisor(xp, call, softmax_reference.rows_of(xp, call))


def _accuracy(call: RowCall) -> torch.Tensor:
    """The share of the rows that count in which no logit is larger than the label's."""
    xp = interop.namespace(call.operands[0])
    rows, x, dim = softmax_reference.rows_of(xp, call), call.operands[0].detach(), call.class_dim
    own = x.gather(dim, rows.labels.unsqueeze(dim)).squeeze(dim)
    # Scaled and capped: logits that differ may be the same then.
    own, largest = (
        softmax_reference.logits(xp, call, z.to(softmax_ops.compute_dtype(call))) for z in (own, x.amax(dim))
    )
    right = rows.sound & (own == largest)
    return (right.sum(dtype=torch.float64) / rows.used.sum()).to(torch.float32)


class _Values(Function):
    """A value per row, and slopes and lse as the text says."""

    @staticmethod
    def forward(
        text: str,
        numbers: tuple[float, ...],
        weight: torch.Tensor | None,
        mask: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return tuple(softmax_ops.values(text, numbers, None, None, weight, mask, first, second))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        text, numbers, *tensors = inputs
        _, *more = output
        slopes = more[0] if softmax_ops.decode(text)[1] else None
        ctx.save_for_backward(slopes, *tensors)
        ctx.save_for_forward(slopes, *tensors)
        ctx.mark_non_differentiable(*more)
        ctx.set_materialize_grads(False)
        ctx.rest = text, numbers, len(more)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor | None, *_: Any) -> Any:
        slopes, *tensors = ctx.saved_tensors
        text, numbers, _ = ctx.rest
        nothing, wanted = (None,) * _OF_VALUES, ctx.needs_input_grad[_OF_VALUES:]
        if grad_output is None:
            return *nothing, None, None
        found = _Gradients.apply(grad_output, slopes, wanted, False, text, numbers, *tensors)
        return *nothing, *_all_of(found, wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[torch.Tensor | None, ...]:
        slopes, *tensors = ctx.saved_tensors
        text, numbers, others = ctx.rest
        call = softmax_ops.call_of(text, numbers, None, None, *tensors)
        first = call.operands[0]
        ones = torch.ones(call.row_shape, dtype=torch.float64, device=first.device)
        directions = tangents[_OF_VALUES:]
        moving = tuple([v is not None for v in directions])
        given = [v for v in directions if v is not None]
        # The many small gradients of a row would be nothing in 16 bits.
        found = _Gradients.apply(ones, slopes, moving, True, text, numbers, *tensors)
        counts = softmax_reference.rows_of(interop.namespace(first), call).sound
        # Off in here, also for the outer one of two transforms.
        with forward_ad._set_fwd_grad_enabled(torch_compat.transforms_active()):
            terms = [(g * v).sum(call.class_dim, dtype=torch.float64) for g, v in zip(found, given, strict=True)]
            return torch.where(counts, sum(terms[1:], terms[0]), 0.0), *(None,) * others

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        text, numbers, *tensors = inputs
        dims = in_dims[2:]
        if dims[0] is not None:
            found = torch.vmap(_formula(text, numbers), dims)(*tensors)
        else:
            found = _Values.apply(*_batched(info.batch_size, text, numbers, tensors, dims))
        return found, (0,) * len(found)


class _Gradients(Function):
    """The gradients of the operands that are wanted, ``wide`` in the type of the arithmetic, as a function of a
    grad_output per row and of the operands. The slopes follow from these, and are no variables.
    """

    @staticmethod
    def forward(
        grad_output: torch.Tensor,
        slopes: torch.Tensor | None,
        wanted: tuple[bool, ...],
        wide: bool,
        text: str,
        numbers: tuple[float, ...],
        weight: torch.Tensor | None,
        mask: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        first, second = _widened((first, second), wanted if wide else (False, False))
        found = softmax_ops.gradients(
            grad_output, slopes, wanted, text, numbers, None, None, weight, mask, first, second
        )
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grad_output, slopes, *rest, weight, mask, first, second = inputs
        ctx.save_for_backward(grad_output, slopes, weight, mask, first, second)
        ctx.save_for_forward(grad_output, slopes, weight, mask, first, second)
        ctx.set_materialize_grads(False)
        ctx.rest = rest

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        nothing = (None,) * (_OF_GRADIENTS - 1)
        if not any(v is not None for v in cotangents):
            return None, *nothing, None, None
        wanted = tuple(ctx.needs_input_grad[_OF_GRADIENTS:])
        grad_output, _, rest = _rest_of(ctx)
        along, *changed = _Second.apply(grad_output, *_all_of(cotangents, ctx.rest[0]), wanted, *rest)
        operands = [x for x, w in zip(ctx.saved_tensors[-2:], wanted, strict=True) if w]
        found = [g.to(x.dtype) for g, x in zip(changed, operands, strict=True)]
        return along, *nothing, *_all_of(found, wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[torch.Tensor, ...]:
        grad_output, slopes, rest = _rest_of(ctx)
        return tuple(_moved(grad_output, slopes, tangents[0], tangents[_OF_GRADIENTS:], ctx.rest[0], *rest))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        grad_output, slopes, wanted, wide, text, numbers, *tensors = inputs
        size, (of_grad_output, of_slopes, _, _, _, _, *dims) = info.batch_size, in_dims
        if dims[0] is not None:

            def gradients(grad_output: torch.Tensor, *tensors: Any) -> tuple[torch.Tensor, ...]:
                function, operands = _gradients_of_formula(wanted, wide, text, numbers, *tensors)
                return function(grad_output, *operands)

            found = torch.vmap(gradients, (of_grad_output, *dims))(grad_output, *tensors)
        else:
            grad_output = _in_front(grad_output, of_grad_output, size)
            slopes = slopes if slopes is None else _in_front(slopes, of_slopes, size)
            arguments = _batched(size, text, numbers, tensors, dims)
            found = _Gradients.apply(grad_output, slopes, wanted, wide, *arguments)
        return found, (0,) * len(found)


class _Second(Function):
    """How a value per row moves along directions of the operands, of which one may be None, and how the gradients that
    are wanted do for a grad_output per row: the derivatives of the gradients of the operands that have a direction with
    respect to grad_output and operands, as a function of all of these.
    """

    @staticmethod
    def forward(
        grad_output: torch.Tensor,
        of_first: torch.Tensor | None,
        of_second: torch.Tensor | None,
        wanted: tuple[bool, bool],
        text: str,
        numbers: tuple[float, ...],
        weight: torch.Tensor | None,
        mask: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        arguments = text, numbers, None, None, weight, mask, first, second
        return tuple(softmax_ops.second(grad_output, of_first, of_second, wanted, *arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grad_output, of_first, of_second, wanted, text, numbers, *tensors = inputs
        ctx.save_for_backward(grad_output, of_first, of_second, *tensors)
        ctx.save_for_forward(grad_output, of_first, of_second, *tensors)
        ctx.set_materialize_grads(False)
        ctx.wanted, ctx.rest = wanted, (text, numbers)

    @staticmethod
    def backward(ctx: Any, of_along: torch.Tensor | None, *of_changed: torch.Tensor | None) -> Any:
        grad_output, *directions, weight, mask, first, second = ctx.saved_tensors
        nothing, cotangents = (None,) * 5, (of_along, *of_changed)
        if all(x is None for x in cotangents):
            return None, None, None, *nothing, None, None
        moving = tuple([v is not None for v in directions])
        needed = transforms.needed_inputs(ctx, ctx.saved_tensors)
        if not (needed[0] or needed[-2] or needed[-1]):
            # All is linear in the directions: this is how Hessian-vector products are taken backwards twice.
            again = _all_of(of_changed, ctx.wanted)
            found = _moved(grad_output, None, of_along, again, moving, *ctx.rest, weight, mask, first, second)
            return None, *_all_of(found, moving), *nothing, None, None
        function, primals = _second_again(ctx)
        values, pull = torch.func.vjp(function, *primals)
        upstream, *others = pull(_directed(values, cotangents))
        rest = iter(others)
        by_directions = [next(rest) if m else None for m in moving]
        return upstream, *by_directions, *nothing, next(rest), next(rest, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[torch.Tensor, ...]:
        function, primals = _second_again(ctx)
        # A dual number takes no operand that is expanded.
        primals = tuple([x.contiguous() for x in primals])
        _, of_first, of_second, *_ = ctx.saved_tensors
        along = [t for x, t in zip((of_first, of_second), tangents[1:3], strict=True) if x is not None]
        moved = (tangents[0], *along, *tangents[_OF_SECOND:])[: len(primals)]
        return torch.func.jvp(function, primals, _directed(primals, moved))[1]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        grad_output, *directions, wanted, text, numbers, weight, mask, first, second = inputs
        size, (of_grad_output, *of_directions, _, _, _, of_weight, of_mask, by_first, by_second) = (
            info.batch_size,
            in_dims,
        )
        tensors, dims = (weight, mask, first, second), (of_weight, of_mask, by_first, by_second)
        if of_weight is not None:
            moving = tuple([v is not None for v in directions])
            given = [v for v in directions if v is not None]

            def found_of(grad_output: torch.Tensor, given: list[torch.Tensor], *tensors: Any) -> tuple[Any, ...]:
                function, operands = _second_of_formula(moving, wanted, text, numbers, *tensors)
                return function(grad_output, *given, *operands)

            given_dims = [d for d, m in zip(of_directions, moving, strict=True) if m]
            found = torch.vmap(found_of, (of_grad_output, given_dims, *dims))(grad_output, given, *tensors)
        else:
            grad_output = _in_front(grad_output, of_grad_output, size)
            directions = [
                v if v is None else _in_front(v, d, size) for v, d in zip(directions, of_directions, strict=True)
            ]
            arguments = _batched(size, text, numbers, tensors, dims)
            found = _Second.apply(grad_output, *directions, wanted, *arguments)
        return found, (0,) * len(found)


def _rest_of(ctx: Any) -> tuple[torch.Tensor, torch.Tensor | None, tuple[Any, ...]]:
    """grad_output and slopes of gradients, and the other arguments, from the text on."""
    grad_output, slopes, weight, mask, *operands = ctx.saved_tensors
    wanted, wide, text, numbers = ctx.rest
    return grad_output, slopes, (text, numbers, weight, mask, *_widened(operands, wanted if wide else (False, False)))


def _moved(
    grad_output: torch.Tensor,
    slopes: torch.Tensor | None,
    of_grad_output: torch.Tensor | None,
    directions: Sequence[Any],
    wanted: Sequence[bool],
    text: str,
    numbers: tuple[float, ...],
    *tensors: Any,
) -> list[torch.Tensor]:
    """How the gradients that are wanted move with grad_output and the operands, where these do; they are the
    derivatives of `_Second`, too, with respect to the directions.
    """
    wanted = tuple(wanted)
    found: list[Sequence[torch.Tensor]] = []
    if of_grad_output is not None:
        if slopes is None and softmax_ops.decode(text)[1]:
            _, slopes, *_ = _Values.apply(text, numbers, *[x if x is None else x.detach() for x in tensors])
        found.append(_Gradients.apply(of_grad_output, slopes, wanted, False, text, numbers, *tensors))
    if any([v is not None for v in directions]):
        given = [v if v is None else v.to(x.dtype) for v, x in zip(directions, tensors[2:], strict=True)]
        found.append(_Second.apply(grad_output, *given, wanted, text, numbers, *tensors)[1:])
    return [x[0] if len(x) == 1 else x[0] + x[1] for x in zip(*found, strict=True)]


def _gradients_of_formula(
    wanted: Sequence[bool],
    wide: bool,
    text: str,
    numbers: tuple[float, ...],
    weight: torch.Tensor | None,
    mask: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """The gradients as a function of grad_output and the floating operands that torch can differentiate; and these."""
    formula = _formula(text, numbers)

    def found(grad_output: torch.Tensor, *floating: torch.Tensor) -> tuple[torch.Tensor, ...]:
        operands = _widened((*floating, second)[:2], wanted if wide else (False, False))

        def value(*moving: torch.Tensor) -> torch.Tensor:
            rest = iter(moving)
            return formula(weight, mask, *[next(rest) if w else x for x, w in zip(operands, wanted, strict=True)])[0]

        values, pull = torch.func.vjp(value, *[x for x, w in zip(operands, wanted, strict=True) if w])
        return pull(grad_output.to(values.dtype))

    return found, (first,) if softmax_ops.decode(text)[0].kind == "indices" else (first, second)


def _second_again(ctx: Any) -> tuple[Callable[..., tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """What `_Second` computed, by the formula, and what it is a function of."""
    grad_output, *directions, weight, mask, first, second = ctx.saved_tensors
    moving = tuple([v is not None for v in directions])
    function, operands = _second_of_formula(moving, ctx.wanted, *ctx.rest, weight, mask, first, second)
    return function, (grad_output, *[v for v in directions if v is not None], *operands)


def _second_of_formula(
    moving: Sequence[bool], wanted: Sequence[bool], text: str, numbers: tuple[float, ...], *tensors: Any
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """The same as a function of grad_output, the directions that there are, and the floating operands that torch can
    differentiate; and these.
    """
    gradients, operands = _gradients_of_formula(moving, False, text, numbers, *tensors)

    def found(grad_output: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        directions, floating = given[: sum(moving)], given[sum(moving) :]
        _, pull = torch.func.vjp(gradients, grad_output, *floating)
        along, *changed = pull(directions)
        return along, *[g for g, w in zip(changed, wanted, strict=False) if w]

    return found, operands


def _widened(operands: Sequence[torch.Tensor], which: Sequence[bool]) -> list[torch.Tensor]:
    """The operands, some of them in a type of 32 bits at least."""
    wide = [torch.promote_types(x.dtype, torch.float32) for x in operands]
    return [x.to(dtype) if w else x for x, dtype, w in zip(operands, wide, which, strict=True)]


def _formula(text: str, numbers: tuple[float, ...]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """What `_Values` computes, by the formula; its slopes are zeros."""

    def values(*tensors: Any) -> tuple[torch.Tensor, ...]:
        call = softmax_ops.call_of(text, numbers, None, None, *tensors)
        found = autograd.evaluate_rows_by_formula(call, readable=False)
        value, lse, _ = found if isinstance(found, RowResult) else (found, None, None)
        first = call.operands[0]
        slopes = None
        if softmax_ops.decode(text)[1]:
            slopes = torch.zeros(
                softmax_ops.slopes_shape(call), dtype=softmax_ops.compute_dtype(call), device=first.device
            )
        return tuple([x for x in (value, slopes, lse) if x is not None])

    return values


def _batched(
    size: int, text: str, numbers: tuple[float, ...], tensors: Sequence[Any], dims: Sequence[int | None]
) -> tuple[Any, ...]:
    """The arguments from the text on for a whole batch, which is the first dimension of the rows. Class weights are the
    same for all.
    """
    call, slopes = softmax_ops.decode(text)
    weight, mask, first, second = tensors
    first, second = (_in_front(x, d, size) for x, d in zip((first, second), dims[2:], strict=True))
    if mask is not None and dims[1] is not None:
        mask = mask.movedim(dims[1], 0)
        mask = mask.reshape(size, *(1,) * (first.ndim - 1 - mask.ndim), *mask.shape[1:])
    moved = softmax_ops.encode(call._replace(class_dim=call.class_dim + 1), str(call.out_dtype), slopes)
    return moved, numbers, weight, mask, first, second


def _in_front(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _all_of(found: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """One entry per operand: None for those that are not wanted."""
    rest = iter(found)
    return [next(rest) if w else None for w in wanted]


def _directed(primals: Sequence[torch.Tensor], tangents: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Tangents, of zeros where there is none."""
    return tuple([torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True)])


# ----------------------------------------------------------------------------------------------------------------------
# The vectorized modes of autograd, which reach the operators of a value per row: these have no divisors


def _without_divisors(function: type[Function], first: int) -> Callable[..., Any]:
    """The `vmap` of a Function on the arguments of its operator, which has text and numbers at ``first`` and, behind
    them, normalizer and divisor.
    """

    def rule(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        kept = [i for i in range(len(arguments)) if i not in (first + 2, first + 3)]
        inputs = [tuple(x) if isinstance(x := arguments[i], list) else x for i in kept]
        return function.vmap(info, tuple([in_dims[i] for i in kept]), *inputs)

    return rule


def _batched_gradients(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    """The operator takes the operands in the width that the Function gives them."""
    return _without_divisors(_Gradients, 4)(
        info, (*in_dims[:3], None, *in_dims[3:]), *arguments[:3], False, *arguments[3:]
    )


operators.batching_rule("row_values", _without_divisors(_Values, 0))
operators.batching_rule("row_gradients", _batched_gradients)
operators.batching_rule("row_second", _without_divisors(_Second, 4))
