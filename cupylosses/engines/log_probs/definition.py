"""Definition of the log-probabilities of labels under the softmax of logits, and of their entropy.

z_c = softcap tanh(logit_scale x_c / softcap) / temperature, or logit_scale x_c / temperature without a softcap
log p_y = z_y - log sum_c exp(z_c),    H = -sum_c p_c log p_c

The log-probability of one label per row, without an entropy, is a loss of rows of logits: the engine of those computes
it (:class:`OneLabelLogProb`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from cupylosses.definition.base import Definition, Operand
from cupylosses.definition.registry import define_function
from cupylosses.engines.linear_softmax.definition import REDUCED_APART, layer_annotations
from cupylosses.engines.linear_softmax.definition import TEXTS as LAYER_TEXTS
from cupylosses.engines.softmax.definition import IGNORED, SoftmaxLoss, row_annotations

#: Keyword arguments and their defaults.
_COMMON = {
    "temperature": 1.0,
    "softcap": None,
    "logit_scale": 1.0,
    "return_entropy": False,
    "mask": None,
    "ignore_index": IGNORED,
    "check_targets": "lazy",
}


#: Modification, in the key of a definition, of which `OneLabelLogProb` is the result.
ONE_LABEL = "one label"


@dataclass(frozen=True, eq=False, kw_only=True)
class OneLabelLogProb(SoftmaxLoss):
    """The log-probability of each row's only label, as a loss of rows."""

    base: Definition

    @cached_property
    def key(self) -> str:
        return f"{self.base.key}~{ONE_LABEL}"


@dataclass(frozen=True, eq=False, kw_only=True)
class LogProbs(Definition):
    """Log-probabilities of labels. They are not a loss: there is one value per label, and no reduction."""

    packs: ClassVar[bool] = True

    @cached_property
    def of_one_label(self) -> OneLabelLogProb | None:
        """The loss of rows that computes calls with one label per row and without an entropy; None if there is none."""
        found = OneLabelLogProb(
            base=self,
            name=self.name,
            summary=self.summary,
            formula="log p_y",
            operands=self.operands,
            targets=("indices",),
            row="-nll",
            references={"row": lambda xp, nll, rest, smooth, weight: -nll},
            plain={"row": "-nll"},
            affine=True,
            scale="logit_scale",
            reduction="none",
            convention=self.convention,
            source=self.source,
        )
        found.resolve()
        return found

    @property
    def identity(self) -> tuple[Any, ...]:
        return (self.operands,)

    @cached_property
    def common(self) -> Mapping[str, Any]:
        return dict(_COMMON)

    @cached_property
    def array_names(self) -> tuple[str, ...]:
        return (*(x.name for x in self.operands), "mask")

    @cached_property
    def setting_names(self) -> tuple[str, ...]:
        return tuple([x for x in self.common if x not in self.array_names])

    @property
    def annotations(self) -> Mapping[str, str]:
        return row_annotations(self.common)

    @property
    def reserved(self) -> Collection[str]:
        return {*self.common, "self"}

    @property
    def keywords(self) -> tuple[str, ...]:
        return tuple(self.common)

    @property
    def reductions(self) -> tuple[str, ...]:
        return ("none",)

    # ------------------------------------------------------------------------------------------------------------------
    # Documentation

    def describe_operand(self, operand: Operand) -> str:
        return operand.doc

    @property
    def common_texts(self) -> Mapping[str, str]:
        return _TEXTS

    @property
    def symbols(self) -> str:
        first = self.operands[0].name
        return (
            f"with z = logit_scale {first} / temperature, or softcap tanh(logit_scale {first} / softcap) / temperature "
            "with a softcap; p = softmax(z); y an index; H the entropy."
        )

    @property
    def result_text(self) -> str:
        return (
            "The log-probabilities, in the shape of `index`, in float32 (float64 for float64 logits), on the device "
            "and of the library of the first operand. None is above 0. With `return_entropy` a named tuple (log_probs, "
            "entropy); the entropy of each row has the shape of the logits without their last dimension. Masked rows, "
            "rows whose labels are all ignored, and ignored labels have values of 0."
        )

    @property
    def gradient_text(self) -> str:
        return (
            "Log-probabilities and entropy are both differentiable, with respect to every floating operand. "
            f"{self.convention} Where a value is NaN because of the logits, so is its gradient."
        )

    @property
    def errors(self) -> Mapping[str, str]:
        return {
            **super().errors,
            "IndexError": "A label is neither a class nor `ignore_index`; see `check_targets`.",
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearLogProbs(LogProbs):
    """Log-probabilities of labels under the output of a linear layer, computed in chunks of rows."""

    @cached_property
    def of_one_label(self) -> OneLabelLogProb | None:
        return None

    @cached_property
    def common(self) -> Mapping[str, Any]:
        of_layer = {"logits_dtype": None, "accumulate_dtype": None, "max_memory": None, "main_grad": None}
        return {"linear_bias": None, **_COMMON, **of_layer}

    @property
    def annotations(self) -> Mapping[str, str]:
        return layer_annotations(self.common)

    @cached_property
    def array_names(self) -> tuple[str, ...]:
        return ("input", "linear_weight", "index", "linear_bias", "mask", "main_grad")

    @property
    def common_texts(self) -> Mapping[str, str]:
        return {**LAYER_TEXTS, **_TEXTS, "main_grad": _MAIN_GRAD}

    @property
    def symbols(self) -> str:
        logits = "input @ linear_weight.T + linear_bias"
        return f"with the logits {logits}; {super().symbols.removeprefix('with ').replace('input', 'logits')}"


_TEXTS = {
    "temperature": "Divisor of the logits, after scale and softcap. A finite number > 0.",
    "softcap": "Bound of the scaled logits: softcap tanh(logits / softcap) replaces them. A number > 0. "
    "Default None, no bound.",
    "logit_scale": "Factor of the logits. A finite number > 0.",
    "return_entropy": "If True, the entropy of each row is returned too, from the same pass. An `index` of shape "
    "(..., 0) gives entropies alone.",
    "mask": "Bool array that broadcasts to the shape of the rows, True where a row counts. The logits of the others "
    "are not read. Default None, no mask.",
    "ignore_index": "Label that does not count.",
    "check_targets": "When a label that is neither a class nor `ignore_index` raises: 'sync' at once, which waits for "
    "the GPU; 'lazy' at the next call after a kernel has found it; 'off' never. Its log-probability is NaN meanwhile, "
    "with a gradient of 0. On CPU arrays 'lazy' is 'sync'.",
}

_MAIN_GRAD = (
    "Contiguous tensor in the shape of `linear_weight`, of float32 (float64 for float64 operands), to which the matrix "
    "products of backward add the gradient of `linear_weight` instead of allocating it; `linear_weight.grad` stays as "
    f"it is. {REDUCED_APART} For eager backward of torch only. Default None."
)


def define_log_probs(kind: type[LogProbs] = LogProbs, **fields: Any) -> LogProbs:
    """Creates a definition and enters it in the registry, from which the public function is built."""
    return define_function(kind(**fields))
