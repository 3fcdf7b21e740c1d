"""Definition of a loss of unaligned sequences: connectionist temporal classification (CTC).

    L_n = -log sum over alignments of the target to T_n frames of prod_t p[t, n, c_t]

An alignment names a class for every frame; repeats are collapsed, then blanks dropped, to give the target. The first
operand holds log p, or logits, to which the loss applies the log-softmax itself.

Nothing here imports an array library, CUDA or a compiler.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from cupylosses.definition.base import ANNOTATIONS, COMMON_TEXTS, PER_CALL, Definition, Operand
from cupylosses.definition.registry import define as enter

#: Accepted values of ``reduction``.
REDUCTIONS = ("none", "mean", "sum", "batchmean")

#: Times at which labels that are not a class, and lengths out of range, raise.
CHECKS = ("lazy", "sync", "off")

#: Conventions of the gradient with respect to log-probabilities.
GRADIENTS = ("log_probs", "logits")


#: Types of the arguments in stubs.
_ANNOTATIONS: Mapping[str, str] = {
    **ANNOTATIONS,
    "input_lengths": "_Exchangeable | Sequence[int] | int | None",
    "target_lengths": "_Exchangeable | Sequence[int] | int | None",
    "blank": "int",
    "reduction": "_SequenceReduction",
    "zero_infinity": "bool",
    "batch_first": "bool",
    "gradient": 'Literal["log_probs", "logits"]',
    "of": 'Literal["classes", "positions"]',
    "inplace_backward": "bool",
    "check_targets": "_Check",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class SequenceLoss(Definition):
    """A CTC loss. ``logits`` is True if the first operand holds logits instead of log-probabilities."""

    logits: bool = False

    #: Array arguments that follow the operands.
    EXTRA: ClassVar[tuple[str, ...]] = ("weight", "mask", "normalizer")

    @property
    def identity(self) -> tuple[Any, ...]:
        return (self.operands, self.logits)

    @cached_property
    def common(self) -> Mapping[str, Any]:
        first = {"blank": 0, "reduction": "mean", "zero_infinity": False, "batch_first": False}
        gradient_options = {"inplace_backward": False} if self.logits else {"gradient": "log_probs"}
        return {**first, "weight": None, "mask": None, "normalizer": None, "out_dtype": None, **gradient_options,
                "check_targets": "lazy"}  # fmt: skip

    @cached_property
    def array_names(self) -> tuple[str, ...]:
        return (*(x.name for x in self.operands), *self.EXTRA)

    @cached_property
    def setting_names(self) -> tuple[str, ...]:
        return tuple([x for x in self.common if x not in self.EXTRA])

    @property
    def annotations(self) -> Mapping[str, str]:
        return _ANNOTATIONS

    @property
    def reserved(self) -> Collection[str]:
        return {*self.common, "self"}

    @cached_property
    def kept(self) -> dict[str, Any]:
        stored = ["blank", "reduction", "zero_infinity", *(["batch_first"] if self.logits else [])]
        return {x: self.common[x] for x in stored}

    @property
    def keywords(self) -> tuple[str, ...]:
        return tuple([x for x in self.common if x not in self.kept or x in PER_CALL])

    @property
    def reductions(self) -> tuple[str, ...]:
        return REDUCTIONS

    # ------------------------------------------------------------------------------------------------------------------
    # Documentation

    def describe_operand(self, operand: Operand) -> str:
        return operand.doc

    @property
    def common_texts(self) -> Mapping[str, str]:
        return _TEXTS

    @property
    def symbols(self) -> str:
        of = "softmax of `input`" if self.logits else "exponential of `log_probs`"
        return (
            f"with p the {of}; the sum is over all sequences c_1 ... c_T of classes that give the target when repeats "
            "are collapsed and then blanks dropped."
        )

    @property
    def result_text(self) -> str:
        return (
            "With 'none' one value per sample, of shape (N,), or () for one sample without that dimension; otherwise "
            "an array without dimensions. 'mean' divides the loss of each sample by its number of labels, at least 1, "
            "and the sum by the number of samples that the mask keeps; 'batchmean' divides the sum by N; no mean "
            "divides by weights. A mean of nothing is NaN, with gradients of 0. Sums over frames and samples are "
            "computed in float64. The result belongs to the library and the device of the first operand, and has its "
            "dtype unless `out_dtype` is given."
        )

    @property
    def gradient_text(self) -> str:
        return f"The first operand is differentiable. {self.convention}"

    @property
    def errors(self) -> Mapping[str, str]:
        return {
            **super().errors,
            "ValueError": "Shapes do not fit, arrays are on different devices, an option is out of range, or a length "
            "is; see `check_targets` for lengths on a GPU.",
            "IndexError": "A label is no class, or is the blank; see `check_targets`.",
        }

    @property
    def example_operands(self) -> Mapping[str, Any]:
        first, *others = [x.name for x in self.operands]
        rows = (
            (((0.5, -1.0, 1.5),), ((1.0, 2.0, 0.0),)) if self.logits else (((-0.7, -1.4, -1.4),), ((-1.4, -0.7, -1.4),))
        )
        return {first: rows, **dict(zip(others, (((1,),), (2,), (1,)), strict=True))}


_TEXTS = COMMON_TEXTS | {
    "blank": "Class of the blank, 0 to C - 1.",
    "zero_infinity": "If True, samples whose target has no alignment have loss 0 instead of inf. Their gradient is 0 "
    "either way.",
    "batch_first": "If True, the first operand has shape (N, T, C).",
    "weight": "Factor of each sample's loss, a constant that broadcasts to (N,). A sample of weight 0 is not read, and "
    "its loss and gradient are 0. Default None, no weights.",
    "mask": "Bool array that broadcasts to (N,), True where a sample counts. The others are not read, their losses and "
    "gradients are 0, and 'mean' does not count them. Default None, no mask.",
    "normalizer": "Number, or array of one number without a gradient, in the place of whatever a mean divides by, "
    "numbers of labels included: the result is the sum of the losses over `normalizer`. Default None.",
    "gradient": "'log_probs' for the gradient with respect to `log_probs`; 'logits' for the one that "
    "``torch.nn.functional.ctc_loss`` returns, that with respect to the logits of a log-softmax: exp(log_probs) is "
    "added in frames that count. The latter has no second derivatives, forward mode or vmap.",
    "inplace_backward": "If True, backward may write the gradient over `input`, for which a second backward raises.",
    "check_targets": "When labels that are no class, and lengths out of range, raise: 'sync' at once, which waits for "
    "the GPU; 'lazy' at the next call after a kernel has found one; 'off' never. The loss of the sample is NaN "
    "meanwhile, with a gradient of 0. What the host knows is checked at once.",
}


def define_sequence(**fields: Any) -> SequenceLoss:
    """Makes a :class:`SequenceLoss` and enters it in the registry, from which the public functions are built."""
    return enter(SequenceLoss(**fields))
