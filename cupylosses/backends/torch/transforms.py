"""Losses under torch's transforms (``torch.func``, forward mode, ``torch.compile``), and all second derivatives.

Three Functions serve every loss of every engine:

    Value      the value of a call
    Gradients  its gradients g_i for a grad_output
    Hvp        for tangents v_i, the derivative of the value along them, D = sum of v_i dL/dx_i, and the derivatives H
               of the sum of g_i v_i with respect to the arrays: Hessian-vector products

Each is differentiated by the others:

    Value      reverse  Gradients                    forward  D
    Gradients  reverse  D, H                         forward  Gradients for the tangent of grad_output, plus H
    Hvp        reverse  through D: Gradients and H, with the cotangent of D as grad_output
                        through H, with respect to the tangents, in which it is linear: Gradients and H
                        through H, with respect to the arrays: third derivatives, from the reference formula

The eager path has Functions of its own (:mod:`.autograd`). Those here have a ``setup_context``, which ``torch.func``
requires and which costs as much as the rest of a small loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from cupylosses import interop, torch_compat
from cupylosses.backends.torch import formulas, ops
from cupylosses.backends.torch.device import PLAIN, double, has_kernels
from cupylosses.backends.torch.ops import Spec
from cupylosses.call import Call
from cupylosses.engines.base import Wanted

#: Position of the first array among the arguments of `Value` and `Traced`, of `Gradients`, and of `Hvp`.
_OF_VALUE, _OF_GRADIENTS, _OF_HVP = 4, 7, 6


def is_traced() -> bool:
    """True while a compiler traces a transform, in which it differentiates torch's own operators only."""
    return torch_compat.is_compiling() and (torch_compat.transforms_active() or forward_ad._current_level >= 0)


def _runs_kernels(x: torch.Tensor) -> bool:
    """True if kernels can run on a tensor, which a transform may have wrapped."""
    return has_kernels(x) and (type(x) in PLAIN or type(x).__name__ == "FakeTensor")


def evaluate(call: Call, warn: bool) -> Any:
    """Evaluates a loss on tensors that a transform has wrapped or a compiler traces."""
    tracing, engine = torch_compat.is_compiling(), call.loss.engine
    wanted = tuple([torch.is_grad_enabled() and x.requires_grad for x in call.arrays])
    by_formula = any([w and not f for w, f in zip(wanted, engine.floating(call), strict=True)])
    if by_formula or is_traced() or not (tracing or all([_runs_kernels(x) for x in call.arrays])):
        return formulas.evaluate(call, warn, readable=False)
    promoted = formulas.check(call, warn)
    call = _placed(call)
    apart = engine.apart(call, promoted, wanted, tracing)
    if apart is None:
        dtype = call.static.out_dtype or promoted
        return _operator(call._replace(static=call.static._replace(out_dtype=dtype)), wanted, tracing)
    values = []
    for part in apart.calls:
        if part.loss.engine.apart(part, "float64", wanted, True) is None:
            values.append(_operator(part, wanted, tracing))
        else:
            values.append(evaluate(part, warn=False))
    return apart.finish(interop.namespace(call.arrays[0]), values)


def _placed(call: Call) -> Call:
    """Returns the call, with an array normalizer converted to a double on the device."""
    if call.normalizer is None or type(call.normalizer) is float:
        return call
    return call._replace(normalizer=double(call.normalizer, call.arrays[0].device))


def _operator(call: Call, wanted: Wanted, tracing: bool) -> Any:
    """Evaluates a call by one operator: directly in a graph, or as a Function that transforms accept."""
    engine = call.loss.engine
    residual = engine.has_residual(call) and (True in wanted or not tracing)
    spec = Spec.of(call, residual)
    if not tracing:
        outputs = Value.apply(*spec, *call.arrays)
    elif True not in wanted:
        # No Function here: Dynamo drops the ctx of one whose forward gets as many tensors as it has named arguments.
        outputs = ops.value(call.arrays, *spec)
    else:
        # Dynamo does not accept the same tensor twice.
        different: list[Any] = []
        for x in (spec.normalizer, *call.arrays):
            twice = x is not None and any([x is y for y in different])
            different.append(x.view_as(x) if twice else x)
        outputs = Traced.apply(spec.text, spec.scalars, different[0], spec.divisor, *different[1:])
    return engine.result(call, [outputs[0], *outputs[2 if residual else 1 :]])


