"""Losses of a margin: the prediction times a label of -1 or +1."""

from math import inf

from cupylosses.definition.base import Kink, Operand, Parameter
from cupylosses.engines.pointwise.definition import define
from cupylosses.reference_math import softplus, where_nan

_SCORE = Operand("input", "The score.")
_LABEL = Operand("target", "The label, -1 or +1; any number is taken as it is.", domain="sign", integer=True)


def _hinge_reference(xp, input, target, margin):
    # An inactive element has gradient 0 also where an operand is infinite, so the product is not formed there.
    inactive = margin - input * target < 0
    zero = xp.zeros_like(input * target)
    product = xp.where(inactive, zero, input) * xp.where(inactive, zero, target)
    return xp.where(inactive, zero, margin - product)


hinge_loss = define(
    name="hinge_loss",
    summary="Hinge loss of a margin classifier, element by element, with broadcasting.",
    formula="max(0, margin - input * target)",
    operands=(_SCORE, _LABEL),
    parameters=(Parameter("margin", 1.0, "The product above which an element costs nothing."),),
    value="relu_active(margin - input * target)",
    reference=_hinge_reference,
    kinks=lambda margin: [Kink((margin, 1.0), 0.0, (-1.0, -margin))],
    convention="At input * target = margin the element counts as active: the gradient is (-target, -input).",
    cases=({}, {"margin": 0.5}),
    notes=(
        "A target of shape (D,) belongs to the columns of an input (N, D), as everywhere in NumPy and torch; "
        "one target per row is `target[:, None]`."
    ),
    source="C. Cortes, V. Vapnik, Support-vector networks, Machine Learning 20, 1995.",
)


def _relu_active(xp, x):
    return xp.where(x < 0, xp.zeros_like(x), x)


def _hinge_embedding_reference(xp, input, target, margin):
    value = xp.where(target > 0, input, _relu_active(xp, margin - input))
    # The target is tied into the graph with derivative 0, and makes NaN of NaN, but not of infinity.
    return where_nan(xp, target == 0, value + 0 * xp.where(xp.isinf(target), xp.ones_like(target), target))


hinge_embedding_loss = define(
    name="hinge_embedding_loss",
    summary="Distance of a similar pair, or what a dissimilar pair lacks of the margin, element by element.",
    formula="input where target > 0, max(0, margin - input) where target < 0",
    operands=(
        Operand("input", "The distance."),
        Operand(
            "target",
            "The label, -1 or +1, of which the sign counts; NaN is the loss of 0.",
            domain="sign",
            integer=True,
        ),
    ),
    parameters=(Parameter("margin", 1.0, "The distance at which a dissimilar pair costs nothing."),),
    value="nan_unless(abs(target) > 0, where(target > 0, input, relu_active(margin - input)))",
    reference=_hinge_embedding_reference,
    torch="hinge_embedding_loss",
    module="HingeEmbeddingLoss",
    positional="input target margin size_average reduce reduction",
    kinks=lambda margin: [Kink((margin, -1.0), 0.0, (-1.0, 0.0))],
    convention="At input = margin a dissimilar pair counts as active, with gradient -1; the label has gradient 0.",
    cases=({}, {"margin": 0.5}),
    source=("R. Hadsell, S. Chopra, Y. LeCun, Dimensionality reduction by learning an invariant mapping, CVPR 2006."),
)


def _margin_ranking_reference(xp, input1, input2, target, margin):
    # As for the hinge loss: an inactive pair has gradient 0 also where an operand is infinite.
    inactive = margin - target * (input1 - input2) < 0
    zero = xp.zeros_like(target * (input1 - input2))
    first, second, label = (xp.where(inactive, zero, x) for x in (input1, input2, target))
    return xp.where(inactive, zero, margin - label * (first - second))


