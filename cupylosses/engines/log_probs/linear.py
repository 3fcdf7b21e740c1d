"""Engine of log-probabilities of a linear layer's output: implements :mod:`cupylosses.engines.base`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cupylosses import checks, interop
from cupylosses.adoption import common_library
from cupylosses.call import Call, Parts
from cupylosses.engines.base import Apart, Machine, Plan, TensorSpec, Wanted
from cupylosses.engines.cache import SettingsCache
from cupylosses.engines.linear_softmax import checks as linear_checks
from cupylosses.engines.linear_softmax.engine import contiguous_copies, layer_of
from cupylosses.engines.linear_softmax.reference import logits_of_layer, weight_of
from cupylosses.engines.log_probs import checks as log_prob_checks
from cupylosses.engines.log_probs import reference as log_prob_reference
from cupylosses.engines.log_probs.call import LinearStatic, linear_positions, value_shape
from cupylosses.engines.log_probs.definition import LinearLogProbs
from cupylosses.engines.log_probs.engine import LogProbEngine, checked_settings
from cupylosses.engines.log_probs.linear_plan import LinearLogProbPlan
from cupylosses.engines.softmax.engine import row_major

#: Cache of checked settings.
_SETTINGS = SettingsCache()


class LinearLogProbEngine(LogProbEngine):
    """Log-probabilities of labels, and entropies, for the output of a linear layer."""

    name = "linear log-probabilities"
    Definition = LinearLogProbs
    Static = LinearStatic

    # Arguments

    def bind(
        self, loss: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        names = [n for n, x in zip(loss.array_names, arrays, strict=True) if x is not None]
        library, present = common_library(loss, names, tuple([x for x in arrays if x is not None]))
        by_name = dict(zip(names, present, strict=True))
        if library == "torch":
            from cupylosses.torch_compat import operands_of_linear

            layer = [x for x in ("input", "linear_weight", "linear_bias") if x in by_name]
            by_name |= dict(zip(layer, operands_of_linear([by_name[x] for x in layer]), strict=True))
        input, weight, index = by_name["input"], by_name["linear_weight"], by_name["index"]
        linear_checks.operands(loss, input, weight, by_name.get("linear_bias"), index)
        log_prob_checks.weight(loss, weight)
        dtype = checks.dtype_name(input)
        of_rows, (logits, accumulate, memory, _) = _SETTINGS.find(
            (loss, dtype), settings, lambda: _settings_of_layer(loss, settings, dtype)
        )
        scalars, entropy, ignored, check = of_rows
        if "main_grad" in by_name:
            linear_checks.main_grad(loss, by_name["main_grad"], weight, library)
        rows = tuple(input.shape[:-1])
        if "mask" in by_name and linear_checks.broadcasts(by_name["mask"], (*rows, weight.shape[0]), len(rows)):
            by_name["mask"] = interop.namespace(input).broadcast_to(by_name["mask"], rows)
        static = LinearStatic(
            several=log_prob_checks.several_labels(loss, tuple(input.shape), index),
            masked="mask" in by_name,
            capped=scalars[1] != 0.0,
            entropy=entropy,
            ignore_index=ignored,
            check=check,
            out_dtype="float64" if dtype == "float64" else "float32",
            has_tangent=(),
            biased="linear_bias" in by_name,
            logits_dtype=logits,
            accumulate_dtype=accumulate,
            max_memory=memory,
            adds="main_grad" in by_name,
        )
        return loss, tuple([by_name[x] for x in linear_positions(static)]), static, scalars, None

    def names(self, call: Call) -> list[str]:
        return list(linear_positions(call.static))

    def check(self, call: Call) -> None:
        at = linear_positions(call.static)
        linear_checks.dtypes(call.loss, layer_of(at, call.arrays))
        log_prob_checks.arrays(call.loss, list(at), call.arrays, tuple(call.arrays[0].shape[:-1]))

    # Plans

    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> Plan:
        return LinearLogProbPlan(self, call, tensors, promoted, machine)

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> Mapping[int, tuple[int, ...]]:
        return contiguous_copies(tensors)

    # Formulas

    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        at, arrays = linear_positions(call.static), call.arrays
        narrow = promoted != "float64" and interop.kind(arrays[0]) != "numpy"
        bias, mask = (arrays[at[x]] if x in at else None for x in ("linear_bias", "mask"))
        logits = logits_of_layer(arrays[0], weight_of(call, at), bias, narrow)
        scalars = call.scalars or (1.0, 0.0)
        return log_prob_reference.evaluate(
            call.loss, call.static.of_rows, logits, arrays[2], mask, scalars, promoted, readable
        )

    def floating(self, call: Call) -> Wanted:
        differentiable = (0, 1, linear_positions(call.static).get("linear_bias"))
        return tuple([i in differentiable for i in range(len(call.arrays))])

    # Transforms

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        linear_checks.not_transformed(call.loss, call.static)
        return super().apart(call, promoted, wanted, traced)

    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        linear_checks.not_transformed(call.loss, call.static)
        return super().divided_by(call, divisor, grad_output)

    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        rows, dtype = tuple(call.arrays[0].shape[:-1]), call.static.out_dtype or promoted
        specs = [row_major(dtype, value_shape(call.static, rows, tuple(call.arrays[2].shape)))]
        return specs + ([row_major(self.promoted(call), (*rows, 4))] if self.has_residual(call) else [])

    def batched(self, call: Call, dims: Sequence[int | None], size: int) -> Call | None:
        """Turns a batch of inputs into more rows. Batches of weights are left to the reference formula."""
        at, arrays = linear_positions(call.static), list(call.arrays)
        shared = [at[x] for x in ("linear_weight", "linear_bias") if x in at]
        if len(arrays) > len(at) or any([dims[i] is not None for i in shared]):
            return None
        for i, d in enumerate(dims):
            if i not in shared:
                arrays[i] = arrays[i].expand(size, *arrays[i].shape) if d is None else arrays[i].movedim(d, 0)
        return call._replace(arrays=tuple(arrays))

    # Warm-up

    def placeholders(
        self, loss: Any, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Takes the shapes of `input`, `linear_weight` and, if rows have several labels, `index`."""
        input, weight = tuple(shapes[0]), tuple(shapes[min(1, len(shapes) - 1)])
        index = tuple(shapes[2]) if len(shapes) > 2 else input[:-1]
        return {
            "input": (dtypes[0], input),
            "linear_weight": (dtypes[0], weight),
            "index": (dtypes[-1] if len(dtypes) > 2 else "int64", index),
            "linear_bias": (dtypes[0], weight[:1]),
            "mask": ("bool", input[:-1]),
            "main_grad": ("float64" if dtypes[0] == "float64" else "float32", weight),
        }

    def trained(self, call: Call) -> Wanted:
        return self.floating(call)


def _settings_of_layer(loss: Any, settings: tuple[Any, ...], dtype: str) -> tuple[Any, Any]:
    """Returns the checked settings of log-probabilities, then those of the layer."""
    by_name = {**dict(zip(loss.setting_names, settings, strict=True)), "skip_ignored": False}
    return checked_settings(loss, settings), linear_checks.settings(loss, by_name, dtype)


LINEAR_LOG_PROBS = LinearLogProbEngine()
