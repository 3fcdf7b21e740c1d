"""The engine of element-wise losses, as the rest of the library sees it (:mod:`cupylosses.engines.base`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from cupylosses import checks, interop
from cupylosses.adoption import adopted
from cupylosses.call import Call, Parts
from cupylosses.definition.base import MASK, WEIGHT
from cupylosses.engines.base import (
    ARGUMENTS,
    DTYPE,
    SHAPES,
    Apart,
    Engine,
    Machine,
    Question,
    TensorSpec,
    Wanted,
)
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise import reference as pointwise_reference
from cupylosses.engines.pointwise.definition import Loss, counting, modified
from cupylosses.engines.pointwise.jvp import TangentLoss, along_tangents
from cupylosses.engines.pointwise.layout import (
    COMPACTED_PART,
    COMPACTED_PART_WRITTEN,
    Stream,
    blocks_vectors,
    is_sparse,
    reordered,
)
from cupylosses.engines.pointwise.plan import PointwisePlan
from cupylosses.engines.pointwise.reduction import Resolved, Static, resolve
from cupylosses.engines.strides import broadcast_strides, dense_strides, result_strides
from cupylosses.reference_math import divide

_PLAIN = {kind: Static(kind) for kind in ("none", "mean", "sum", "batchmean", "weighted_mean")}


class PointwiseEngine(Engine):
    """Element-wise losses: every element of the broadcast operands has a loss of its own."""

    name = "pointwise"
    Definition = Loss
    Static = Static

    # Arguments

    def bind(
        self, loss: Loss, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        operands, (weight, mask, normalizer) = arrays[:-3], arrays[-3:]
        reduction, options, (dim, out_dtype) = settings[0], settings[1:-2], settings[-2:]
        if legacy and (legacy[0] is not None or legacy[1] is not None):
            reduction = checks.legacy_reduction(loss, *legacy)
        static = _PLAIN.get(reduction) if type(reduction) is str else None
        if static is None:
            reduction = checks.reduction(loss, reduction)
            static = _PLAIN[reduction]
        scalars: tuple[float, ...] = ()
        if options:
            scalars = tuple([checks.parameter(loss, s, x) for s, x in zip(loss.parameters, options)])
            if loss.flags:
                choices = options[len(loss.parameters) :]
                flags = tuple([checks.flag(loss, s, x) for s, x in zip(loss.flags, choices)])
                static = Static(reduction, flags=flags)
        if weight is mask is normalizer is dim is out_dtype is None and not loss.takes_numbers:
            return loss, operands, static, scalars, None
        loss, inputs, scalars = _modified(loss, operands, scalars, weight, mask)
        if normalizer is not None:
            normalizer = checks.normalizer(loss, normalizer, reduction)
        if dim is not None:
            dim = pointwise_checks.dimensions(loss, dim, reduction)
        if out_dtype is not None:
            out_dtype = checks.out_dtype(loss, out_dtype)
        static = Static(reduction, dim, out_dtype, normalizer is not None, static.flags)
        return loss, inputs, static, scalars, normalizer

    def names(self, call: Call) -> list[str]:
        return [x.name for x in call.loss.operands]

    def check(self, call: Call) -> None:
        loss: Any = call.loss
        pointwise_checks.dtypes(loss, [checks.dtype_name(x) for x in call.arrays])
        pointwise_checks.broadcast(loss, [tuple(x.shape) for x in call.arrays])

    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        names = [checks.dtype_name(x) for x in call.arrays]
        return checks.promote(names, None if zero_d_widens else [x.ndim for x in call.arrays])

    def warning(self, call: Call) -> str | None:
        loss: Any = call.loss
        return pointwise_checks.broadcast_warning(loss, [tuple(x.shape) for x in call.arrays])

    # Plans

    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> PointwisePlan:
        return PointwisePlan(self, call, tensors, promoted, machine)

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Returns the operands that kernels read from copies, with the strides of the copies.

        - Broadcast operands that keep the others from being read in vectors, and are small beside these.
        - Arrays that are read twice, by a value with dimensions and by its gradients, from sectors that hold little of
          them: short rows with long gaps.
        - Arrays whose dimensions are in an order other than the first one's, if they are read twice, or if no fast
          layout can read them.
        """
        if isinstance(call.loss, TangentLoss):
            return {}
        shape, resolved = _resolved(call)
        copies = _compacted(shape, tensors, writes)
        if not writes:
            return copies
        twice = resolved.dims is not None
        copies |= {
            i: dense_strides(x.shape, x.strides)
            for i, x in enumerate(tensors)
            if twice and is_sparse(x.shape, x.strides, interop.ITEMSIZE[x.dtype])
        }
        full = {i: x for i, x in enumerate(tensors) if x.shape == shape and 0 not in x.strides}
        streams = {i: Stream(x.strides, interop.ITEMSIZE[x.dtype], read=True) for i, x in full.items()}
        first = next(iter(full.values()), None)
        gaps = first is not None and not first.lies_as(first.gradient.strides)
        loss: Any = call.loss
        return copies | reordered(shape, streams, not loss.heavy, twice, gaps, writes > 1)

    # Formulas

    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        return pointwise_reference.evaluate(call, promoted)

    def floating(self, call: Call) -> Wanted:
        return tuple([checks.dtype_name(x) in checks.FLOATING for x in call.arrays])

    # Transforms

    def modified(self, loss: Loss, modification: str) -> Loss:
        numbers, weight, mask, along = modification.split("~")
        base = modified(loss, frozenset(filter(None, numbers.split(","))), weight or None, bool(mask))
        return along_tangents(base, tuple([x == "1" for x in along])) if along else base

    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        shape, resolved = _resolved(call)
        dtype = call.static.out_dtype or promoted
        if resolved.dims == ():
            inputs = [(tuple(x.shape), s) for x, s in zip(call.arrays, strides, strict=True)]
            return [TensorSpec(dtype, shape, result_strides(shape, inputs))]
        return [TensorSpec(dtype, resolved.shape, dense_strides(resolved.shape, (0,) * len(resolved.shape)))]

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        """Splits a mean whose divisor is an array, or has a gradient, into two float64 sums.

        One is the sum of the losses, the other one the divisor, unless a normalizer replaces it. The divisor has the
        dimensions of the result, of size 1 where neither weight nor mask has more: a broadcast weight or mask is read
        once, and its elements count as often as they are used.
        """
        loss: Any = call.loss
        shape, resolved = _resolved(call)
        weights = resolved.weights and any(w and x is WEIGHT for x, w in zip(loss.operands, wanted, strict=True))
        array_normalizer = call.normalizer is not None and type(call.normalizer) is not float
        if not (weights or ((array_normalizer or resolved.counted) and not traced)):
            return None
        rank = len(shape)
        dims = tuple(range(rank)) if resolved.dims is None else resolved.dims
        static = Static("sum", dims, "float64", flags=call.static.flags)
        calls = [call._replace(static=static, normalizer=None)]
        factor = float(resolved.divisor)
        if call.normalizer is None:
            operands = zip(loss.operands, call.arrays, strict=True)
            modifiers = [
                x[(None,) * (rank - x.ndim)] for o, x in operands if (o is WEIGHT and resolved.weights) or o is MASK
            ]
            counted = counting(resolved.weights, resolved.masked)
            sizes = pointwise_checks.broadcast(counted, [tuple(x.shape) for x in modifiers])
            factor = prod([shape[d] for d in dims if sizes[d] == 1]) * (call.scalars[-1] if resolved.weighted else 1.0)
            calls.append(Call(counted, tuple(modifiers), static._replace(flags=())))

        def below(values: list[Any]) -> Any:
            divisor = call.normalizer if len(values) == 1 else values[1]
            return divisor if type(factor) is float and factor == 1.0 else divisor * factor

        def finish(xp: Any, values: list[Any]) -> Any:
            quotient = divide(xp, values[0], xp.broadcast_to(below(values), resolved.shape))
            return xp.astype(quotient, getattr(xp, call.static.out_dtype or promoted))

        return Apart(tuple(calls), finish, below, factor)

    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        """Returns the call as a sum that is divided by ``divisor``, and ``grad_output`` as it is."""
        shape, resolved = _resolved(call)
        if resolved.dims == ():
            return call._replace(static=_elementwise(call.static)), grad_output
        return _explicit(call, divisor, shape, resolved), grad_output

    def jvp(self, call: Call, moving: Wanted, tangents: tuple[Any, ...]) -> Call:
        loss: Any = call.loss
        shape, resolved = _resolved(call)
        moved = along_tangents(loss, moving)
        if resolved.dims == ():
            call = call._replace(static=_elementwise(call.static))
        else:
            divisor = _total_divisor(call, resolved)
            # The derivative of an empty mean is 0, as in torch: it is an empty sum, which 0 / 0 must not replace.
            call = _explicit(call, 1.0 if resolved.divisor == 0 else divisor, shape, resolved)
        return call._replace(loss=moved, arrays=(*call.arrays, *tangents))

    def primal(self, call: Call) -> tuple[Call, Wanted, tuple[Any, ...]]:
        loss: Any = call.loss
        count = len(loss.has_tangent)
        arrays, tangents = list(call.arrays[:count]), call.arrays[count:]
        remaining = iter(tangents)
        for i, moves in enumerate(loss.has_tangent):
            if moves and (tangent := next(remaining)).ndim > arrays[i].ndim:
                # The tangent of this array is batched, and the array itself is not.
                arrays[i] = arrays[i].expand(tangent.shape)
        return call._replace(loss=loss.base, arrays=tuple(arrays)), loss.has_tangent, tangents

    def batched(self, call: Call, dims: Sequence[int | None], size: int) -> Call | None:
        samples = [x if d is None else x.select(d, 0) for x, d in zip(call.arrays, dims, strict=True)]
        sample = call._replace(arrays=tuple(samples))
        shape, resolved = _resolved(sample)
        arrays: Sequence[Any] = call.arrays
        rank, reduced = len(shape), resolved.dims
        if reduced is None:
            reduced = tuple(range(rank))
        if rank == 0 and resolved.dims is None:
            # Adds a dimension, so that there is one to sum over.
            arrays = [x[..., None] for x in arrays]
            rank, reduced = 1, (0,)
            dims = [d if d is None else d % (x.ndim - 1) for x, d in zip(arrays, dims, strict=True)]
        aligned = []
        for x, d in zip(arrays, dims, strict=True):
            if d is not None:
                x = x.movedim(d, 0)
                x = x.reshape(size, *(1,) * (rank - x.ndim + 1), *x.shape[1:])
            aligned.append(x)
        if resolved.dims == ():
            return call._replace(arrays=tuple(aligned), static=_elementwise(call.static))
        static = Static("sum", tuple([d + 1 for d in reduced]), call.static.out_dtype, True, call.static.flags)
        return call._replace(arrays=tuple(aligned), static=static, normalizer=_total_divisor(call, resolved))

    # Warm-up

    def placeholders(
        self, loss: Loss, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], options: Any
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        needed = [x.name for x in loss.operands if x.default is None and x.name not in options]
        names = [dtypes[min(i, len(dtypes) - 1)] for i in range(len(needed))]
        sizes = [shapes[min(i, len(shapes) - 1)] for i in range(len(needed))]
        full = pointwise_checks.broadcast(loss, sizes)
        placeholders = {x.name: (names[0], full) for x in loss.operands}
        placeholders |= {"weight": (names[0], full), "mask": ("bool", full), "normalizer": ("float64", ())}
        return placeholders | {n: (x, tuple(s)) for n, x, s in zip(needed, names, sizes, strict=True)}

    def trained(self, call: Call) -> Wanted:
        """True for floating operands other than the target, the weight and the mask."""
        loss: Any = call.loss
        trainable = [x.name for x in (getattr(loss, "base", None) or loss).operands if x.name != "target"]
        return tuple([x.name in trainable and f for x, f in zip(loss.operands, self.floating(call), strict=True)])

    # Standing in for torch's functions

    def differs(self, loss: Loss, call: Call, takes: Callable[[Question], str | None], autocast: bool) -> str | None:
        form: Any = call.loss
        needed = [x.name for x in loss.operands if x.default is None]
        small = tuple([(x, (1, 1), "float32") for x in needed])
        if takes(Question(small, (("reduction", call.static.kind),))) is None or any(x > 1 for x in call.static.flags):
            return ARGUMENTS
        numbers: frozenset[str] = getattr(form, "numbers", frozenset())
        replaced = [x for x in loss.operands if x.name in numbers]
        values = call.scalars[len(loss.parameters) :]
        changed = any(x.default not in (None, value) for x, value in zip(replaced, values, strict=False))
        if changed or getattr(form, "weight", None) == "number":
            return ARGUMENTS
        shape = tuple(call.arrays[0].shape)
        for operand, x in zip(form.operands, call.arrays, strict=True):
            operand_shape = tuple(x.shape)
            if operand_shape == shape:
                continue
            # Operands of another shape mean the same in torch only if they do not enlarge the result.
            weights = operand is WEIGHT and takes(_narrow_weights(needed)) is not None
            optional = operand is not WEIGHT and operand.default is not None
            pairs = zip(reversed(operand_shape), reversed(shape), strict=False)
            if not ((weights or optional) and len(operand_shape) <= len(shape) and all(n in (1, m) for n, m in pairs)):
                return SHAPES
        if prod(shape) == 0:
            return SHAPES
        if call.static.kind == "batchmean" and not shape:
            return ARGUMENTS
        dtypes = [checks.dtype_name(x) for x in call.arrays]
        if dtypes[0] not in checks.FLOATING:
            return DTYPE
        if autocast:
            return None if all(x in checks.FLOATING for x in dtypes) else DTYPE
        scalars = [x.name for x in replaced if x.default is None]
        if len(set(dtypes)) > 1 or scalars:
            arrays = tuple([(x.name, (1, 1), d) for x, d in zip(form.operands, dtypes, strict=True)])
            promoted = takes(Question(arrays, tuple([(x, 1.0) for x in scalars])))
            return None if promoted == checks.promote(dtypes) else DTYPE
        return None


