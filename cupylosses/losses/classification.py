"""Losses of binary classification: of probabilities, of logits, and of scores with labels -1 and +1."""

from math import inf

from cupylosses.definition.base import Kink, Operand
from cupylosses.engines.pointwise.definition import define
from cupylosses.reference_math import detached, softplus, softplus_excess, where_nan, with_derivative_of

LABEL = Operand("target", "The label, 0 or 1, or a probability between them.", domain="probability", integer=True)
LOGIT = Operand("input", "The predicted logit.")

#: Lower bound of the logarithm of a probability, and upper bound of its derivative.
_LEAST_LOG, _MOST_SLOPE = -100.0, 1e12


def _bounded_log(xp, p, log):
    # `log` is log p where p is not tiny. Where p is tiny, the value is still that of the logarithm, but the derivative
    # is that of a line.
    zero = xp.zeros_like(p)
    tiny = p < 1 / _MOST_SLOPE
    value = xp.log(detached(xp.where(tiny & (p > 0), p, zero + 1)))
    value = xp.where((p > 0) & (value > _LEAST_LOG), value, zero + _LEAST_LOG)
    return xp.where(tiny, with_derivative_of(value, xp.where(tiny, p, zero) * _MOST_SLOPE), log)


def _bce_reference(xp, input, target):
    zero = xp.zeros_like(input)
    miss = 1 - input
    log_hit = _bounded_log(xp, input, xp.log(xp.where(input < 1 / _MOST_SLOPE, zero + 1, input)))
    log_miss = _bounded_log(xp, miss, xp.log1p(-xp.where(miss < 1 / _MOST_SLOPE, zero, input)))
    probable = (input >= 0) & (input <= 1) & (target >= 0) & (target <= 1)
    return where_nan(xp, ~probable, target * -log_hit + (1 - target) * -log_miss)


binary_cross_entropy = define(
    name="binary_cross_entropy",
    summary="Binary cross entropy of predicted probabilities.",
    formula="-(target log(input) + (1 - target) log(1 - input)), with each logarithm clamped to at least -100",
    operands=(Operand("input", "The predicted probability.", domain="probability"), LABEL),
    value="log_loss(input, target)",
    reference=_bce_reference,
    heavy=1,
    tentative="true",
    torch="binary_cross_entropy",
    module="BCELoss",
    positional="input target weight size_average reduce reduction",
    kinks=lambda: [Kink((0.0, 0.0), 0.0, (1.0, 100.0)), Kink((1.0, 1.0), 0.0, (-1.0, -100.0))],
    convention=(
        "The derivative with respect to `input` is (1 - target) / (1 - input) - target / input, in which 1 / input and "
        "1 / (1 - input) are clamped to at most 1e12. That with respect to `target` is the difference of the clamped "
        "logarithms."
    ),
    notes=(
        "The loss is NaN where `input` or `target` is outside of [0, 1]. `binary_cross_entropy_with_logits` is more "
        "accurate: the sigmoid of a large logit rounds to 1."
    ),
    source="I. J. Good, Rational decisions, Journal of the Royal Statistical Society B 14, 1952.",
)


def logistic_reference(xp, x, y, weight):
    label = xp.where(x > 0, 1 - y, y)
    factor = xp.where(x > 0, xp.ones_like(x), weight * xp.ones_like(x))
    size = xp.where(x > 0, x, -x)
    # By convention 0 * inf = 0, with derivatives of 0.
    nothing = ((label == 0) | (factor == 0)) & xp.isinf(x)
    # As a value, the sum keeps the digits of a small weight; the product keeps those of the derivative at weight 1.
    curved = with_derivative_of((1 - y) + weight * y, 1 + (weight - 1) * y) * softplus_excess(xp, x)
    return factor * (label * xp.where(nothing, xp.zeros_like(size), size)) + curved