margin_ranking_loss = define(
    name="margin_ranking_loss",
    summary="Hinge loss of the order of two scores, element by element.",
    formula="max(0, margin - target (input1 - input2))",
    operands=(
        Operand("input1", "The score of the first."),
        Operand("input2", "The score of the second."),
        Operand(
            "target",
            "+1 where the first should have the higher score, -1 where the second; any number is taken as it is.",
            domain="sign",
            integer=True,
        ),
    ),
    parameters=(Parameter("margin", 0.0, "The difference of scores beyond which a pair costs nothing."),),
    value="relu_active(margin - target * (input1 - input2))",
    reference=_margin_ranking_reference,
    torch="margin_ranking_loss",
    module="MarginRankingLoss",
    positional="input1 input2 target margin size_average reduce reduction",
    kinks=lambda margin: [Kink((margin + 0.75, 0.75, 1.0), 0.0, (-1.0, 1.0, -margin))],
    convention="At target (input1 - input2) = margin a pair counts as active: (-target, target, input2 - input1).",
    cases=({}, {"margin": 0.5}),
    source=(
        "R. Herbrich, T. Graepel, K. Obermayer, Large margin rank boundaries for ordinal regression, Advances in Large "
        "Margin Classifiers, 2000."
    ),
)


def _perfect_scores():
    return [Kink((inf, 1.0), 0.0, (0.0, 0.0)), Kink((-inf, -1.0), 0.0, (0.0, 0.0))]


def _squared_hinge_reference(xp, input, target, margin):
    return _hinge_reference(xp, input, target, margin) ** 2


squared_hinge_loss = define(
    name="squared_hinge_loss",
    summary="Squared hinge loss of a margin classifier, element by element.",
    formula="max(0, margin - input target)^2",
    operands=(_SCORE, _LABEL),
    parameters=(Parameter("margin", 1.0, "The product above which an element costs nothing."),),
    value="square(relu_active(margin - input * target))",
    reference=_squared_hinge_reference,
    cases=({}, {"margin": 0.5}),
    notes="Keras takes labels of 0 for -1; here they are taken as they are.",
    source="C. Cortes, V. Vapnik, Support-vector networks, Machine Learning 20, 1995.",
)


def _of_margin(xp, formula, input, target):
    # An infinite margin costs nothing, with gradient 0 also where an operand is infinite: it is not formed there.
    beyond = input * target == inf
    zero = xp.zeros_like(input * target)
    margin = xp.where(beyond, zero, input) * xp.where(beyond, zero, target)
    return xp.where(beyond, zero, formula(-margin))


logistic_loss = define(
    name="logistic_loss",
    summary="Logistic loss of a score against a label of -1 or +1, element by element.",
    formula="log(1 + exp(-input target))",
    operands=(
        Operand("input", "The score, which is the logit of the label +1."),
        _LABEL,
    ),
    value="softplus(-(input * target))",
    reference=lambda xp, input, target: _of_margin(xp, lambda x: softplus(xp, x), input, target),
    heavy=1,
    kinks=_perfect_scores,
    convention="An infinite score of the right sign costs nothing, with gradient 0.",
    notes=(
        "`soft_margin_loss` is the same but for a label of 0, where it is NaN and this log(2). With labels of 0 and 1 "
        "it is `binary_cross_entropy_with_logits`."
    ),
    source=(
        "D. R. Cox, The regression analysis of binary sequences, Journal of the Royal Statistical Society B 20, 1958."
    ),
)


exponential_loss = define(
    name="exponential_loss",
    summary="Exponential loss of a score against a label of -1 or +1, that of AdaBoost, element by element.",
    formula="exp(-input target)",
    operands=(_SCORE, _LABEL),
    let={"loss": "exp(-(input * target))"},
    # The score may be infinite: the derivative with respect to the label is then not inf * 0.
    value="where(loss == 0, 0, loss)",
    reference=lambda xp, input, target: _of_margin(xp, xp.exp, input, target),
    kinks=_perfect_scores,
    convention="An infinite score of the right sign costs nothing, with gradient 0.",
    source="Y. Freund, R. E. Schapire, A decision-theoretic generalization of on-line learning and an application to "
    "boosting, Journal of Computer and System Sciences 55, 1997.",
)
