"""Definition of a linear softmax loss: a softmax loss of the logits ``input @ linear_weight.T + linear_bias``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from cupylosses.definition.base import Definition, Operand
from cupylosses.definition.registry import define as enter
from cupylosses.engines.softmax.definition import IGNORED, SoftmaxLoss, row_annotations

#: Arguments of the softmax loss that a linear one lacks: no caller sees its logits, and their classes are last.
_LEFT_OUT = ("class_dim", "inplace_backward")

_OWN = {
    "logits_dtype": None,
    "accumulate_dtype": None,
    "max_memory": None,
    "skip_ignored": False,
    "token_weight": None,
    "main_grad": None,
    "options": None,
}

#: Arguments that are arrays. The bias is an optional operand.
_ARRAYS = (
    "input",
    "linear_weight",
    "target",
    "linear_bias",
    "weight",
    "mask",
    "token_weight",
    "main_grad",
    "normalizer",
)


#: Types, in stubs, of the arguments of losses with a linear layer and of their Modules' constructors.
LAYER_ANNOTATIONS: Mapping[str, str] = {
    "linear_bias": "_Exchangeable | None",
    "ignore_index": "int | None",
    "logits_dtype": "Any",
    "accumulate_dtype": "Any",
    "max_memory": "int | None",
    "skip_ignored": "bool",
    "token_weight": "_Exchangeable | None",
    "main_grad": "_Exchangeable | None",
    "options": "Any",
    "in_features": "int",
    "num_classes": "int",
    "out_features": "tuple[int, ...]",
    "bias": "bool",
    "device": "Any",
    "dtype": "Any",
}


def layer_annotations(common: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the types, in stubs, of the arguments of a linear layer's loss. ``common`` has their defaults."""
    integers = {x: "int" for x in ("ignore_index",) if common.get(x) is not None}
    return {**row_annotations(common), **LAYER_ANNOTATIONS, **integers}


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearSoftmaxLoss(Definition):
    """A softmax loss of the logits of a linear layer, which are computed in chunks of rows.

    ``of_logits`` is the softmax loss. This loss has the same parameters, flags and reductions.
    """

    of_logits: SoftmaxLoss = field()
    layer: ClassVar[Mapping[str, Any]] = {
        "in_features": ...,
        "num_classes": ...,
        "out_features": (),
        "bias": False,
        "device": None,
        "dtype": None,
    }

    @cached_property
    def inner(self) -> SoftmaxLoss:
        """The softmax loss under the name of this loss, for error messages."""
        return replace(self.of_logits, name=self.name)

    def resolve(self) -> None:
        super().resolve()
        self.inner.resolve()

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.of_logits.identity

    @cached_property
    def array_names(self) -> tuple[str, ...]:
        return _ARRAYS

    @cached_property
    def setting_names(self) -> tuple[str, ...]:
        return (*(x.name for x in self.options), *(x for x in self.common if x not in _ARRAYS))

    @cached_property
    def common(self) -> Mapping[str, Any]:
        common = {name: x for name, x in self.of_logits.common.items() if name not in _LEFT_OUT}
        common["ignore_index"] = None
        return {"linear_bias": None} | common | _OWN

    @property
    def annotations(self) -> Mapping[str, str]:
        return layer_annotations(self.common)

    @property
    def reserved(self) -> Collection[str]:
        return {*self.of_logits.reserved, *_OWN}

    @property
    def called_with(self) -> list[str]:
        return ["input", "target"]

    @property
    def keywords(self) -> tuple[str, ...]:
        return tuple([x for x in self.keyword_only if x != "linear_bias"])

    @cached_property
    def kept(self) -> dict[str, Any]:
        return {name: x for name, x in super().kept.items() if name not in ("linear_bias", "token_weight", "main_grad")}

    @property
    def reductions(self) -> tuple[str, ...]:
        return self.of_logits.reductions

    # ------------------------------------------------------------------------------------------------------------------
    # Documentation

    def describe_operand(self, operand: Operand) -> str:
        return operand.doc

    @property
    def common_texts(self) -> Mapping[str, str]:
        return {**self.of_logits.common_texts, **TEXTS}

    @property
    def symbols(self) -> str:
        return (
            f"{self.of_logits.symbols[:-1]}; and the logits input @ linear_weight.T + linear_bias instead of `input`."
        )

    @property
    def result_text(self) -> str:
        return self.of_logits.result_text

    @property
    def gradient_text(self) -> str:
        return (
            "`input`, `linear_weight`, `linear_bias` and class probabilities are differentiable; a product of matrices "
            f"is computed only for those that require a gradient. {self.convention} Where the loss of a row is NaN, so "
            "is its gradient."
        )

    @property
    def errors(self) -> Mapping[str, str]:
        return self.of_logits.errors

    @property
    def example_operands(self) -> Mapping[str, Any]:
        return {
            "input": ((1.0, 0.5), (0.0, -1.0)),
            "linear_weight": ((2.0, 0.0), (0.5, 1.0), (-1.0, 0.5)),
            "target": (0, 2),
        }