def _narrow_weights(names: Sequence[str]) -> Question:
    """Returns the :class:`Question` that asks if weights may have a shape other than the input's."""
    return Question((*[(x, (2, 2), "float32") for x in names], ("weight", (1, 2), "float32")))


def _compacted(shape: tuple[int, ...], tensors: Sequence[TensorSpec], writes: int) -> dict[int, tuple[int, ...]]:
    """Returns the small operands that are copied without gaps, with the strides of the copies.

    Copies have the dimension order of the first operand of the full shape.
    """
    full = [Stream(x.strides, interop.ITEMSIZE[x.dtype], read=True) for x in tensors if x.shape == shape]
    copies: dict[int, tuple[int, ...]] = {}
    part = COMPACTED_PART_WRITTEN if writes else COMPACTED_PART
    for i, x in enumerate(tensors) if full else ():
        if prod(x.shape) * part > prod(shape) or 0 in x.strides:
            continue
        lies = dense_strides(x.shape, full[0].strides[len(shape) - x.ndim :])
        here, copy = (
            Stream(broadcast_strides(x.shape, s, shape), interop.ITEMSIZE[x.dtype], read=True)
            for s in (x.strides, lies)
        )
        if here.strides != copy.strides and blocks_vectors(full, here, copy, shape):
            copies[i] = lies
    return copies


