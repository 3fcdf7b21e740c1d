"""The engine of softmax losses: the implementation of the protocol in :mod:`cupylosses.engines.base`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from cupylosses import checks, interop
from cupylosses.adoption import LIBRARIES, adopted
from cupylosses.call import Call, Parts
from cupylosses.engines.base import (
    ARGUMENTS,
    DTYPE,
    SHAPES,
    Apart,
    Engine,
    Machine,
    Plan,
    Question,
    TensorSpec,
    Wanted,
    contiguous,
)
from cupylosses.engines.cache import SettingsCache
from cupylosses.engines.device import Device
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax import labels
from cupylosses.engines.softmax import reference as softmax_reference
from cupylosses.engines.softmax.call import RowResult, Rows, Static
from cupylosses.engines.softmax.definition import IGNORED, SoftmaxLoss
from cupylosses.engines.softmax.plan import SoftmaxPlan, copies
from cupylosses.reference_math import divide

#: Settings that have been checked before.
_SETTINGS = SettingsCache()


class SoftmaxEngine(Engine):
    """Engine of losses of rows of logits, with class indices or dense targets."""

    name = "softmax"
    needs_chip = True
    contracts = True
    Definition: ClassVar[Any] = SoftmaxLoss
    Static: ClassVar[Any] = Static

    # Arguments

    def rows(self, call: Call) -> Rows:
        """Returns the arrays of a call by name, as checks and formulas use them."""
        return Rows(call)

    def bind(
        self, loss: SoftmaxLoss, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        first, second, weight, mask, normalizer = arrays
        known = interop.known_kinds
        library = known.get(type(first))
        if not (
            known.get(type(second)) == library in LIBRARIES
            and (weight is None or known.get(type(weight)) == library)
            and (mask is None or known.get(type(mask)) == library)
        ):
            by_name = {x.name: array for x, array in zip(loss.operands, (first, second), strict=True)}
            by_name |= {} if weight is None else {str(loss.weights): weight}
            by_name |= {} if mask is None else {"mask": mask}
            converted = dict(zip(by_name, adopted(loss, list(by_name), list(by_name.values()))[1], strict=True))
            first, second = (converted[x.name] for x in loss.operands)
            weight, mask = converted.get(str(loss.weights)), converted.get("mask")
        plain = library == "torch" and normalizer is None and (not legacy or legacy[0] is legacy[1] is None)
        if plain:
            static, scalars = _SETTINGS.find(
                (loss, second.dtype, first.dim(), weight is None, mask is None),
                settings,
                lambda: checked_settings(loss, first, second, weight, mask, None, settings, legacy),
                loss.default_settings,
            )
        else:
            static, scalars = checked_settings(loss, first, second, weight, mask, normalizer, settings, legacy)
            if normalizer is not None:
                normalizer = checks.normalizer(loss, normalizer, static.reduction)
        present = (first, second) if weight is None and mask is None else _present(first, second, weight, mask)
        return loss, present, static, scalars, normalizer

    def names(self, call: Call) -> list[str]:
        return self.rows(call).names

    def check(self, call: Call) -> None:
        softmax_checks.arrays(self.rows(call))

    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        return checks.promote([checks.dtype_name(x) for x in call.arrays[:2]])

    # Plans

    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> Plan:
        return SoftmaxPlan(self, call, tensors, promoted, machine)

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Returns the arrays that kernels read from copies, with the strides of the copies.

        These are operands whose rows no kernel reads fast in place, class weights with gaps, and tangents that kernels
        cannot read in place.
        """
        static, loss = call.static, call.loss
        assert isinstance(loss, SoftmaxLoss)
        dim, copy_strides = static.class_dim, dict[int, tuple[int, ...]]()
        operands = 1 if static.kind == "indices" else 2
        # Without a softmax, only kernels that write gradients process whole rows; second derivatives are 0 or rare.
        if loss.softmax or (writes and not static.has_tangent):
            copy_strides.update(copies(static, tensors, loss, machine.chip, writes > 0))
        if static.weighted and tensors[2].strides != (1,) and tensors[2].shape[0] > 1:
            copy_strides[2] = (1,)
        tangents = len(tensors) - sum(static.has_tangent)
        positions = iter(range(tangents, len(tensors)))
        # Tangents must have the strides of the copies, so they are checked only after the operands have been copied.
        for x, moves in zip(tensors, static.has_tangent if not {0, 1} & {*copy_strides} else (), strict=False):
            if moves and (i := next(positions)) >= 0:
                gradient_strides, lies = x.gradient.strides, tensors[i].strides
                near = lies[dim] in (0, 1) if x.strides[dim] == 1 else 0 in lies or x.lies_as(lies)
                if not tensors[i].lies_as(gradient_strides) and (operands == 2 or not near):
                    copy_strides[i] = gradient_strides
        return copy_strides

    def auxiliary_results(self, xp: Any, call: Call, stored: Sequence[Any]) -> list[Any]:
        static = call.static
        results = [stored[0]] if static.lse else []
        return [*results, _accuracy(xp, self.rows(call), stored[1])] if static.accuracy else results

    def result(self, call: Call, outputs: Sequence[Any]) -> Any:
        static = call.static
        if not (static.lse or static.accuracy):
            return outputs[0]
        return RowResult(outputs[0], outputs[1] if static.lse else None, outputs[-1] if static.accuracy else None)

    def raise_reported(self, device: Device) -> None:
        labels.raise_reported(device)

    def overwrites(self, call: Call) -> bool:
        return bool(call.static.inplace and call.static.kind == "indices")

    def waits(self, call: Call) -> bool:
        return bool(call.static.check == "sync" and call.static.kind == "indices")

    # Formulas

    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        return softmax_reference.evaluate(self.rows(call), promoted, readable)

    def floating(self, call: Call) -> Wanted:
        return tuple([i == 0 or (i == 1 and call.static.kind != "indices") for i in range(len(call.arrays))])

    # Transforms

    def has_residual(self, call: Call) -> bool:
        return bool(call.static.kind == "indices")

    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        static, rows = call.static, self.rows(call).shape
        compute = "float64" if any([checks.dtype_name(x) == "float64" for x in call.arrays[:2]]) else "float32"
        specs = [row_major(static.out_dtype or promoted, rows if static.reduction == "none" else ())]
        specs += [row_major(compute, (*rows, 4))] if self.has_residual(call) else []
        specs += [row_major(compute, rows)] if static.lse else []
        return specs + ([row_major("float32", ())] if static.accuracy else [])

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        """Returns the call as a float64 value per row, so that a batch becomes one more dimension of rows.

        There are few values per row, and the array library sums and divides them. A ``traced`` call stays one operator
        (None).
        """
        static = call.static
        if traced:
            return None
        per_row = call._replace(
            static=static._replace(
                reduction="none", out_dtype="float64", accuracy=False, inplace=False, normalized=False
            ),
            normalizer=None,
        )

        def finish(xp: Any, values: list[Any]) -> Any:
            result = values[0]
            value, lse = (result.loss, result.lse) if static.lse else (result, None)
            if static.reduction != "none":
                value = divide(xp, xp.sum(value), self.divisor(xp, call))
            value = xp.astype(value, getattr(xp, static.out_dtype or promoted))
            if not (static.lse or static.accuracy):
                return value
            return RowResult(
                value, lse, _plain_accuracy(xp, self.rows(call), self.compared(call)) if static.accuracy else None
            )

        return Apart((per_row,), finish)

    def compared(self, call: Call) -> tuple[Any, Any]:
        """Returns the logit of each row's label, and the largest logit of each row, for torch tensors.

        Both are as in memory, neither scaled nor capped.
        """
        rows = self.rows(call)
        x, dim = rows.operands[0].detach(), rows.class_dim
        labels = softmax_reference.counted_rows(interop.namespace(x), rows).labels
        return x.gather(dim, labels.unsqueeze(dim)).squeeze(dim), x.amax(dim)

    def divisor(self, xp: Any, call: Call) -> Any:
        """Returns the divisor of the sum over rows, computed by the array library."""
        rows = self.rows(call)
        return softmax_reference.divisor(xp, rows, softmax_reference.counted_rows(xp, rows))

    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        """Returns the call of a value per row, and the ``grad_output`` of each row."""
        xp = interop.namespace(grad_output)
        static = call.static._replace(
            reduction="none",
            out_dtype="float64",
            lse=False,
            accuracy=False,
            inplace=False,
            check="off",
            normalized=False,
        )
        upstream = xp.astype(grad_output, xp.float64)
        if call.static.reduction != "none":
            # If the divisor is 0, no row has a gradient, nor has that gradient one: 0 * inf must not arise. Multiplying
            # by the reciprocal matches the kernels.
            if isinstance(divisor, float):
                upstream = upstream * (1.0 / divisor if divisor else 0.0)
            else:
                empty = divisor == 0
                one = xp.ones_like(divisor)
                upstream = xp.where(empty, 0.0, upstream) * (1.0 / xp.where(empty, one, divisor))
            upstream = xp.broadcast_to(upstream, self.rows(call).shape)
        return call._replace(static=static, normalizer=None), upstream

    def jvp(self, call: Call, moving: Wanted, tangents: tuple[Any, ...]) -> Call:
        count = 1 if call.static.kind == "indices" else 2
        static = call.static._replace(has_tangent=tuple(moving[:count]), lse=False, accuracy=False)
        return call._replace(static=static, arrays=(*call.arrays, *tangents))

    def contracted(self, xp: Any, call: Call, gradients: Sequence[Any], tangents: Sequence[Any]) -> Any:
        counts = softmax_reference.counted_rows(xp, self.rows(call)).sound
        dim = call.static.class_dim
        terms = [xp.sum(g * v, axis=dim, dtype=xp.float64) for g, v in zip(gradients, tangents, strict=True)]
        return xp.where(counts, sum(terms[1:], terms[0]), 0.0)

    def primal(self, call: Call) -> tuple[Call, Wanted, tuple[Any, ...]]:
        moving, count = call.static.has_tangent, len(call.arrays) - sum(call.static.has_tangent)
        base = call._replace(arrays=call.arrays[:count], static=call.static._replace(has_tangent=()))
        moving = tuple([i < len(moving) and bool(moving[i]) for i in range(count)])
        return base, moving, call.arrays[count:]

    def batched(self, call: Call, dims: Sequence[int | None], size: int) -> Call | None:
        static, arrays = call.static, list(call.arrays)
        mask = 2 + static.weighted
        if static.weighted and dims[2] is not None:
            return None  # kernels read a single set of class weights
        for i, d in enumerate(dims):
            x = arrays[i]
            if i < 2 or i >= mask + static.masked:
                arrays[i] = x.expand(size, *x.shape) if d is None else x.movedim(d, 0)
            elif static.masked and i == mask and d is not None:
                x = x.movedim(d, 0)
                ndim = arrays[0].ndim
                arrays[i] = x.reshape(size, *(1,) * (ndim - 1 - x.ndim), *x.shape[1:])
        return call._replace(arrays=tuple(arrays), static=static._replace(class_dim=static.class_dim + 1))

    # Warm-up

    def placeholders(
        self, loss: SoftmaxLoss, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], options: Any
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns dtype and shape of every argument that may be an array, by name.

        If the loss supports class indices, the target has them unless a floating dtype is named for it.
        """
        logits = tuple(shapes[0])
        dim = softmax_checks.class_dimension(loss, options.get("class_dim", loss.class_dim), logits)
        rows = (*logits[:dim], *logits[dim + 1 :])
        target = dtypes[-1] if len(dtypes) > 1 or loss.row is None else "int64"
        kind = softmax_checks.kind(loss, contiguous(target, ()))
        of_target = tuple(shapes[-1]) if len(shapes) > 1 else rows if kind == "indices" else logits
        arguments = {"mask": ("bool", rows), "normalizer": ("float64", ())}
        if loss.weights:
            arguments[loss.weights] = dtypes[0], logits[dim : dim + 1]
        first, second = (x.name for x in loss.operands)
        return arguments | {first: (dtypes[0], logits), second: (target, of_target)}

    # Standing in for torch's functions

    def differs(
        self, loss: SoftmaxLoss, call: Call, takes: Callable[[Question], str | None], autocast: bool
    ) -> str | None:
        rows, static = self.rows(call), call.static
        first, second = rows.operands
        shape, indices = tuple(first.shape), static.kind == "indices"
        # torch tells probabilities from labels by the target's shape; here its dtype decides.
        if tuple(second.shape) != (rows.shape if indices else shape) or 0 in shape:
            return SHAPES
        weight = rows.weight
        if weight is not None and (getattr(weight, "requires_grad", False) or tuple(weight.shape) != (rows.classes,)):
            return ARGUMENTS
        dtypes = [checks.dtype_name(x) for x in call.arrays]
        if autocast:
            dtypes = ["float32" if x in checks.FLOATING and x != "float64" else x for x in dtypes]
        changed = [(s.name, 1.0) for s, x in zip(loss.parameters, rows.parameters, strict=True) if x != s.default]
        reduction = ("reduction", static.reduction)
        ones = (1,) * (len(shape) - 1)
        logits = (*ones[:1], 2, *ones[1:])
        shapes = (logits, ones if indices else logits, (2,))
        arrays = tuple(zip(rows.names, shapes, dtypes, strict=False))
        if takes(Question(arrays, (*changed, reduction))) == checks.promote(dtypes[:2]):
            return None
        plain = (rows.names[0], (1, 2), "float32"), (rows.names[1], (1,), "int64")
        return DTYPE if takes(Question(plain, (reduction,))) is not None else ARGUMENTS


def row_major(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """Returns the spec of a contiguous tensor.

    Sizes may be symbols, which must not be compared.
    """
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step = step * n
    return TensorSpec(dtype, shape, tuple(reversed(strides)))


def _present(*arrays: Any) -> tuple[Any, ...]:
    return tuple([x for x in arrays if x is not None])


def checked_settings(
    loss: SoftmaxLoss,
    first: Any,
    second: Any,
    weight: Any,
    mask: Any,
    normalizer: Any,
    settings: tuple[Any, ...],
    legacy: tuple[Any, ...],
) -> tuple[Static, tuple[float, ...]]:
    """Checks and returns the settings of a call.

    Dtypes and shapes are checked when plans are made.
    """
    count = len(loss.options)
    options, common = settings[:count], dict(zip(loss.setting_names[count:], settings[count:], strict=True))
    reduction = common["reduction"]
    if legacy and any([x is not None for x in legacy]):
        reduction = checks.legacy_reduction(loss, *legacy)
    reduction = checks.reduction(loss, reduction)
    kind = softmax_checks.kind(loss, second)
    count = len(loss.parameters)
    parameters = tuple([checks.parameter(loss, s, x) for s, x in zip(loss.parameters, options[:count], strict=True)])
    accuracy = softmax_checks.switch(loss, "return_accuracy", common.get("return_accuracy", False))
    softmax_checks.without_probabilities(loss, kind, parameters, accuracy)
    out_dtype = common["out_dtype"]
    scale = softmax_checks.scale(loss, loss.scale, common[loss.scale]) if loss.scale else 1.0
    if normalizer is not None:
        checks.normalizer(loss, normalizer, reduction)
    class_dim = softmax_checks.class_dimension(loss, common["class_dim"], first.shape)
    ignored = softmax_checks.ignore_index(loss, common.get("ignore_index", IGNORED), kind)
    out_dtype = None if out_dtype is None else checks.out_dtype(loss, out_dtype)
    flags = tuple([checks.flag(loss, s, x) for s, x in zip(loss.flags, options[count:], strict=True)])
    softcap = softmax_checks.softcap(loss, common.get("softcap"))
    named = dict(zip([x.name for x in loss.parameters], parameters, strict=True))
    smoothed = kind == "indices" and named.get(loss.specialize.get("smoothed", ""), 0.0) != 0.0
    static = Static(
        kind=kind,
        weighted=weight is not None,
        masked=mask is not None,
        class_dim=class_dim,
        ignore_index=ignored,
        reduction=reduction,
        out_dtype=out_dtype,
        flags=flags,
        smoothed=smoothed,
        plain=loss.has_plain(kind) and not any([named[x] for x in loss.left_out[kind]]),
        limit=loss.limit(kind, named),
        capped=softcap != 0.0,
        lse=softmax_checks.switch(loss, "return_lse", common.get("return_lse", False)),
        accuracy=accuracy,
        inplace=softmax_checks.switch(loss, "inplace_backward", common.get("inplace_backward", False)),
        check=softmax_checks.check_of_targets(loss, common.get("check_targets", "off")),
        normalized=normalizer is not None,
    )
    return static, (*parameters, 1.0 / scale if loss.scale == "temperature" else scale, softcap)


def _accuracy(xp: Any, rows: Rows, correct: Any) -> Any:
    """Returns the accuracy: the share of ``correct`` rows among those that are neither masked nor ignored.

    Kernels have stored ``correct``, one byte per row.
    """
    # Labels are widened, because an unsigned byte never equals a negative ignore_index.
    counts = xp.astype(rows.operands[1], xp.int64) != rows.ignore_index
    if rows.mask is not None:
        counts = counts & rows.mask
    share = xp.sum(correct, dtype=xp.float64) / xp.sum(counts, dtype=xp.float64)
    return xp.astype(share, xp.float32)


def _plain_accuracy(xp: Any, rows: Rows, compared: tuple[Any, Any]) -> Any:
    """Returns the accuracy without kernels: the share of rows in which no logit is larger than the label's.

    Rows that are masked or ignored do not count.
    """
    counted = softmax_reference.counted_rows(xp, rows)
    wide = xp.float64 if any([checks.dtype_name(y) == "float64" for y in rows.operands]) else xp.float32
    # Compared after scaling and capping, which may make different logits equal.
    label_logit, largest = (softmax_reference.logits(xp, rows, z.to(wide)) for z in compared)
    right = counted.sound & (label_logit == largest)
    return (right.sum(dtype=xp.float64) / counted.used.sum()).to(xp.float32)


SOFTMAX = SoftmaxEngine()
