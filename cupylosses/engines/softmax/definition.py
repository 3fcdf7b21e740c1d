"""Definition of a loss of rows of logits, whose value depends on all classes of a row together.

    z_c = softcap tanh(logit_scale x_c / softcap), or logit_scale x_c without a softcap
    lse = log sum_c exp(z_c),    log p_c = z_c - lse

A :class:`SoftmaxLoss` defines the loss of a row by expressions in these quantities; their derivatives give the
gradients:

    row      for a class index y: a function of nll = -log p_y, rest = 1 - p_y, smooth = -(1 / C) sum_c w_c log p_c and
             the class weight w_y
    term     for dense targets: the summand of class c, a function of log p_c and the target t_c (or log_q_c, the
             log-probability of the teacher), of the class weight w_c and the number of classes C
    penalty  a function of lse, added once per row

This module imports no array library, CUDA or compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cupylosses.definition.base import ANNOTATIONS, COMMON_TEXTS, LEGACY, Definition, Operand, code_of
from cupylosses.definition.expressions import Part, check, names_in
from cupylosses.definition.registry import define as enter

#: Kinds of targets: a class index per row, a probability per class, or the logits of a teacher.
TARGETS = ("indices", "probabilities", "logits")

#: Reductions of rows. A mean divides by the number of active rows, or by the sum of their class weights.
REDUCTIONS = ("none", "mean", "sum", "batchmean")

#: Names that the row may use besides the parameters, by whether the loss has a softmax.
ROW_NAMES = {True: ("nll", "rest", "smooth", "weight"), False: ("nll", "weight")}
#: Names that the term may use besides the parameters, by kind of target.
TERM_NAMES = {"probabilities": ("log_p", "target", "weight", "classes"), "logits": ("log_p", "log_q", "classes")}
#: Names that the penalty may use besides the parameters.
PENALTY_NAMES = ("lse",)

#: Default of ``ignore_index``, as in torch.
IGNORED = -100

#: Moments at which a label out of range raises: at the next call, immediately, or never.
CHECKS = ("lazy", "sync", "off")


def part_of(kind: str) -> str:
    """Returns the name of the expression that evaluates a kind of target."""
    return "row" if kind == "indices" else "term"


#: Types, in stubs, of the arguments of losses of rows.
ROW_ANNOTATIONS: Mapping[str, str] = {
    **ANNOTATIONS,
    "reduction": "_RowReduction",
    "weight": "_Exchangeable | None",
    "alpha": "_Exchangeable | None",
    "ignore_index": "int",
    "class_dim": "int | None",
    "softcap": "float | None",
    "logit_scale": "float",
    "temperature": "float",
    "return_lse": "bool",
    "return_accuracy": "bool",
    "return_entropy": "bool",
    "inplace_backward": "bool",
    "check_targets": "_Check",
}


def row_annotations(common: Mapping[str, Any]) -> Mapping[str, str]:
    """Types, in stubs, of the arguments of a loss of rows with these defaults."""
    integers = {x: "int" for x in ("class_dim",) if common.get(x) is not None}
    return {**ROW_ANNOTATIONS, **integers}


def describe_row_operand(loss: Definition, operand: Operand) -> str:
    """Documentation of an operand of a loss of rows. The first operand has the class dimension."""
    if operand is not loss.operands[0]:
        return operand.doc
    return (
        f"{operand.doc} Shape (N, C), (C,), or any shape with the classes in `class_dim`; floating. Domain: "
        f"{operand.domain_text}."
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class SoftmaxLoss(Definition):
    """A loss of rows of logits, or of log-probabilities.

    Attributes:
        targets: Kinds of the second operand, of :data:`TARGETS`.
        row, term, penalty: Expressions of the loss (see the module); None if it has none.
        references: ``row``, ``term`` and ``penalty`` through the array API, by these names: functions of ``xp`` and, by
            name, of the values that the expressions use.
        softmax: True if the first operand holds logits; otherwise it holds log-probabilities, of which only the label's
            matters.
        weights: Name of the argument for class weights; None if the loss has none.
        mean_of_weights: True if a mean over class indices divides by the sum of the weights of the labels.
        scale: Argument that scales the logits: ``"logit_scale"`` multiplies them, and comes with ``softcap``;
            ``"temperature"`` divides them.
        specialize: Parameter by specialisation of the kernels (``"smoothed"``), which is compiled in if the parameter
            is not 0.
        plain: Cheaper expressions for ``row`` and ``term``, by these names. They apply if all parameters that they do
            not mention are 0, and they omit the penalty.
        limits: Cheaper expressions for ``term``, by a parameter and the value of it for which they apply.
        affine: True if the term is affine in log_p: its sums then need no pass besides that of the softmax. Without a
            softmax, True if the row is affine in the log-probability: its second derivatives are 0.
        balanced: True if the derivatives of the plain term with respect to log_p sum to 0 over the classes.
        reduction, class_dim: Defaults. A ``class_dim`` of None is 1, or 0 for a single row, as in torch.
    """

    targets: tuple[str, ...]
    row: str | None = None
    term: str | None = None
    penalty: str | None = None
    references: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    softmax: bool = True
    weights: str | None = None
    scale: str | None = None
    specialize: Mapping[str, str] = field(default_factory=dict)
    plain: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[tuple[str, float], str] = field(default_factory=dict)
    affine: bool = False
    balanced: bool = False
    reduction: str = "mean"
    class_dim: int | None = None

    def __post_init__(self) -> None:
        if not self.targets or not set(self.targets) <= set(TARGETS):
            raise ValueError(f"{self.name}: `targets` must be some of {TARGETS}, got {self.targets}")
        if ("indices" in self.targets) != (self.row is not None):
            raise ValueError(f"{self.name}: class indices need a `row`, and a `row` class indices")
        if (self.dense is not None) != (self.term is not None):
            raise ValueError(f"{self.name}: a target per class needs a `term`, and a `term` such a target")
        if not self.softmax and (self.term or self.penalty or self.scale):
            raise ValueError(f"{self.name}: `term`, `penalty` and `scale` need a softmax")
        if set(self.references) != set(self.expressions):
            raise ValueError(
                f"{self.name}: `references` must be of {tuple(self.expressions)}, got {tuple(self.references)}"
            )
        for parameter, _ in self.limits:
            if parameter not in [x.name for x in self.parameters]:
                raise ValueError(f"{self.name}: `limits` must be of its parameters, got {parameter!r}")
        super().__post_init__()

    def check_expressions(self) -> None:
        super().check_expressions()
        for part, expression in self.expressions.items():
            names = [*self.sees(part), *(x.name for x in self.options), *self.constants]
            check(expression, names, Part(self.name, part, self.places.get(part)))
        for part, expression in self.plain.items():
            names = [*self.sees(part), *(x.name for x in self.options), *self.constants]
            check(expression, names, Part(self.name, f"plain {part}", self.places.get("plain")))
        for (parameter, value), expression in self.limits.items():
            names = [*self.sees("term"), *(x.name for x in self.options), *self.constants]
            check(expression, names, Part(self.name, f"term at {parameter} = {value:g}", self.places.get("limits")))

    @cached_property
    def left_out(self) -> Mapping[str, frozenset[str]]:
        """Parameters that must be 0 for the plain row, or the plain term, by kind of target."""
        by_kind = {}
        for kind in self.targets:
            mentioned = names_in(self.plain.get(part_of(kind), ""))
            seen = mentioned.union(*[names_in(x) for name, x in self.constants.items() if name in mentioned])
            by_kind[kind] = frozenset(x.name for x in self.parameters if x.name not in seen)
        return by_kind

    def has_plain(self, kind: str) -> bool:
        """True if rows with this kind of target have a plain expression."""
        return part_of(kind) in self.plain

    def limit(self, kind: str, parameters: Mapping[str, float]) -> int:
        """Position, counted from 1, of the first of ``limits`` that applies to a call; 0 if none does."""
        if part_of(kind) == "row":
            return 0
        applies = [parameters[name] == value for name, value in self.limits]
        return 1 + applies.index(True) if any(applies) else 0

    @cached_property
    def expressions(self) -> Mapping[str, str]:
        """Expressions of the loss, by name."""
        parts = {"row": self.row, "term": self.term, "penalty": self.penalty}
        return {name: x for name, x in parts.items() if x is not None}

    @cached_property
    def dense(self) -> str | None:
        """Kind of the dense targets; None if the loss takes none."""
        return next((x for x in self.targets if x != "indices"), None)

    def sees(self, part: str) -> tuple[str, ...]:
        """Names that an expression may use besides parameters, flags and constants."""
        if part == "row":
            return ROW_NAMES[self.softmax]
        return PENALTY_NAMES if part == "penalty" else TERM_NAMES[str(self.dense)]

    @cached_property
    def only_of_indices(self) -> tuple[str, ...]:
        """Parameters without a meaning for dense targets."""
        if self.row is None or self.term is None:
            return ()
        dense_names = names_in(" ".join([self.term, self.penalty or "", *self.constants.values()]))
        return tuple(x.name for x in self.parameters if x.name not in dense_names)

    @property
    def identity(self) -> tuple[Any, ...]:
        formulas = tuple([(name, code_of(x)) for name, x in self.references.items()])
        fields = (self.operands, self.targets, self.expressions, self.constants, self.parameters, self.flags)
        return (
            *fields,
            self.affine,
            self.balanced,
            *self.plain.items(),
            *self.limits.items(),
            self.softmax,
            self.weights,
            self.mean_of_weights,
            self.scale,
            formulas,
        )

    @cached_property
    def array_names(self) -> tuple[str, ...]:
        return (*(x.name for x in self.operands), self.weights or "None", "mask", "normalizer")

    @cached_property
    def setting_names(self) -> tuple[str, ...]:
        return (*(x.name for x in self.options), *(x for x in self.common if x not in self.array_names))

    @cached_property
    def common(self) -> Mapping[str, Any]:
        defaults: dict[str, Any] = {self.weights: None} if self.weights else {}
        if self.row:
            defaults["ignore_index"] = IGNORED
        defaults |= {"reduction": self.reduction, "class_dim": self.class_dim}
        if self.scale == "logit_scale":
            defaults |= {"softcap": None, "logit_scale": 1.0}
        elif self.scale:
            defaults[self.scale] = 1.0
        defaults |= {"mask": None, "normalizer": None, "out_dtype": None}
        if self.softmax and self.row:
            defaults |= {"return_lse": False, "return_accuracy": False}
        if self.softmax:
            defaults["inplace_backward"] = False
        if self.row:
            defaults["check_targets"] = "lazy"
        return defaults

    @property
    def annotations(self) -> Mapping[str, str]:
        return row_annotations(self.common)

    @property
    def reserved(self) -> Collection[str]:
        return {*self.common, *LEGACY, *ROW_NAMES[True], *PENALTY_NAMES, "self"} - {"target"}

    @property
    def keywords(self) -> tuple[str, ...]:
        return self.keyword_only

    @property
    def reductions(self) -> tuple[str, ...]:
        return REDUCTIONS

    # ------------------------------------------------------------------------------------------------------------------
    # Documentation

    def describe_operand(self, operand: Operand) -> str:
        return describe_row_operand(self, operand)

    @property
    def common_texts(self) -> Mapping[str, str]:
        default = " Default None: 1, or 0 for a single row." if self.class_dim is None else ""
        texts = _COMMON_TEXTS | {"class_dim": f"Dimension of the classes, from either end.{default}"}
        if self.weights:
            letter = "w" if self.weights == "weight" else self.weights
            gradient = "differentiable for class probabilities only" if self.dense else "without a gradient"
            texts[self.weights] = (
                f"Weight {letter}_c of each class, floating, of shape (C,), {gradient}. A product with a weight of 0 "
                "is 0, even if the other factor is infinite or NaN. Default None, no weights."
            )
        return texts

    @property
    def symbols(self) -> str:
        first = self.operands[0].name
        scaled = f"logit_scale {first}" if self.scale == "logit_scale" else f"{first} / temperature"
        capped = f", or softcap tanh({scaled} / softcap) with a softcap" if "softcap" in self.common else ""
        meanings = [f"z = {scaled}{capped}"] if self.scale else []
        meanings += ["p = softmax(z)"] if self.softmax else []
        meanings += ["lse = log sum_c exp z_c"] if self.penalty else []
        if self.dense == "logits":
            meanings.append(f"q = softmax({self.operands[1].name} / temperature)")
        meanings += ["y the label"] if self.row else []
        if self.dense == "probabilities":
            meanings.append("t the target probabilities")
        if self.weights:
            letter = "w" if self.weights == "weight" else self.weights
            meanings.append(f"{letter}_c the class weights, 1 by default")
        meanings += ["C the number of classes"] if self.softmax and self.row else []
        return f"with {'; '.join(meanings)}."

    @property
    def result_text(self) -> str:
        counted = "number of rows that count"
        if self.mean_of_weights:
            counted = "sum of the weights of the labels of the rows that count"
            if self.dense:
                counted += " (for probabilities, by the number of these rows)"
        more = (
            " With `return_lse` or `return_accuracy` a named tuple (loss, lse, accuracy), with None for what was not "
            "asked for: `lse` has the shape of the rows, and is 0 for rows that do not count; `accuracy` is one number."
            if "return_lse" in self.common
            else ""
        )
        return (
            "With reduction 'none' one value per row, in the shape of the rows; otherwise an array without dimensions. "
            f"'mean' divides the sum by the {counted}, 'batchmean' by the size of the first dimension of "
            "the rows. A mean of nothing is NaN, with gradients of 0. The result belongs to the library and the device "
            "of the first operand, and has the promoted dtype of the operands (float32 under autocast) unless "
            f"`out_dtype` is given.{more}"
        )

    @property
    def gradient_text(self) -> str:
        return (
            f"Every floating operand is differentiable. {self.convention} Where the loss of a row is NaN, so is its "
            "gradient."
        )

    @property
    def errors(self) -> Mapping[str, str]:
        errors = dict(super().errors)
        if self.row:
            errors["IndexError"] = "A label is neither a class nor `ignore_index`; see `check_targets`."
        return errors

    @property
    def example_operands(self) -> Mapping[str, Any]:
        first, second = self.operands
        domain = second.domain_for(self.values())
        samples = _SAMPLES["real" if self.softmax else "log_probability"]
        targets = _SAMPLES["indices" if self.row else f"{domain}_target"]
        return {first.name: samples, second.name: targets}


#: Rows of documented examples: first operands by domain, and targets.
_SAMPLES: Mapping[str, Any] = {
    "real": ((2.0, 0.5, -1.0), (0.0, 1.5, 0.5)),
    "log_probability": ((-0.3567, -1.6094, -2.3026), (-0.6931, -1.3863, -1.3863)),
    "indices": (0, 2),
    "real_target": ((1.0, 1.0, -1.0), (0.5, 1.0, 0.0)),
    "probability_target": ((0.7, 0.2, 0.1), (0.5, 0.25, 0.25)),
}

#: Documentation of arguments that losses of rows share; each loss has some of them.
_COMMON_TEXTS = COMMON_TEXTS | {
    "ignore_index": "Label of rows that do not count. Their logits are not read, and their gradients are 0.",
    "softcap": "Bound of the scaled logits: softcap tanh(logits / softcap) replaces them. A number > 0. "
    "Default None, no bound.",
    "logit_scale": "Factor of the logits. A finite number > 0.",
    "temperature": "Divisor of the logits. A finite number > 0.",
    "mask": "Bool array that broadcasts to the shape of the rows, True where a row counts. The logits of the others "
    "are not read, their gradients are 0, and a mean does not count them. Default None, no mask.",
    "return_lse": "If True, the log-partition function lse of each row is returned too, without a gradient.",
    "return_accuracy": "If True, the accuracy is returned too: the share of the rows that count in which no logit is "
    "larger than the label's.",
    "inplace_backward": "If True, backward may overwrite the logits with their gradient; they must not be used "
    "afterwards. Autograd raises if another operation, such as `tanh`, has saved them for its own backward. CPU arrays "
    "are never overwritten.",
    "check_targets": "When a label that is neither a class nor `ignore_index` raises: 'sync' at once, which waits for "
    "the GPU; 'lazy' at the next call after a kernel has found it; 'off' never. The loss is NaN meanwhile, and the "
    "gradient of the row 0. On CPU arrays 'lazy' is 'sync'.",
}


def define_softmax(**fields: Any) -> SoftmaxLoss:
    """Creates a :class:`SoftmaxLoss` and registers it; the public functions are built from the registry."""
    return enter(SoftmaxLoss(**fields))
