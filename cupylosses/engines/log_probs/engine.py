"""Engine of log-probabilities: implements the protocol of :mod:`cupylosses.engines.base`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cupylosses import checks
from cupylosses.adoption import common_library
from cupylosses.call import Call, Parts
from cupylosses.engines.base import Apart, Engine, Machine, Plan, TensorSpec, Wanted
from cupylosses.engines.cache import SettingsCache
from cupylosses.engines.device import Device
from cupylosses.engines.log_probs import checks as log_prob_checks
from cupylosses.engines.log_probs import reference as log_prob_reference
from cupylosses.engines.log_probs.call import Static, of_one_label, positions, unpacked, value_shape
from cupylosses.engines.log_probs.definition import ONE_LABEL, LogProbs
from cupylosses.engines.log_probs.plan import LogProbPlan
from cupylosses.engines.softmax import labels
from cupylosses.engines.softmax.engine import row_major
from cupylosses.engines.softmax.layout import classes_last
from cupylosses.interop import ITEMSIZE

#: Cache of checked settings.
_SETTINGS = SettingsCache()


class LogProbEngine(Engine):
    """Log-probabilities of labels, and entropies, for given logits."""

    name = "log_probs"
    needs_chip = True
    Definition: ClassVar[Any] = LogProbs
    Static: ClassVar[Any] = Static

    # Arguments

    def bind(
        self, loss: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        names = [n for n, x in zip(loss.array_names, arrays, strict=True) if x is not None]
        _, present = common_library(loss, names, tuple([x for x in arrays if x is not None]))
        scalars, entropy, ignored, check = _SETTINGS.find((loss,), settings, lambda: checked_settings(loss, settings))
        static = Static(
            several=log_prob_checks.several_labels(loss, tuple(present[0].shape), present[1]),
            masked="mask" in names,
            capped=scalars[1] != 0.0,
            entropy=entropy,
            ignore_index=ignored,
            check=check,
            out_dtype="float64" if checks.dtype_name(present[0]) == "float64" else "float32",
        )
        if loss.of_one_label is not None and not (static.several or static.entropy):
            return loss.of_one_label, present, of_one_label(static, present[0].ndim), scalars, None
        return loss, present, static, scalars, None

    def names(self, call: Call) -> list[str]:
        return [call.loss.operands[0].name, *list(positions(call.static))[1:]]

    def check(self, call: Call) -> None:
        log_prob_checks.arrays(call.loss, self.names(call), call.arrays, tuple(call.arrays[0].shape[:-1]))

    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        return "float64" if checks.dtype_name(call.arrays[0]) == "float64" else "float32"

    # Plans

    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> Plan:
        return LogProbPlan(self, call, tensors, promoted, machine)

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Copies logits if classes are not contiguous in them or in their gradient, or if elements are misaligned.

        Tangents are copied if their classes are apart; those that classes share are not.
        """
        x, *_, last = tensors
        found = {}
        if 0 not in x.shape and not (_is_together(x, (1,)) and _is_together(x.gradient, (1,))):
            found[0] = classes_last(x.shape, x.ndim - 1)
        if any(call.static.has_tangent) and 0 not in x.shape and not _is_together(last, (0, 1)):
            found[len(tensors) - 1] = classes_last(x.shape, x.ndim - 1)
        return found

    def unpacked(self, static: Any, packed: Any) -> Any:
        return unpacked(static, packed)

    def raise_reported(self, device: Device) -> None:
        labels.raise_reported(device)

    def waits(self, call: Call) -> bool:
        return bool(call.static.check == "sync")

    # Formulas

    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        at = positions(call.static)
        logits, index = call.arrays[:2]
        mask = call.arrays[at["mask"]] if "mask" in at else None
        scalars = call.scalars or (1.0, 0.0)
        return log_prob_reference.evaluate(call.loss, call.static, logits, index, mask, scalars, promoted, readable)

    def floating(self, call: Call) -> Wanted:
        return tuple([i == 0 for i in range(len(call.arrays))])

    # Transforms

    def modified(self, loss: Any, modification: str) -> Any:
        if modification == ONE_LABEL and loss.of_one_label is not None:
            return loss.of_one_label
        return super().modified(loss, modification)

    def has_residual(self, call: Call) -> bool:
        return not any(call.static.has_tangent)

    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        rows, dtype = tuple(call.arrays[0].shape[:-1]), call.static.out_dtype or promoted
        specs = [row_major(dtype, value_shape(call.static, rows, tuple(call.arrays[1].shape)))]
        return specs + ([row_major(self.promoted(call), (*rows, 4))] if self.has_residual(call) else [])

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        return None

    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        """Returns the call without checks of labels: there is no divisor to apply."""
        return call._replace(static=call.static._replace(check="off")), grad_output

    def jvp(self, call: Call, moving: Wanted, tangents: tuple[Any, ...]) -> Call:
        static = call.static._replace(has_tangent=tuple(moving))
        return call._replace(static=static, arrays=(*call.arrays, *tangents))

    def primal(self, call: Call) -> tuple[Call, Wanted, tuple[Any, ...]]:
        moving = tuple([bool(x) for x in call.static.has_tangent])
        count = len(call.arrays) - sum(moving)
        base = call._replace(arrays=call.arrays[:count], static=call.static._replace(has_tangent=()))
        return base, moving, call.arrays[count:]

    def batched(self, call: Call, dims: Sequence[int | None], size: int) -> Call | None:
        at, arrays = positions(call.static), list(call.arrays)
        rank = arrays[0].ndim - (dims[0] is not None) - 1
        for i, d in enumerate(dims):
            x = arrays[i]
            if i != at.get("mask"):
                arrays[i] = x.expand(size, *x.shape) if d is None else x.movedim(d, 0)
            elif d is not None:
                x = x.movedim(d, 0)
                arrays[i] = x.reshape(size, *(1,) * (rank + 1 - x.ndim), *x.shape[1:])
        return call._replace(arrays=tuple(arrays))

    # Warm-up

    def placeholders(
        self, loss: Any, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Takes the shapes of the logits and of the index. By default the index has the shape of the rows."""
        logits = tuple(shapes[0])
        index = tuple(shapes[-1]) if len(shapes) > 1 else logits[:-1]
        return {
            loss.operands[0].name: (dtypes[0], logits),
            "index": (dtypes[-1] if len(dtypes) > 1 else "int64", index),
            "mask": ("bool", logits[:-1]),
        }


def _is_together(x: TensorSpec, class_strides: Sequence[int]) -> bool:
    """True if the classes of a tensor have one of these strides, and elements are aligned."""
    return (x.shape[-1] <= 1 or x.strides[-1] in class_strides) and x.misalignment % ITEMSIZE[x.dtype] == 0


def checked_settings(loss: Any, settings: tuple[Any, ...]) -> tuple[tuple[float, float], bool, int, str]:
    """Returns the checked scale and softcap, then the checked settings of results."""
    by_name = dict(zip(loss.setting_names, settings, strict=True))
    return log_prob_checks.scalars(loss, by_name), *log_prob_checks.settings(loss, by_name)


LOG_PROBS = LogProbEngine()
