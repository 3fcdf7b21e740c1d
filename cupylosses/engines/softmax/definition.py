"""What a loss of rows of logits is: a definition whose value belongs to all classes of a row together.

    z_c = softcap tanh(logit_scale x_c / softcap)    or logit_scale x_c without a softcap
    lse = log sum_c exp(z_c),    log p_c = z_c - lse

A :class:`RowLoss` says what a row costs by expressions of these, from which value and gradients follow:

    row      of a class index y: a function of nll = -log p_y, rest = 1 - p_y, smooth = -(1 / C) sum_c w_c log p_c and
             the class weight w_y
    term     of a target per class: what a class adds to the sum, a function of log p_c and the target t_c (or log_q_c,
             the log-probability of the teacher), of the class weight w_c and the number of classes C
    penalty  a function of lse, added once per row

Nothing here imports an array library, CUDA or a compiler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cupylosses.definition.base import LEGACY, Definition, code_of
from cupylosses.definition.expressions import Part, check

#: What a target can be: a class index per row, a probability per class, or logits of a teacher.
TARGETS = ("indices", "probabilities", "logits")

#: Reductions of rows. A mean divides by the rows that count, or by the sum of their class weights.
REDUCTIONS = ("none", "mean", "sum", "batchmean")

#: What the expressions see beside the parameters: of losses with a softmax, and of others.
ROW_NAMES = {True: ("nll", "rest", "smooth", "weight"), False: ("nll", "weight")}
TERM_NAMES = {"probabilities": ("log_p", "target", "weight", "classes"), "logits": ("log_p", "log_q", "classes")}
PENALTY_NAMES = ("lse",)

#: The label that does not count unless a call says otherwise, as in torch.
IGNORED = -100

#: When a label that is no class raises: now, at the next call, or never.
CHECKS = ("lazy", "sync", "off")


@dataclass(frozen=True, eq=False, kw_only=True)
class RowLoss(Definition):
    """A loss of rows of logits, or of log-probabilities.

    ``targets``      what the second operand may be, of :data:`TARGETS`.
    ``references``   the same as ``row``, ``term`` and ``penalty``, by these names, through the array API: functions of
                     ``xp`` and, by name, of what the expressions see.
    ``softmax``      whether the first operand holds logits; log-probabilities otherwise, of which only that of the
                     label counts.
    ``weights``      the name of the argument with the class weights; None if the loss has none.
    ``mean_of_weights``  whether a mean over class indices divides by the sum of the weights of the labels.
    ``scale``        the argument that scales the logits: ``"logit_scale"`` multiplies, and comes with ``softcap``;
                     ``"temperature"`` divides.
    ``reduction``, ``class_dim``  the defaults. A ``class_dim`` of None is 1, or 0 of a single row, as in torch.
    """

    targets: tuple[str, ...]
    row: str | None = None
    term: str | None = None
    penalty: str | None = None
    references: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    softmax: bool = True
    weights: str | None = None
    scale: str | None = None
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
        super().__post_init__()

    def check_expressions(self) -> None:
        super().check_expressions()
        for part, expression in self.expressions.items():
            names = [*self.sees(part), *(x.name for x in self.options), *self.constants]
            check(expression, names, Part(self.name, part, self.places.get(part)))

    @cached_property
    def expressions(self) -> Mapping[str, str]:
        """Those that the loss has, by name."""
        found = {"row": self.row, "term": self.term, "penalty": self.penalty}
        return {name: x for name, x in found.items() if x is not None}

    @cached_property
    def dense(self) -> str | None:
        """What a target per class holds; None if the loss takes none."""
        return next((x for x in self.targets if x != "indices"), None)

    def sees(self, part: str) -> tuple[str, ...]:
        """The names that an expression sees beside parameters, flags and constants."""
        if part == "row":
            return ROW_NAMES[self.softmax]
        return PENALTY_NAMES if part == "penalty" else TERM_NAMES[str(self.dense)]

    @cached_property
    def only_of_indices(self) -> tuple[str, ...]:
        """Parameters without a meaning for a target per class."""
        if self.row is None or self.term is None:
            return ()
        rest = " ".join([self.term, self.penalty or "", *self.constants.values()])
        return tuple(x.name for x in self.parameters if x.name not in re.findall(r"\w+", rest))

    @property
    def shipped(self) -> bool:
        return _registry.get(self.name) is self

    @property
    def identity(self) -> tuple[Any, ...]:
        formulas = tuple([(name, code_of(x)) for name, x in self.references.items()])
        own = (self.operands, self.targets, self.expressions, self.constants, self.parameters, self.flags)
        return (*own, self.softmax, self.weights, self.mean_of_weights, self.scale, formulas)

    @cached_property
    def common(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {self.weights: None} if self.weights else {}
        if self.row:
            found["ignore_index"] = IGNORED
        found |= {"reduction": self.reduction, "class_dim": self.class_dim}
        if self.scale == "logit_scale":
            found |= {"softcap": None, "logit_scale": 1.0}
        elif self.scale:
            found[self.scale] = 1.0
        found |= {"mask": None, "normalizer": None, "out_dtype": None}
        if self.softmax and self.row:
            found |= {"return_lse": False, "return_accuracy": False}
        if self.softmax:
            found["inplace_backward"] = False
        if self.row:
            found["check_targets"] = "lazy"
        return found

    @property
    def reserved(self) -> Collection[str]:
        return {*self.common, *LEGACY, *ROW_NAMES[True], *PENALTY_NAMES, "self"} - {"target"}

    @property
    def keywords(self) -> tuple[str, ...]:
        names = [x for x, _ in self.arguments]
        return tuple(names[names.index("*") + 1 :])

    @property
    def reductions(self) -> tuple[str, ...]:
        return REDUCTIONS


_registry: dict[str, RowLoss] = {}


def define_row(**fields: Any) -> RowLoss:
    """Make a :class:`RowLoss` and enter it in the registry, from which the public functions are built."""
    loss = RowLoss(**fields)
    if loss.name in _registry:
        raise ValueError(f"a loss named {loss.name!r} is defined already")
    _registry[loss.name] = loss
    return loss


def row_registry() -> Mapping[str, RowLoss]:
    """Every defined loss of rows by name, in the order of definition."""
    return _registry
