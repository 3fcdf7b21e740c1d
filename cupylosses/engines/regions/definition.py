"""Definition of a region loss: a formula of the overlap of predicted and true regions, one region per class.

    p = softmax(input), sigmoid(input) or input        t = [target = c], or dense targets (a value per class)
    I = sum p t      FP = sum p (1 - t)      FN = sum (1 - p) t          over the voxels of each sample and class
    S = (I + smooth_nr) / max(I + alpha FP + beta FN + smooth_dr, floor)
    L = (offset - S)^gamma                             for each group of cells (sample, class), then averaged

Samples or classes may be pooled into groups first. All region losses of segmentation libraries are this formula with
different settings, which presets name. A :class:`RegionLoss` fixes some of the settings. It may add a voxel loss, an
expression that is evaluated for every voxel during the same two reads of the input:

    row      for a label y under a softmax: a function of nll = -log p_y, rest = 1 - p_y, smooth = -(1 / C) sum_c w_c
             log p_c and the class weight w_y
    term     for dense targets under a softmax: the summand of class c, a function of log p_c, t_c, w_c and C
    element  for each class separately, under a sigmoid: a function of the logit, t_c and w_c

Nothing here imports an array library, CUDA or a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from cupylosses.definition.base import (
    ANNOTATIONS,
    COMMON_TEXTS,
    LEGACY,
    Definition,
    Flag,
    Operand,
    Parameter,
    code_of,
    one_of,
)
from cupylosses.definition.expressions import Part, check
from cupylosses.definition.registry import define as enter

#: Reductions of the losses of groups. Losses with a voxel loss only have 'mean'.
REDUCTIONS = ("none", "mean", "sum")

#: Default of ``ignore_index``, as in torch.
IGNORED = -100

#: Parameters of the formula, in the order of kernel arguments.
PARAMETERS: Mapping[str, Parameter] = {
    x.name: x
    for x in (
        Parameter("alpha", 0.5, "Weight of false positives in the denominator.", minimum=0.0),
        Parameter("beta", 0.5, "Weight of false negatives in the denominator.", minimum=0.0),
        Parameter(
            "smooth_nr",
            0.0,
            "Added to the numerator of the score S. A constant that a library adds to 2 I is twice this one.",
            minimum=0.0,
        ),
        Parameter(
            "smooth_dr",
            0.0,
            "Added to the denominator of S. A constant that a library adds to sum p + sum t is twice this one.",
            minimum=0.0,
        ),
        Parameter(
            "floor",
            0.0,
            "Lower bound of the denominator. Below it the denominator is a constant, with derivatives 0.",
            minimum=0.0,
        ),
        Parameter(
            "gamma",
            1.0,
            "Exponent of the loss. Below 1 it makes regions that overlap well count more, and at a loss of 0 its "
            "gradient is 0.",
            minimum=0.0,
            exclusive=True,
        ),
        Parameter(
            "log_floor",
            1e-7,
            "Lower bound of S under the logarithm of `log_loss`, below which the gradient is 0.",
            minimum=0.0,
            exclusive=True,
        ),
        Parameter("offset", 1.0, "Number that S is subtracted from: 1, or 0 for the loss -S."),
    )
}

#: Options of the formula.
FLAGS: Mapping[str, Flag] = {
    x.name: x
    for x in (
        Flag(
            "activation",
            "softmax",
            "Function of `input` that gives probabilities; 'none' if it holds them already.",
            ("softmax", "sigmoid", "none"),
        ),
        Flag(
            "pool",
            "none",
            "Cells whose overlap is summed before the score is taken: 'none' has a group per sample and class, 'batch' "
            "one per class over all samples, 'class' one per sample over all classes, 'both' a single one.",
            ("none", "batch", "class", "both"),
        ),
        Flag(
            "overlap",
            "product",
            "Overlap of p and t. 'product': I = sum p t, FP = sum p (1 - t), FN = sum (1 - p) t. 'min': I = "
            "sum min(p, t), FP = sum max(p - t, 0), FN = sum max(t - p, 0), which is 0 loss for soft targets that are "
            "met; equal ones share the derivative. 'squared': FP = sum p (p - t), FN = sum t (t - p), so that dice has "
            "(sum p^2 + sum t^2) / 2 for denominator.",
            ("product", "min", "squared"),
        ),
        Flag(
            "gamma_over",
            "group",
            "Base of the exponent `gamma`: the loss of each 'group', or their 'mean'.",
            ("group", "mean"),
        ),
        Flag("log_loss", False, "If True, the loss of a group is -log max(S, log_floor) instead of offset - S."),
        Flag(
            "absent",
            "skip",
            "Groups without a true voxel. 'skip': neither in the sum nor in its divisor. 'zero': their loss is 0, and "
            "counts. 'keep': the formula, in which smoothing decides.",
            ("skip", "zero", "keep"),
        ),
        Flag(
            "weight_in",
            "loss",
            "Place of `class_weight`: the 'loss' of a class's group; or the 'score', in which I, FP and FN of each "
            "class are multiplied before classes are pooled.",
            ("loss", "score"),
        ),
        Flag(
            "weighting",
            "uniform",
            "Weights of classes that are pooled, by the number T of true voxels: 'square' 1 / T^2, 'simple' 1 / T, "
            "'uniform' none. A class with T = 0 has the largest weight among the others of its group. Weights have no "
            "gradient.",
            ("uniform", "simple", "square"),
        ),
        Flag(
            "mean_of_weights",
            False,
            "If True, a mean divides by the sum of the class weights of the groups in it, not by their number.",
        ),
        Flag(
            "average",
            "groups",
            "Order of a mean: over all 'groups' at once; or over those of each sample, then over the 'samples' that "
            "have a group.",
            ("groups", "samples"),
        ),
        Flag("include_background", True, "If False, class 0 has no region; it stays in the softmax."),
    )
}


#: Types of the arguments in stubs.
_ANNOTATIONS: Mapping[str, str] = {
    **ANNOTATIONS,
    "preset": "str | None",
    "empty": "float | None",
    "class_weight": "_Exchangeable | None",
    "weight": "_Exchangeable | None",
    "ignore_index": "int",
    "class_dim": "int",
    "check_targets": "_Check",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class RegionLoss(Definition):
    """A loss of the overlap of regions, optionally with a voxel loss.

    ``fixed``       values of those :data:`PARAMETERS` that are not arguments of this loss.
    ``presets``     settings of libraries and papers, by name.
    ``row``, ``term``, ``element``  expressions of the voxel loss (see above); None without one.
    ``chosen_by``   the flag whose value, "softmax" or "sigmoid", selects the expression.
    ``share``       the parameters that multiply the region loss and the voxel loss.
    ``smoothing``   the label smoothing parameter, for which kernels compute ``smooth``. It must be 0 with ``element``.
    ``references``  ``row``, ``term``, ``element`` in the array API: functions of ``xp`` and, by keyword, of the names
                    that the expressions use.
    ``of_weights``  True if the mean over voxels divides by the sum of the weights of their labels.
    ``tentative``   condition on the parameters under which ``element`` is evaluated tentatively first (``kTentative``
                    in ``kernels/core/dual.cuh``). If the sum of a voxel's losses over its classes is not finite, all
                    its classes are evaluated again.
    """

    fixed: Mapping[str, float] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    row: str | None = None
    term: str | None = None
    element: str | None = None
    chosen_by: str = "activation"
    share: tuple[str, ...] = ()
    smoothing: str = ""
    references: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    of_weights: bool = False
    tentative: str = ""

    #: Names available to each expression, besides parameters and constants.
    SEES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "row": ("nll", "rest", "smooth", "weight"),
        "term": ("log_p", "target", "weight", "classes"),
        "element": ("input", "target", "weight"),
    }

    def __post_init__(self) -> None:
        if set(self.references) != set(self.expressions):
            raise ValueError(
                f"{self.name}: `references` must be of {tuple(self.expressions)}, got {tuple(self.references)}"
            )
        names = {*(x.name for x in self.options), "empty"}
        for preset, settings in self.presets.items():
            if not set(settings) <= names:
                raise ValueError(f"{self.name}: the preset {preset!r} sets {sorted(set(settings) - names)}, no options")
        super().__post_init__()

    def _check_names(self, named: Sequence[str]) -> None:
        # Expressions cannot use the settings of the formula, so these may be named like primitives.
        super()._check_names([x for x in named if x not in PARAMETERS and x not in FLAGS])

    def check_expressions(self) -> None:
        super().check_expressions()
        names = [*(x.name for x in self.of_voxels), *self.constants]
        for part, expression in self.expressions.items():
            check(expression, [*self.SEES[part], *names], Part(self.name, part, self.places.get(part)))
        if self.tentative:
            numbers = [x.name for x in self.of_voxels]
            check(self.tentative, numbers, Part(self.name, "tentative", self.places.get("tentative")), functions={})

    @cached_property
    def expressions(self) -> Mapping[str, str]:
        """Expressions of the voxel loss, by name."""
        expressions = {"row": self.row, "term": self.term, "element": self.element}
        return {name: x for name, x in expressions.items() if x is not None}

    @cached_property
    def of_voxels(self) -> tuple[Parameter, ...]:
        """Parameters of the voxel loss, without its share."""
        return tuple([x for x in self.parameters if x.name not in PARAMETERS and x.name not in self.share])

    @property
    def has_voxels(self) -> bool:
        """True if a voxel loss is added."""
        return bool(self.expressions)

    @cached_property
    def of_presets(self) -> frozenset[str]:
        """Options that a preset may set. None stands for the value of the preset, or else for the default."""
        return frozenset([name for settings in self.presets.values() for name in settings])

    @property
    def identity(self) -> tuple[Any, ...]:
        formulas = tuple([(name, code_of(x)) for name, x in self.references.items()])
        own = (self.operands, self.expressions, self.constants, self.parameters, self.flags, self.fixed, self.share)
        return (*own, self.presets, self.chosen_by, self.smoothing, self.of_weights, self.tentative, formulas)

    # ------------------------------------------------------------------------------------------------------------------
    # Arguments

    @cached_property
    def array_names(self) -> tuple[str, ...]:
        weight = "weight" if self.has_voxels else "None"
        normalizer = "None" if self.has_voxels else "normalizer"
        return (*(x.name for x in self.operands), "class_weight", weight, "mask", normalizer)

    @cached_property
    def setting_names(self) -> tuple[str, ...]:
        return (*(x.name for x in self.options), *(x for x in self.common if x not in self.array_names))

    @cached_property
    def common(self) -> Mapping[str, Any]:
        defaults: dict[str, Any] = {"empty": None, "class_weight": None}
        if self.has_voxels:
            defaults["weight"] = None
        defaults |= {"ignore_index": IGNORED, "class_dim": 1, "mask": None}
        defaults |= {"preset": None, "reduction": "mean"}
        if not self.has_voxels:
            defaults["normalizer"] = None
        return defaults | {"out_dtype": None, "check_targets": "lazy"}

    @cached_property
    def arguments(self) -> tuple[tuple[str, Any], ...]:
        # Calls the function of the cached property, which `super()` cannot call.
        arguments = Definition.arguments.func(self)  # type: ignore[attr-defined]
        return tuple([(n, None if n in self.of_presets else x) for n, x in arguments])

    @property
    def annotations(self) -> Mapping[str, str]:
        return {**_ANNOTATIONS, "reduction": one_of(self.reductions)}

    def annotation(self, name: str) -> str:
        several = " | tuple[str, ...]" if name == "pool" else ""
        # Options that a preset may set are None by default.
        nothing = " | None" if name in self.of_presets and name not in self.annotations else ""
        return f"{super().annotation(name)}{several}{nothing}"

    @property
    def reserved(self) -> Collection[str]:
        names = {*self.common, *LEGACY, *[x for names in self.SEES.values() for x in names], "self"}
        return names - {"input", "target"}

    @property
    def reductions(self) -> tuple[str, ...]:
        return ("mean",) if self.has_voxels else REDUCTIONS

    # ------------------------------------------------------------------------------------------------------------------
    # Documentation

    def describe_operand(self, operand: Operand) -> str:
        if operand is self.operands[0]:
            return (
                f"{operand.doc} Shape (N, C, ...), any number of dimensions, with the classes in `class_dim`; floating."
            )
        return operand.doc

    def default_text(self, name: str, default: Any) -> str:
        defaults = {x.name: x.default for x in self.options}
        if name in self.of_presets and name in defaults:
            return f" Default None: what `preset` sets, or {defaults[name]!r}."
        return super().default_text(name, default)

    @property
    def common_texts(self) -> Mapping[str, str]:
        texts = dict(_COMMON_TEXTS)
        presets = ", ".join([f"'{x}'" for x in self.presets])
        texts["preset"] = (
            f"Settings of a library or paper, one of {presets}; arguments that are passed as well take precedence. "
            "Default None, the defaults listed here."
            if presets
            else "Must be None."
        )
        return texts

    @property
    def symbols(self) -> str:
        return (
            "with p = softmax(input), sigmoid(input) or input; t = [target = c], or a target per class; I = sum p t, "
            "FP = sum p (1 - t), FN = sum (1 - p) t over the voxels of a group that count."
        )

    @property
    def result_text(self) -> str:
        if self.has_voxels:
            return (
                "One number, of the library and on the device of `input`, in the promoted dtype of the operands "
                "(float32 under autocast) unless `out_dtype` is given. The loss of regions is averaged over the groups "
                "that count, that of voxels over the voxels that do"
                + (" (divided by the sum of the weights of their labels)" if self.of_weights else "")
                + ". A mean of nothing is NaN, with gradients of 0."
            )
        return (
            "With reduction 'none' the loss of each group, of shape (N, C), (C,), (N,) or () as classes or samples are "
            "pooled, 0 for groups that do not count; otherwise one number. 'mean' divides the sum by the number of "
            "groups that count. A mean of nothing is NaN, with gradients of 0. The result belongs to the library and "
            "the device of `input`, and has the promoted dtype of the operands (float32 under autocast) unless "
            "`out_dtype` is given."
        )

    @property
    def gradient_text(self) -> str:
        return (
            "`input` and a floating `target` are differentiable; class weights are constants. A denominator of 0 has "
            f"gradient 0, and S = 1 if no voxel is true, 0 otherwise. {self.convention} Where the loss of a group is "
            "NaN, so is the gradient of all of its voxels."
        )

    @property
    def errors(self) -> Mapping[str, str]:
        return {**super().errors, "IndexError": "A label is neither a class nor `ignore_index`; see `check_targets`."}

    @property
    def example_operands(self) -> Mapping[str, Any]:
        first, second = self.operands
        return {first.name: _LOGITS, second.name: _LABELS}


#: Operands of documented examples: logits of 2 classes and labels of 4 voxels.
_LOGITS = (((2.0, 1.0, -1.0, 0.5), (0.0, 1.5, 0.5, -0.5)),)
_LABELS = ((0, 1, 1, 0),)

_COMMON_TEXTS = COMMON_TEXTS | {
    "empty": "Loss of a sample without a group that counts, with average='samples'. Default None: such a sample is "
    "left out.",
    "class_weight": "Weight of each class, of shape (C,), whether or not the background has a region; without a "
    "gradient. A group of weight 0 counts for nothing, even if it is NaN. Default None, no weights.",
    "weight": "Weight of each class in the loss of voxels, of shape (C,), without a gradient. Default None, no "
    "weights.",
    "ignore_index": "Label of voxels that do not count. Their logits are not used, and their gradients are 0, even if "
    "they are NaN.",
    "class_dim": "Dimension of the classes, from either end. Of the others the first is that of samples.",
    "mask": "Bool array that broadcasts to the shape of the voxels, (N, ...), True where a voxel counts. Default None, "
    "no mask.",
    "normalizer": "Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the "
    "number of masks of all processes. Default None.",
    "check_targets": "When a label that is neither a class nor `ignore_index` raises: 'lazy' at a later call of a loss "
    "(at once on the CPU), 'sync' at once, for which the call waits for the GPU, 'off' never. The loss of its sample "
    "is NaN in any case, and memory is not read out of bounds.",
}


def define_regions(
    *,
    defaults: Mapping[str, Any] | None = None,
    fixed: Mapping[str, float] | None = None,
    without: Collection[str] = (),
    parameters: tuple[Parameter, ...] = (),
    flags: tuple[Flag, ...] = (),
    **fields: Any,
) -> RegionLoss:
    """Makes a :class:`RegionLoss` and enters it in the registry, from which the public functions are built.

    ``defaults`` overrides defaults of :data:`PARAMETERS` and :data:`FLAGS`. ``fixed`` has the values of parameters that
    are not arguments of the loss. ``without`` has the names of flags that are not. ``parameters`` and ``flags`` are the
    loss's own.
    """
    defaults, fixed = dict(defaults or {}), dict(fixed or {})

    def own(x: Any) -> Any:
        return replace(x, default=defaults.get(x.name, x.default))

    numbers = [own(x) for x in PARAMETERS.values() if x.name not in fixed]
    choices = [own(x) for x in FLAGS.values() if x.name not in without]
    return enter(RegionLoss(parameters=(*numbers, *parameters), flags=(*choices, *flags), fixed=fixed, **fields))