def _resolved(call: Call) -> tuple[tuple[int, ...], Resolved]:
    """Returns the broadcast shape of a call's operands, and its reduction."""
    loss: Any = call.loss
    shape = pointwise_checks.broadcast(loss, [tuple(x.shape) for x in call.arrays])
    return shape, resolve(loss, call.static, shape)


def _elementwise(static: Static) -> Static:
    """Returns the settings of a call without any reduction.

    A loss that is a mean over rows reduces them with "none", too, but not over the dimensions ().
    """
    return Static("none", (), static.out_dtype, flags=static.flags)


def _explicit(call: Call, divisor: Any, shape: tuple[int, ...], resolved: Resolved) -> Call:
    """Returns a call as a sum over explicit dimensions, divided by a number or an array."""
    dims = tuple(range(len(shape))) if resolved.dims is None else resolved.dims
    static = Static("sum", dims or None, call.static.out_dtype, True, call.static.flags)
    return call._replace(static=static, normalizer=divisor)


def _total_divisor(call: Call, resolved: Resolved) -> Any:
    """Returns the divisor of a call, a number or an array, if no kernel has to find it."""
    assert not resolved.counted, "taken apart before"
    divisor = resolved.divisor * (1.0 if call.normalizer is None else call.normalizer)
    divisor = divisor * call.scalars[-1] if resolved.weighted else divisor
    return float(divisor) if isinstance(divisor, int) else divisor