def _bce_with_logits_reference(xp, input, target, pos_weight):
    infinite = xp.isinf(pos_weight)
    weight = xp.where(infinite, xp.ones_like(pos_weight), pos_weight)
    return where_nan(xp, infinite, logistic_reference(xp, input, target, weight))


def perfect_logits(**_):
    return [Kink((inf, 1.0), 0.0, (0.0, 0.0)), Kink((-inf, 0.0), 0.0, (0.0, 0.0))]


binary_cross_entropy_with_logits = define(
    name="binary_cross_entropy_with_logits",
    summary="Binary cross entropy of logits.",
    formula="pos_weight target log(1 + exp(-input)) + (1 - target) log(1 + exp(input))",
    operands=(
        LOGIT,
        LABEL,
        Operand(
            "pos_weight",
            "The weight of positive examples; finite.",
            domain="nonnegative",
            integer=True,
            number=True,
            default=1.0,
        ),
    ),
    value="log_loss_of_logit(input, target, pos_weight)",
    reference=_bce_with_logits_reference,
    heavy=1,
    tentative="true",
    torch="binary_cross_entropy_with_logits",
    module="BCEWithLogitsLoss",
    positional="input target weight size_average reduce reduction pos_weight",
    kinks=lambda: [Kink((*x.operands, 1.0), x.value, (*x.gradient, 0.0)) for x in perfect_logits()],
    convention="An infinite logit of the correct sign has loss 0 and gradient 0.",
    notes="Value and gradient stay accurate for confident correct predictions: neither underflows to 0 early.",
    source=(
        "D. R. Cox, The regression analysis of binary sequences, Journal of the Royal Statistical Society B 20, 1958."
    ),
)


multilabel_soft_margin_loss = define(
    name="multilabel_soft_margin_loss",
    summary="Multi-label binary cross entropy of logits, averaged over the classes in the last dimension.",
    formula="target log(1 + exp(-input)) + (1 - target) log(1 + exp(input))",
    operands=(LOGIT, LABEL),
    value="log_loss_of_logit(input, target, 1)",
    reference=lambda xp, input, target: logistic_reference(xp, input, target, 1.0),
    heavy=1,
    torch="multilabel_soft_margin_loss",
    module="MultiLabelSoftMarginLoss",
    positional="input target weight size_average reduce reduction",
    mean_of_rows=True,
    kinks=perfect_logits,
    convention="An infinite logit of the correct sign has loss 0 and gradient 0.",
    source=(
        "G. Tsoumakas, I. Katakis, Multi-label classification: an overview, International Journal of Data Warehousing "
        "and Mining 3, 2007."
    ),
)


def _soft_margin_reference(xp, input, target):
    # At an infinite margin the gradient is 0 although an operand is infinite, so the product is not formed there.
    beyond = input * target == inf
    zero = xp.zeros_like(input * target)
    margin = xp.where(beyond, zero, input) * xp.where(beyond, zero, target)
    return where_nan(xp, target == 0, xp.where(beyond, zero, softplus(xp, -margin)))


soft_margin_loss = define(
    name="soft_margin_loss",
    summary="Logistic loss of a score, for labels -1 and +1.",
    formula="log(1 + exp(-input target))",
    operands=(
        Operand("input", "The predicted score."),
        Operand("target", "The label; the loss is NaN where it is 0.", domain="sign", integer=True),
    ),
    value="nan_unless(abs(target) > 0, softplus(-(input * target)))",
    reference=_soft_margin_reference,
    heavy=1,
    torch="soft_margin_loss",
    module="SoftMarginLoss",
    positional="input target size_average reduce reduction",
    kinks=lambda: [Kink((inf, 1.0), 0.0, (0.0, 0.0)), Kink((-inf, -1.0), 0.0, (0.0, 0.0))],
    convention="An infinite score of the correct sign has loss 0 and gradient 0.",
    source=(
        "J. Friedman, T. Hastie, R. Tibshirani, Additive logistic regression: a statistical view of boosting, Annals "
        "of Statistics 28, 2000."
    ),
)