def gradients(call: Call, divisor: Any, grad_output: torch.Tensor, wanted: Wanted) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients of an eager loss, computed by a Function that autograd can differentiate again.

    ``divisor`` is what the sum of the loss was divided by: a float, or a double on the device.
    """
    engine = call.loss.engine
    plain, upstream = engine.divided_by(call, divisor, grad_output)
    spec, residual = Spec.of(plain, engine.has_residual(plain)), None
    if spec.residual:
        with torch.no_grad():
            residual = ops.value([x.detach() for x in plain.arrays], *spec)[1]
    spec = spec.without_residual()
    return _all_of(Gradients.apply(upstream, residual, wanted, *spec, *plain.arrays), wanted)


class Traced(Function):
    """Loss in a graph of ``torch.compile``, which accepts no Function with more methods than these two."""

    @staticmethod
    def forward(
        ctx: Any,
        text: str,
        scalars: tuple[float, ...],
        normalizer: torch.Tensor | None,
        divisor: float | None,
        *arrays: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        value, *more = ops.value(arrays, text, scalars, normalizer, divisor)
        residual = more[0] if text[0] == "1" else None
        ctx.save_for_backward(residual, normalizer, *arrays)
        ctx.mark_non_differentiable(*more)
        ctx.rest = text, scalars, divisor
        return value, *more

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> Any:
        residual, normalizer, *arrays = ctx.saved_tensors
        text, scalars, divisor = ctx.rest
        wanted = ctx.needs_input_grad[_OF_VALUE:]
        grads = ops.gradients(grad_output, residual, wanted, arrays, text, scalars, normalizer, divisor)
        return *(None,) * _OF_VALUE, *_all_of(grads, wanted)


class Value(Function):
    """Value of a call under a transform, with the residual and further results, which are not differentiable."""

    @staticmethod
    def forward(
        text: str,
        scalars: tuple[float, ...],
        normalizer: torch.Tensor | None,
        divisor: float | None,
        *arrays: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return tuple(ops.value(arrays, text, scalars, normalizer, divisor))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        text, scalars, normalizer, divisor, *arrays = inputs
        value, *more = output
        spec = Spec(text, scalars, None, divisor)
        residual = more[0] if spec.residual else None
        ctx.save_for_backward(residual, normalizer, *arrays)
        ctx.save_for_forward(residual, normalizer, *arrays)
        ctx.mark_non_differentiable(*more)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.more = spec, len(more)
        ctx.like = value.shape, value.dtype, value.device

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor | None, *_: Any) -> Any:
        wanted = ctx.needs_input_grad[_OF_VALUE:]
        if grad_output is None:
            return (None,) * (_OF_VALUE + len(wanted))
        residual, spec, arrays = _saved(ctx)
        grads = Gradients.apply(grad_output, residual, wanted, *spec.without_residual(), *arrays)
        return *(None,) * _OF_VALUE, *_all_of(grads, wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[torch.Tensor | None, ...]:
        residual, spec, arrays = _saved(ctx)
        array_tangents = tangents[_OF_VALUE:]
        shape, dtype, device = ctx.like
        ones = torch.ones(shape, dtype=dtype, device=device)
        call = spec.call(arrays)
        if not call.loss.engine.contracts:
            return _hvp(ones, spec, arrays, array_tangents, (False,) * len(arrays))[0], *(None,) * ctx.more
        moving = tuple([v is not None for v in array_tangents])
        # In 16 bits, the many small gradients of a row would be lost.
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) if m else x for x, m in zip(arrays, moving)]
        grads = Gradients.apply(ones, residual, moving, *spec.without_residual(), *wide)
        # torch turns forward mode off inside `jvp`, also for the outer one of two transforms.
        with forward_ad._set_fwd_grad_enabled(torch_compat.transforms_active()):
            xp = interop.namespace(arrays[0])
            along = call.loss.engine.contracted(xp, call, grads, [v for v in array_tangents if v is not None])
        return along, *(None,) * ctx.more

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        spec, arrays, dims = Spec(*inputs[:_OF_VALUE]), inputs[_OF_VALUE:], in_dims[_OF_VALUE:]
        batched = _batched(spec, arrays, dims, info.batch_size)
        if batched is None:
            outputs = torch.vmap(_value_formula(spec), dims)(*arrays)
        else:
            outputs = Value.apply(*batched[0], *batched[1])
        return outputs, (0,) * len(outputs)


class Gradients(Function):
    """Wanted gradients of the arrays, as a function of grad_output and the arrays.

    The residual is determined by the arrays, so it is not differentiated.
    """

    @staticmethod
    def forward(
        grad_output: torch.Tensor,
        residual: torch.Tensor | None,
        wanted: Wanted,
        text: str,
        scalars: tuple[float, ...],
        normalizer: torch.Tensor | None,
        divisor: float | None,
        *arrays: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return tuple(ops.gradients(grad_output, residual, wanted, arrays, text, scalars, normalizer, divisor))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grad_output, residual, wanted, text, scalars, normalizer, divisor, *arrays = inputs
        ctx.save_for_backward(residual, normalizer, grad_output, *arrays)
        ctx.save_for_forward(residual, normalizer, grad_output, *arrays)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.wanted = Spec(text, scalars, None, divisor), wanted

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        _, spec, (grad_output, *arrays) = _saved(ctx)
        tangents = _all_of(cotangents, ctx.wanted)
        nothing, wanted = (None,) * (_OF_GRADIENTS - 1), ctx.needs_input_grad[_OF_GRADIENTS:]
        if all(v is None for v in tangents):
            return None, *nothing, *(None,) * len(arrays)
        if not ctx.needs_input_grad[0] and _is_final((grad_output, *arrays, *tangents)):
            moved, asked = _moved(spec, arrays, tangents, wanted)
            changed = ops.product(grad_output, asked, moved.arrays, *Spec.of(moved))
            return None, *nothing, *_all_of(changed, wanted)
        along, *changed = _hvp(grad_output, spec, arrays, tangents, wanted)
        first = along.to(grad_output.dtype) if ctx.needs_input_grad[0] else None
        return first, *nothing, *_all_of(changed, wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[torch.Tensor, ...]:
        residual, spec, (grad_output, *arrays) = _saved(ctx)
        array_tangents = tangents[_OF_GRADIENTS:]
        return tuple(_gradients_along(grad_output, residual, tangents[0], array_tangents, ctx.wanted, spec, arrays))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        grad_output, residual, wanted, *fields = inputs[:_OF_GRADIENTS]
        spec, size = Spec(*fields), info.batch_size
        arrays, dims, shapes = _own_of_each(inputs[_OF_GRADIENTS:], in_dims[_OF_GRADIENTS:], wanted, size)
        batched = _batched(spec, arrays, dims, size)
        if batched is None:

            def gradients(grad_output: torch.Tensor, *arrays: Any) -> tuple[torch.Tensor, ...]:
                function, floating = _gradients_formula(spec, wanted, arrays)
                return function(grad_output, *floating)

            grads = torch.vmap(gradients, (in_dims[0], *dims))(grad_output, *arrays)
        else:
            grad_output = _in_front(grad_output, in_dims[0], size)
            residual = residual if residual is None else _in_front(residual, in_dims[1], size)
            grads = Gradients.apply(grad_output, residual, wanted, *batched[0], *batched[1])
        grads = tuple([g.reshape(size, *s) for g, s in zip(grads, shapes, strict=True)])
        return grads, (0,) * len(grads)


class Hvp(Function):
    """Derivative of the value along tangents and its wanted gradients, as a function of grad_output, arrays, tangents.

    The tangents follow the arrays.
    """

    @staticmethod
    def forward(
        grad_output: torch.Tensor,
        wanted: Wanted,
        text: str,
        scalars: tuple[float, ...],
        normalizer: torch.Tensor | None,
        divisor: float | None,
        *arrays: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return tuple(ops.hvp(grad_output, wanted, arrays, text, scalars, normalizer, divisor))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grad_output, wanted, text, scalars, normalizer, divisor, *arrays = inputs
        ctx.save_for_backward(None, normalizer, grad_output, *arrays)
        ctx.save_for_forward(None, normalizer, grad_output, *arrays)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.wanted = Spec(text, scalars, None, divisor), wanted

    @staticmethod
    def backward(ctx: Any, of_along: torch.Tensor | None, *of_changed: torch.Tensor | None) -> Any:
        _, spec, (grad_output, *arrays) = _saved(ctx)
        nothing = (None,) * (_OF_HVP - 1)
        if of_along is None and all(x is None for x in of_changed):
            return None, *nothing, *(None,) * len(arrays)
        base, moving, tangents = spec.call(arrays).loss.engine.primal(spec.call(arrays))
        of_base, count = Spec.of(base), len(base.arrays)
        needed = _needed_inputs(ctx, (grad_output, spec.normalizer, *arrays))
        by_arrays, by_tangents = tuple(needed[2 : 2 + count]), needed[2 + count :]
        if all(x is None for x in of_changed):
            tangent_grads: Sequence[Any] = ()
            if any(by_tangents):
                tangent_grads = _gradients_along(
                    of_along, None, of_along, (None,) * count, moving, of_base, base.arrays
                )
            changed: Sequence[Any] = ()
            if any(by_arrays):
                _, *changed = _hvp(of_along, of_base, base.arrays, _all_of(tangents, moving), by_arrays)
            picked = _picked(tangent_grads, by_tangents) if tangent_grads else [None] * len(tangents)
            return None, *nothing, *_all_of(changed, by_arrays if changed else (False,) * count), *picked
        again = _all_of(of_changed, ctx.wanted)[:count]
        if not (needed[0] or any(by_arrays)):
            # Linear in the tangents: Hessian-vector products by the double-backward trick take this path.
            tangent_grads = _gradients_along(grad_output, None, of_along, again, moving, of_base, base.arrays)
            return None, *nothing, *(None,) * count, *tangent_grads
        function, primals, floating = _hvp_formula(spec, ctx.wanted, grad_output, arrays)
        values, pull = torch.func.vjp(function, *primals)
        upstream, *others = pull(_directed(values, (of_along, *of_changed)))
        by_tangent, by_array = others[: len(tangents)], iter(others[len(tangents) :])
        return upstream, *nothing, *[next(by_array) if f else None for f in floating], *by_tangent

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[torch.Tensor, ...]:
        _, spec, (grad_output, *arrays) = _saved(ctx)
        function, primals, floating = _hvp_formula(spec, ctx.wanted, grad_output, arrays)
        count = len(floating)
        of_arrays, of_tangents = tangents[_OF_HVP:][:count], tangents[_OF_HVP:][count:]
        primal_tangents = [tangents[0], *of_tangents, *[t for t, f in zip(of_arrays, floating, strict=True) if f]]
        # A batch may have expanded an array but not its tangent.
        primal_tangents = [t if t is None else t.expand(x.shape) for t, x in zip(primal_tangents, primals, strict=True)]
        return _jvp(function, primals, _directed(primals, primal_tangents))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        grad_output, wanted, *fields = inputs[:_OF_HVP]
        spec, size = Spec(*fields), info.batch_size
        arrays, dims, shapes = _own_of_each(inputs[_OF_HVP:], in_dims[_OF_HVP:], wanted, size)
        batched = _batched(spec, arrays, dims, size)
        if batched is None:

            def hvp(grad_output: torch.Tensor, *arrays: Any) -> tuple[torch.Tensor, ...]:
                function, primals, _ = _hvp_formula(spec, wanted, grad_output, arrays)
                return function(*primals)

            outputs = torch.vmap(hvp, (in_dims[0], *dims))(grad_output, *arrays)
        else:
            outputs = Hvp.apply(_in_front(grad_output, in_dims[0], size), wanted, *batched[0], *batched[1])
        along, *changed = outputs
        outputs = along, *[g.reshape(size, *s) for g, s in zip(changed, shapes, strict=True)]
        return outputs, (0,) * len(outputs)


def _saved(ctx: Any) -> tuple[torch.Tensor | None, Spec, list[Any]]:
    residual, normalizer, *tensors = ctx.saved_tensors
    return residual, ctx.spec._replace(normalizer=normalizer), tensors


def _is_final(tensors: Sequence[torch.Tensor | None]) -> bool:
    """True if all tensors are plain and nobody differentiates or records a result of them.

    This rules out transforms, batches, compilers and modes.
    """
    if torch.is_grad_enabled() or torch_compat.is_compiling() or torch_compat.transforms_active():
        return False
    if forward_ad._current_level >= 0 or torch_compat.dispatch_mode_count() or torch_compat.tracing_state():
        return False
    is_batched = torch_compat.is_legacy_batched
    return all([x is None or (type(x) in PLAIN and not (is_batched and is_batched(x))) for x in tensors])


def _moved(
    spec: Spec, arrays: Sequence[torch.Tensor], tangents: Sequence[Any], wanted: Wanted
) -> tuple[Call, tuple[bool, ...]]:
    """Returns the call of the derivative along the tangents that are not None, and flags of its wanted gradients."""
    call = spec.call(arrays)
    moving = tuple([v is not None for v in tangents])
    moving_tangents = tuple([v.to(x.dtype) for v, x in zip(tangents, arrays, strict=True) if v is not None])
    return call.loss.engine.jvp(call, moving, moving_tangents), (*wanted, *(False,) * len(moving_tangents))


def _hvp(
    grad_output: torch.Tensor, spec: Spec, arrays: Sequence[torch.Tensor], tangents: Sequence[Any], wanted: Wanted
) -> tuple[torch.Tensor, ...]:
    """Applies `Hvp` to the tangents that are not None."""
    moved, asked = _moved(spec, arrays, tangents, wanted)
    outputs: tuple[torch.Tensor, ...] = Hvp.apply(grad_output, asked, *Spec.of(moved), *moved.arrays)
    return outputs


def _gradients_along(
    grad_output: Any,
    residual: torch.Tensor | None,
    of_grad_output: torch.Tensor | None,
    tangents: Sequence[Any],
    wanted: Wanted,
    spec: Spec,
    arrays: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Returns the derivative of the wanted gradients along the tangents of grad_output and arrays that are not None.

    It equals the derivative of `Hvp` with respect to its tangents.
    """
    wanted, terms = tuple(wanted), []
    spec = spec.without_residual()
    if of_grad_output is not None:
        call = spec.call(arrays)
        if residual is None and call.loss.engine.has_residual(call):
            asked = Spec.of(call, True)
            residual = Value.apply(*asked, *[x.detach() for x in arrays])[1]
        terms.append(Gradients.apply(of_grad_output, residual, wanted, *spec, *arrays))
    if any(v is not None for v in tangents):
        terms.append(_hvp(grad_output, spec, arrays, tangents, wanted)[1:])
    return [sum(x[1:], x[0]) for x in zip(*terms, strict=True)]