def _modified(
    loss: Loss, operands: Sequence[Any], scalars: tuple[float, ...], weight: Any, mask: Any
) -> tuple[Loss, tuple[Any, ...], tuple[float, ...]]:
    """Returns the loss, arrays and scalars for these arguments.

    Numbers become scalars; weight and mask become the last operands.
    """
    arrays, numbers = [], {}
    for i, (operand, x) in enumerate(zip(loss.operands, operands, strict=True)):
        if x is None and operand.default is not None:
            numbers[operand.name] = operand.default
        elif operand.number and interop.kind(x) == "unknown":
            numbers[operand.name] = checks.number(loss, operand.name, x)
        else:
            arrays.append(_per_row(loss, operand.name, x, operands[:i]) if operand.per_row else x)
    kind = None
    if weight is not None:
        kind = "number" if interop.kind(weight) == "unknown" else "array"
        if kind == "array":
            arrays.append(weight)
        else:
            numbers["weight"] = checks.number(loss, "weight", weight)
    if mask is not None:
        arrays.append(mask)
    replaced = tuple([x for x in numbers if x != "weight"])
    return loss.modifications[replaced, kind, mask is not None], tuple(arrays), (*scalars, *numbers.values())


def _per_row(loss: Loss, name: str, x: Any, before: Sequence[Any]) -> Any:
    """Returns an operand that may have one value per row, viewed so that it broadcasts with those ``before`` it."""
    arrays: Sequence[Any] = (x, *before)
    if "unknown" in [interop.kind(y) for y in arrays]:
        return x  # rejected where all operands are checked
    arrays = adopted(loss, [name, *[y.name for y in loss.operands[: len(before)]]], arrays)[1]
    shapes = [tuple(y.shape) for y in arrays[1:]]
    common = pointwise_checks.broadcast(loss, [*shapes, *[()] * (len(loss.operands) - len(shapes))])
    return pointwise_checks.per_row(loss, name, arrays[0], shapes[0], common)


POINTWISE = PointwiseEngine()
