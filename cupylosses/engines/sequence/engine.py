"""Engine of sequence losses, an implementation of the protocol of :mod:`cupylosses.engines.base`."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

from cupylosses import checks, interop
from cupylosses.adoption import adopted
from cupylosses.call import Call, Parts
from cupylosses.engines.base import (
    ARGUMENTS,
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
from cupylosses.engines.sequence import checks as sequence_checks
from cupylosses.engines.sequence import reference as sequence_reference
from cupylosses.engines.sequence.call import Static, names, sizes_of
from cupylosses.engines.sequence.definition import SequenceLoss
from cupylosses.engines.sequence.plan import SequencePlan
from cupylosses.engines.softmax import labels
from cupylosses.engines.softmax.engine import row_major

#: Minimum number of elements for copying logits with non-contiguous classes.
APART_ELEMENTS = 1 << 10
#: Numbers of classes for which logits are not copied, because strided reads take no longer.
APART_CLASSES = range(9, 16)
#: Cache of checked settings.
_SETTINGS = SettingsCache()


class SequenceEngine(Engine):
    """Losses of unaligned sequences."""

    name = "sequence"
    needs_chip = True
    contracts = True
    Definition: ClassVar[Any] = SequenceLoss
    Static: ClassVar[Any] = Static

    # Arguments

    def bind(
        self, loss: SequenceLoss, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        """Checks the arguments, and converts arrays to the library and the device of the first operand.

        Host data is transferred in one asynchronous copy.
        """
        first, targets, input_lengths, target_lengths, weight, mask, normalizer = arrays
        base = _SETTINGS.find((loss,), settings, lambda: self.checked(loss, settings))
        x = _array(loss, loss.operands[0].name, first)
        sequence_checks.rank(loss, x.shape, base.batch_first)
        batched = len(x.shape) == 3
        samples = tuple(x.shape[:1] if base.batch_first else x.shape[1:2]) if batched else ()
        frames, count = int(x.shape[1 if batched and base.batch_first else 0]), int(samples[0]) if samples else 1
        sequence_checks.blank(loss, base.blank, int(x.shape[-1]))
        given_labels = _array(loss, "targets", targets)
        sequence_checks.counts(loss, "targets", given_labels)
        sequence_checks.targets(loss, given_labels.shape, count, batched)
        if not batched and len(given_labels.shape) == 2:
            given_labels = given_labels[0]
        concatenated = batched and len(given_labels.shape) == 1
        if concatenated and target_lengths is None:
            if count != 1:
                raise sequence_checks.needs_lengths(loss)
            given_labels, concatenated = given_labels[None], False
        room = int(given_labels.shape[-1])
        named_arrays = {loss.operands[0].name: x, "targets": given_labels}
        for name, argument, most in (
            ("input_lengths", input_lengths, frames),
            ("target_lengths", target_lengths, room),
        ):
            if argument is not None:
                total = room if concatenated and name == "target_lengths" else None
                named_arrays[name] = _lengths(loss, name, argument, x, samples, most, total)
        for name, argument in (("weight", weight), ("mask", mask)):
            if argument is not None:
                named_arrays[name] = _per_sample(loss, name, argument, x, samples)
        placed = interop.placed(x, list(named_arrays.values()))
        named_arrays = dict(zip(named_arrays, placed, strict=True))
        xp = interop.namespace(x)
        for name in named_arrays.keys() & {"weight", "mask"}:
            if tuple(named_arrays[name].shape) != samples:
                named_arrays[name] = xp.broadcast_to(named_arrays[name], samples)
        static = base._replace(
            batched=batched,
            concatenated=concatenated,
            input_lengths="input_lengths" in named_arrays,
            target_lengths="target_lengths" in named_arrays,
            weighted="weight" in named_arrays,
            masked="mask" in named_arrays,
            normalized=normalizer is not None,
        )
        if normalizer is not None:
            normalizer = checks.normalizer(loss, normalizer, static.reduction)
        return loss, tuple([named_arrays[name] for name in names(loss, static)]), static, (), normalizer

    def checked(self, loss: SequenceLoss, settings: tuple[Any, ...]) -> Static:
        """Returns the checked settings of a call. `bind` fills in those that depend on its arrays."""
        options = dict(zip(loss.setting_names, settings, strict=True))
        out_dtype = options["out_dtype"]
        return Static(
            reduction=checks.reduction(loss, options["reduction"]),
            out_dtype=None if out_dtype is None else checks.out_dtype(loss, out_dtype),
            blank=sequence_checks.integer(loss, "blank", options["blank"]),
            zero_infinity=sequence_checks.switch(loss, "zero_infinity", options["zero_infinity"]),
            batch_first=sequence_checks.switch(loss, "batch_first", options["batch_first"]),
            of_logits=sequence_checks.choice(loss, "gradient", options.get("gradient", "log_probs")) == "logits",
            inplace=sequence_checks.switch(loss, "inplace_backward", options.get("inplace_backward", False)),
            check=sequence_checks.choice(loss, "check_targets", options["check_targets"]),
        )

    def names(self, call: Call) -> list[str]:
        return list(names(call.loss, call.static))

    def check(self, call: Call) -> None:
        loss: Any = call.loss
        sequence_checks.dtypes(loss, list(zip(self.names(call), call.arrays, strict=False)))

    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        return checks.dtype_name(call.arrays[0])

    # Plans

    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> Plan:
        return SequencePlan(self, call, tensors, promoted, machine)

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Returns the arrays that kernels read from copies, with the strides of the copies.

        Labels, lengths, weights and masks must be contiguous. The first operand may have any strides, but nested
        batches must form one dimension, in it and in its gradient. All classes of logits are read, so logits with
        non-contiguous classes are copied.
        """
        strides = {}
        x, batches, tangent = tensors[0], call.static.batches, len(names(call.loss, call.static))
        for i, y in enumerate(tensors[1:tangent], 1):
            whole = contiguous(y.dtype, y.shape).strides
            if y.strides != whole and 0 not in y.shape:
                strides[i] = whole
        loss: Any = call.loss
        apart = loss.logits and not call.static.has_tangent and x.strides[-1] != 1 < x.shape[-1]
        apart = apart and prod(x.shape) >= APART_ELEMENTS and x.shape[-1] not in APART_CLASSES
        if 0 in x.shape:
            return strides
        if apart or not all([_is_even(x.shape, s, batches) for s in (x.strides, x.gradient.strides)]):
            strides[0] = contiguous(x.dtype, x.shape).strides
        return strides

    def raise_reported(self, device: Device) -> None:
        labels.raise_reported(device)

    def waits(self, call: Call) -> bool:
        return bool(call.static.check == "sync")

    # Formulas

    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        return sequence_reference.evaluate(call, promoted, readable)

    def floating(self, call: Call) -> Wanted:
        return tuple([i == 0 for i in range(len(call.arrays))])

    # Transforms

    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        shape = sizes_of(call).samples if call.static.reduction == "none" else ()
        return [row_major(call.static.out_dtype or promoted, shape)]

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        """Splits a reduced call into float64 losses per sample, for which a batch is more samples, and a reduction."""
        static = call.static
        if traced:
            return None
        if static.of_logits and wanted[0]:
            raise sequence_checks.no_derivative(call.loss, "forward mode, vmap or second derivatives")
        if static.reduction == "none":
            return None
        per_sample = call._replace(
            static=static._replace(reduction="none", out_dtype="float64", normalized=False), normalizer=None
        )

        def finish(xp: Any, values: list[Any]) -> Any:
            value = values[0]
            if static.averages_labels:
                value = value / sequence_reference.label_counts(xp, call)
            value = sequence_reference.divide(xp, xp.sum(value), sequence_reference.divisor(xp, call))
            return xp.astype(value, getattr(xp, static.out_dtype or promoted))

        return Apart((per_sample,), finish)

    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        """Returns the call without a reduction, and a ``grad_output`` for each of its values."""
        if call.static.of_logits:
            raise sequence_checks.no_derivative(call.loss, "second derivatives")
        xp = interop.namespace(grad_output)
        static = call.static._replace(reduction="none", out_dtype="float64", normalized=False, check="off")
        upstream = xp.astype(grad_output, xp.float64)
        if call.static.reduction != "none":
            # With a divisor of 0, no sample has a gradient, and neither has that gradient: 0 * inf must not arise.
            if isinstance(divisor, (int, float)):
                upstream = upstream * (1.0 / divisor if divisor else 0.0)
            else:
                empty = divisor == 0
                upstream = xp.where(empty, 0.0, upstream) * (1.0 / xp.where(empty, xp.ones_like(divisor), divisor))
            upstream = xp.broadcast_to(upstream, sizes_of(call).samples)
            if call.static.averages_labels:
                upstream = upstream / sequence_reference.label_counts(xp, call)
        return call._replace(static=static, normalizer=None), upstream

    def jvp(self, call: Call, moving: Wanted, tangents: tuple[Any, ...]) -> Call:
        static = call.static._replace(has_tangent=tuple(moving))
        return call._replace(static=static, arrays=(*call.arrays, *tangents))

    def contracted(self, xp: Any, call: Call, gradients: Sequence[Any], tangents: Sequence[Any]) -> Any:
        static = call.static
        frames = static.batches + int(static.batched and static.batch_first)
        products = gradients[0] * tangents[0]
        return xp.sum(products, axis=(frames, products.ndim - 1), dtype=xp.float64)

    def primal(self, call: Call) -> tuple[Call, Wanted, tuple[Any, ...]]:
        moving = tuple([bool(x) for x in call.static.has_tangent])
        count = len(call.arrays) - sum(moving)
        base = call._replace(arrays=call.arrays[:count], static=call.static._replace(has_tangent=()))
        return base, moving, call.arrays[count:]

    def batched(self, call: Call, dims: Sequence[int | None], size: int) -> Call | None:
        arrays = [
            x.expand(size, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(call.arrays, dims, strict=True)
        ]
        return call._replace(arrays=tuple(arrays), static=call.static._replace(batches=call.static.batches + 1))

    # Warm-up

    def placeholders(
        self, loss: SequenceLoss, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns dtype and shape of every array argument of a warm-up.

        ``shapes`` are those of the first operand and of the targets. There is one length per sample.
        """
        first = tuple(shapes[0])
        samples = first[0 if options.get("batch_first") else 1 :][:1] if len(first) == 3 else ()
        targets = tuple(shapes[1]) if len(shapes) > 1 else (*samples, max(1, first[-3 if samples else 0] // 4))
        integers = dtypes[-1] if len(dtypes) > 1 else "int64"
        specs: dict[str, tuple[str, tuple[int, ...]]] = dict.fromkeys(
            ("input_lengths", "target_lengths"), (integers, samples)
        )
        specs |= {"weight": ("float32", samples), "mask": ("bool", samples), "normalizer": ("float64", ())}
        return specs | {loss.operands[0].name: (dtypes[0], first), "targets": (integers, targets)}

    # Standing in for torch's functions

    def differs(
        self, loss: SequenceLoss, call: Call, takes: Callable[[Question], str | None], autocast: bool
    ) -> str | None:
        static = call.static
        if loss.logits or static.weighted or static.masked or static.normalized or static.batches:
            return ARGUMENTS
        if not (static.input_lengths and static.target_lengths) or static.batch_first:
            return ARGUMENTS
        if 0 in call.arrays[0].shape:
            return SHAPES
        return None


def _is_even(shape: Sequence[int], strides: Sequence[int], batches: int) -> bool:
    """True if the dimensions of nested batches form one dimension."""
    return all([strides[d] == shape[d + 1] * strides[d + 1] for d in range(batches - 1)])


def _array(loss: SequenceLoss, name: str, x: Any) -> Any:
    """Returns an array of a library that has a backend. Others are adopted through DLPack."""
    kind = interop.kind(x)
    if kind == "unknown":
        raise checks.not_an_array(loss, name, x)
    return adopted(loss, [name], [x])[1][0] if kind == "dlpack" else x


def _lengths(
    loss: SequenceLoss, name: str, lengths: Any, x: Any, samples: tuple[int, ...], most: int, total: int | None
) -> Any:
    """Returns lengths as an array in the shape of the samples. Checks the range of those in host memory."""
    if interop.kind(lengths) == "unknown":
        values = [lengths] if isinstance(lengths, numbers.Integral) else lengths
        if not isinstance(values, (list, tuple)):
            raise sequence_checks.not_integers(loss, name, lengths)
        known = [_length(loss, name, v, lengths) for v in values]
        sequence_checks.lengths(loss, name, () if not samples and values is not lengths else (len(known),),
                                samples[0] if samples else 1, bool(samples))  # fmt: skip
        sequence_checks.known_lengths(loss, name, known, most, total)
        return interop.integers(known, samples)
    lengths = _array(loss, name, lengths)
    sequence_checks.counts(loss, name, lengths)
    sequence_checks.lengths(loss, name, lengths.shape, samples[0] if samples else 1, bool(samples))
    values = interop.host_values(lengths, x)
    if values is not None:
        sequence_checks.known_lengths(loss, name, values, most, total)
    return lengths if tuple(lengths.shape) == samples else lengths.reshape(samples)


def _length(loss: SequenceLoss, name: str, value: Any, lengths: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise sequence_checks.not_integers(loss, name, lengths)
    return int(value)


def _per_sample(loss: SequenceLoss, name: str, argument: Any, x: Any, samples: tuple[int, ...]) -> Any:
    """Returns a weight or a mask as an array."""
    if interop.kind(argument) == "unknown":
        if name == "mask" or isinstance(argument, bool) or not isinstance(argument, numbers.Real):
            raise checks.not_an_array(loss, name, argument)
        return interop.number(checks.number(loss, name, argument))
    argument = _array(loss, name, argument)
    sequence_checks.per_sample(loss, name, argument, samples)
    return argument


SEQUENCE = SequenceEngine()