def _needed_inputs(ctx: Any, inputs: Sequence[torch.Tensor | None]) -> list[bool]:
    """True for each input of a node whose gradient this backward pass needs.

    ``needs_input_grad`` is also True for gradients that only another pass would need.
    """
    nodes = iter(ctx.next_functions)
    return [x is not None and _will_run(next(nodes)[0]) for x in inputs]


def _will_run(node: Any) -> bool:
    if node is None:
        return False
    try:
        return torch_compat.will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient was requested
        return True


def _all_of(entries: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, ...]:
    """Spreads ``entries`` to one per array, with None for the arrays that are not wanted."""
    remaining = iter(entries)
    return tuple([next(remaining) if w else None for w in wanted])


def _picked(entries: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    return [x if w else None for x, w in zip(entries, wanted, strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# Reference formulas, for third derivatives and for batches that kernels cannot process


def _value_formula(spec: Spec) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns a function that computes the outputs of `Value` by the formula, with zeros for the residual."""

    def values(*arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call = spec.call(arrays)
        result = formulas.evaluate(call, readable=False)
        value, *more = result if isinstance(result, tuple) else (result,)
        zeros = []
        if spec.residual:
            like = call.loss.engine.outputs(call, [x.stride() for x in arrays], "float32")[1]
            zeros = [torch.zeros(like.shape, dtype=getattr(torch, like.dtype), device=value.device)]
        return value, *zeros, *[x for x in more if x is not None]

    return values


def _gradients_formula(
    spec: Spec, wanted: Wanted, arrays: Sequence[torch.Tensor]
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], list[torch.Tensor]]:
    """Returns the gradients as a function of grad_output and the floating-point arrays, and these arrays."""
    call = spec.call(arrays)
    floating = call.loss.engine.floating(call)
    formula = _value_formula(spec)

    def found(grad_output: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        remaining = iter(inputs)
        full = [next(remaining) if f else x for x, f in zip(arrays, floating, strict=True)]

        def value(*moving: torch.Tensor) -> torch.Tensor:
            remaining = iter(moving)
            return formula(*[next(remaining) if w else x for x, w in zip(full, wanted, strict=True)])[0]

        values, pull = torch.func.vjp(value, *[x for x, w in zip(full, wanted, strict=True) if w])
        return pull(grad_output.to(values.dtype))

    return found, [x for x, f in zip(arrays, floating, strict=True) if f]


def _hvp_formula(
    spec: Spec, wanted: Wanted, grad_output: torch.Tensor, arrays: Sequence[torch.Tensor]
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...], Wanted]:
    """Returns `Hvp` as a function of grad_output, tangents and floating-point arrays.

    Also returns these arguments, and flags of the arrays that are floating-point.
    """
    base, moving, tangents = spec.call(arrays).loss.engine.primal(spec.call(arrays))
    floating = base.loss.engine.floating(base)
    gradients, inputs = _gradients_formula(Spec.of(base), moving, base.arrays)
    asked = [w for w, f in zip(wanted, floating, strict=False) if f]
    dtype = getattr(torch, base.static.out_dtype)

    def found(grad_output: torch.Tensor, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        along, inputs = arguments[: len(tangents)], arguments[len(tangents) :]
        values, pull = torch.func.vjp(gradients, grad_output, *inputs)
        # A batch may have expanded an array but not its tangent.
        cotangents = tuple([v.expand(g.shape).to(g.dtype) for v, g in zip(along, values, strict=True)])
        value, *changed = pull(cotangents)
        return value.to(dtype), *[g for g, a in zip(changed, asked, strict=True) if a]

    return found, (grad_output, *tangents, *inputs), floating


def _jvp(function: Any, primals: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> Any:
    """Returns the derivative of a function along tangents.

    Dual numbers are made of copies: torch refuses expanded tensors, and a batch expands the arrays that its samples
    share.
    """
    copies = [[x.clone(memory_format=torch.contiguous_format) for x in xs] for xs in (primals, tangents)]
    return torch.func.jvp(function, *map(tuple, copies))[1]


def _directed(primals: Sequence[torch.Tensor], tangents: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Returns the tangents, with zeros in place of None."""
    return tuple([torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True)])


# ----------------------------------------------------------------------------------------------------------------------
# Batches


def _batched(
    spec: Spec, arrays: Sequence[torch.Tensor], dims: Sequence[int | None], size: int
) -> tuple[Spec, tuple[torch.Tensor, ...]] | None:
    """Returns one call for a whole batch, and its arrays; None if no kernel can process it."""
    call = spec.call(arrays)
    batched = call.loss.engine.batched(call, dims, size)
    return None if batched is None else (Spec.of(batched, spec.residual), batched.arrays)


def _own_of_each(
    arrays: Sequence[torch.Tensor], dims: Sequence[int | None], wanted: Wanted, size: int
) -> tuple[list[torch.Tensor], list[int | None], list[tuple[int, ...]]]:
    """Returns the arrays of a batch, their batch dimensions, and the shapes of the wanted gradients per sample.

    Shared arrays whose gradients are wanted are expanded, because each sample has a gradient of its own.
    """
    expanded, places = list(arrays), list(dims)
    for i, w in enumerate(wanted):
        if w and places[i] is None:
            expanded[i], places[i] = _in_front(expanded[i], None, size), 0
    shapes = []
    for x, d, w in zip(expanded, places, wanted, strict=True):
        if w:
            assert d is not None
            shapes.append((*x.shape[:d], *x.shape[d + 1 :]))
    return expanded, places, shapes


def _in_front(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _rule(function: type[Function], lists: int) -> Callable[..., Any]:
    """Returns the `vmap` of a Function for the arguments of its operator, where the arrays are a list at ``lists``."""

    def rule(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        def flat(xs: Sequence[Any]) -> tuple[Any, ...]:
            before, arrays, after = xs[:lists], xs[lists], xs[lists + 1 :]
            return *before, *after, *arrays

        inputs = [tuple(x) if isinstance(x, list) else x for x in flat(arguments)]
        return function.vmap(info, flat(in_dims), *inputs)

    return rule


ops.batching_rule("value", _rule(Value, 0))
ops.batching_rule("gradients", _rule(Gradients, 3))
ops.batching_rule("hvp", _rule(Hvp, 2))
