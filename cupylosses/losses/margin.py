"""Margin losses: functions of a score times a label of -1 or +1, and of pairs of scores."""

from math import inf

from cupylosses.definition.base import Kink, Operand, Parameter
from cupylosses.engines.pointwise.definition import define
from cupylosses.reference_math import softplus, where_nan

_SCORE = Operand("input", "The predicted score.")
_LABEL = Operand("target", "The label; other numbers scale the score.", domain="sign", integer=True)


def _hinge_reference(xp, input, target, margin):
    # An inactive element has gradient 0 even if an operand is infinite, so the product is not formed there.
    inactive = margin - input * target < 0
    zero = xp.zeros_like(input * target)
    product = xp.where(inactive, zero, input) * xp.where(inactive, zero, target)
    return xp.where(inactive, zero, margin - product)


hinge_loss = define(
    name="hinge_loss",
    summary="Hinge loss of a binary classifier, for labels -1 and +1.",
    formula="max(0, margin - input target)",
    operands=(_SCORE, _LABEL),
    parameters=(Parameter("margin", 1.0, "Product of score and label from which an element has loss 0."),),
    value="relu_active(margin - input * target)",
    reference=_hinge_reference,
    kinks=lambda margin: [Kink((margin, 1.0), 0.0, (-1.0, -margin))],
    convention="At input target = margin the element is active: the gradient is (-target, -input).",
    cases=({}, {"margin": 0.5}),
    notes=(
        "A target of shape (D,) broadcasts along the rows of an input of shape (N, D), as in NumPy and torch. For one "
        "target per row, pass `target[:, None]`."
    ),
    source="C. Cortes, V. Vapnik, Support-vector networks, Machine Learning 20, 1995.",
)


def _relu_active(xp, x):
    return xp.where(x < 0, xp.zeros_like(x), x)


def _hinge_embedding_reference(xp, input, target, margin):
    value = xp.where(target > 0, input, _relu_active(xp, margin - input))
    # The target joins the graph with derivative 0. It propagates NaN, and an infinite one does not become NaN.
    return where_nan(xp, target == 0, value + 0 * xp.where(xp.isinf(target), xp.ones_like(target), target))


hinge_embedding_loss = define(
    name="hinge_embedding_loss",
    summary="Hinge embedding loss: the distance of similar pairs, and the hinge of that of dissimilar pairs.",
    formula="input where target > 0, max(0, margin - input) where target < 0",
    operands=(
        Operand("input", "The distance of a pair."),
        Operand(
            "target",
            "The label: +1 for similar pairs, -1 for dissimilar ones. Only its sign matters; the loss is NaN where it "
            "is 0.",
            domain="sign",
            integer=True,
        ),
    ),
    parameters=(Parameter("margin", 1.0, "Distance from which a dissimilar pair has loss 0."),),
    value="nan_unless(abs(target) > 0, where(target > 0, input, relu_active(margin - input)))",
    reference=_hinge_embedding_reference,
    torch="hinge_embedding_loss",
    module="HingeEmbeddingLoss",
    positional="input target margin size_average reduce reduction",
    kinks=lambda margin: [Kink((margin, -1.0), 0.0, (-1.0, 0.0))],
    convention="At input = margin a dissimilar pair is active, with gradient -1. The label has gradient 0.",
    cases=({}, {"margin": 0.5}),
    source=("R. Hadsell, S. Chopra, Y. LeCun, Dimensionality reduction by learning an invariant mapping, CVPR 2006."),
)


def _margin_ranking_reference(xp, input1, input2, target, margin):
    # As in the hinge loss, an inactive pair has gradient 0 even if an operand is infinite.
    inactive = margin - target * (input1 - input2) < 0
    zero = xp.zeros_like(target * (input1 - input2))
    first, second, label = (xp.where(inactive, zero, x) for x in (input1, input2, target))
    return xp.where(inactive, zero, margin - label * (first - second))


margin_ranking_loss = define(
    name="margin_ranking_loss",
    summary="Margin ranking loss: hinge loss of the difference of two scores.",
    formula="max(0, margin - target (input1 - input2))",
    operands=(
        Operand("input1", "The score of the first item."),
        Operand("input2", "The score of the second item."),
        Operand(
            "target",
            "+1 where the first item should have the higher score, -1 where the second; other numbers scale the "
            "difference.",
            domain="sign",
            integer=True,
        ),
    ),
    parameters=(Parameter("margin", 0.0, "Difference of the scores from which a pair has loss 0."),),
    value="relu_active(margin - target * (input1 - input2))",
    reference=_margin_ranking_reference,
    torch="margin_ranking_loss",
    module="MarginRankingLoss",
    positional="input1 input2 target margin size_average reduce reduction",
    kinks=lambda margin: [Kink((margin + 0.75, 0.75, 1.0), 0.0, (-1.0, 1.0, -margin))],
    convention="At target (input1 - input2) = margin the pair is active: the gradient is (-target, target, "
    "input2 - input1).",
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
    summary="Squared hinge loss of a binary classifier, for labels -1 and +1.",
    formula="max(0, margin - input target)^2",
    operands=(_SCORE, _LABEL),
    parameters=(Parameter("margin", 1.0, "Product of score and label from which an element has loss 0."),),
    value="square(relu_active(margin - input * target))",
    reference=_squared_hinge_reference,
    cases=({}, {"margin": 0.5}),
    notes="Keras converts labels 0 to -1; here, a label of 0 is used as it is.",
    source="C. Cortes, V. Vapnik, Support-vector networks, Machine Learning 20, 1995.",
)


def _of_margin(xp, formula, input, target):
    # An infinite margin has loss 0 and gradient 0 although an operand is infinite, so the product is not formed there.
    beyond = input * target == inf
    zero = xp.zeros_like(input * target)
    margin = xp.where(beyond, zero, input) * xp.where(beyond, zero, target)
    return xp.where(beyond, zero, formula(-margin))


logistic_loss = define(
    name="logistic_loss",
    summary="Logistic loss of a score, for labels -1 and +1.",
    formula="log(1 + exp(-input target))",
    operands=(
        Operand("input", "The predicted score: the logit of label +1."),
        _LABEL,
    ),
    value="softplus(-(input * target))",
    reference=lambda xp, input, target: _of_margin(xp, lambda x: softplus(xp, x), input, target),
    heavy=1,
    kinks=_perfect_scores,
    convention="An infinite score of the correct sign has loss 0 and gradient 0.",
    notes=(
        "Equals `soft_margin_loss` except at a label of 0, where that is NaN and this is log(2). For labels 0 and 1, "
        "use `binary_cross_entropy_with_logits`."
    ),
    source=(
        "D. R. Cox, The regression analysis of binary sequences, Journal of the Royal Statistical Society B 20, 1958."
    ),
)


exponential_loss = define(
    name="exponential_loss",
    summary="Exponential loss of a score, for labels -1 and +1, as in AdaBoost.",
    formula="exp(-input target)",
    operands=(_SCORE, _LABEL),
    let={"loss": "exp(-(input * target))"},
    # For an infinite score, the derivative with respect to the label would be inf * 0.
    value="where(loss == 0, 0, loss)",
    reference=lambda xp, input, target: _of_margin(xp, xp.exp, input, target),
    kinks=_perfect_scores,
    convention="An infinite score of the correct sign has loss 0 and gradient 0.",
    source="Y. Freund, R. E. Schapire, A decision-theoretic generalization of on-line learning and an application to "
    "boosting, Journal of Computer and System Sciences 55, 1997.",
)