#: Part of the text on `main_grad` that linear losses and linear log-probabilities share.
REDUCED_APART = (
    "DistributedDataParallel does not reduce it: leave the weight out with "
    "`_set_params_and_buffers_to_ignore_for_model`, and reduce `main_grad` after backward."
)

#: Texts on the arguments of losses with a linear layer.
TEXTS = {
    "in_features": "Features of the input, D.",
    "num_classes": "Number of classes, C.",
    "out_features": "Sizes d_1, ..., d_K of a K-dimensional loss.",
    "bias": "If True, the layer has a bias.",
    "device": "Device of the layer's parameters. Default None, torch's default.",
    "dtype": "Dtype of the layer's parameters. Default None, torch's default.",
    "linear_bias": "Bias of the layer, of shape (C,), in the dtype of `input`. Default None, no bias.",
    "ignore_index": f"Label of rows that do not count; None is {IGNORED}. Their gradients are 0.",
    "logits_dtype": "Dtype of the logits: None for that of `input`, or 'float32' for logits of half or bfloat16 "
    "operands that are not rounded, which takes twice the memory and a few percent of time. Default None.",
    "accumulate_dtype": "Dtype in which chunks add up the gradient of `linear_weight`: 'float32', which takes a buffer "
    "of that dtype, or that of the weight, which is rounded once per chunk. Default None: that of the weight for up to "
    "four chunks, float32 for more.",
    "max_memory": "Bytes that a chunk of logits may take; a chunk has one row at least. Less memory means more chunks, "
    "and products of fewer than some 2000 rows are slower. With room for all logits, they are kept for backward where "
    "there is no reduction. Default None: the size of the weight, at least 256 MiB.",
    "skip_ignored": "If True, rows that do not count are left out of the matrix products too. Their number is read by "
    "the host, which waits for the GPU.",
    "token_weight": "Weight of each row, floating, which broadcasts to the shape of the rows: a factor of its loss, "
    "without a gradient of its own. A mean divides by the sum of the weights of the rows that count, times their class "
    "weights if there are any. Forward then reads the logits of a chunk twice. Default None, weights of 1.",
    "main_grad": "Contiguous tensor in the shape of `linear_weight`, of float32 (float64 for float64 operands), to "
    "which backward adds the gradient of `linear_weight`, not rounded to 16 bits; `linear_weight.grad` stays as it is. "
    "A buffer of that size, in `accumulate_dtype` or that of `main_grad`, holds the gradient from forward to backward, "
    "which takes one pass over both. "
    f"{REDUCED_APART} For eager backward of torch only. Default None.",
    "options": "Accepted for torch's signature. Its chunking is replaced by that of `max_memory`.",
}


def define_linear(of_logits: SoftmaxLoss, **fields: Any) -> LinearSoftmaxLoss:
    """Defines the linear form of a softmax loss and enters it in the registry."""
    defaults: dict[str, Any] = {
        "parameters": of_logits.parameters,
        "flags": of_logits.flags,
        "convention": of_logits.convention,
        "cases": of_logits.cases,
        "mean_of_weights": of_logits.mean_of_weights,
        "positional": "input linear_weight target",
    }
    return enter(LinearSoftmaxLoss(of_logits=of_logits, **(defaults | fields)))
