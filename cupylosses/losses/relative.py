"""Relative losses: errors relative to the target, and errors of logarithms."""

from cupylosses.definition.base import Kink, Operand, Parameter
from cupylosses.engines.pointwise.definition import define
from cupylosses.reference_math import log_ratio, where_nan


def _msle_reference(xp, input, target):
    return log_ratio(xp, 1 + input, 1 + target, input - target) ** 2


msle_loss = define(
    name="msle_loss",
    summary="Squared logarithmic error; mean squared logarithmic error (MSLE) with the default reduction.",
    formula="(log(1 + input) - log(1 + target))^2",
    operands=(
        Operand("input", "The prediction; the loss is NaN below -1.", domain="nonnegative", integer=True),
        Operand("target", "The ground truth; the loss is NaN below -1.", domain="nonnegative", integer=True),
    ),
    value="squared_log_error(input, target)",
    reference=_msle_reference,
    heavy=1,
    notes=(
        "Keras clamps both operands to at least 1e-7, which hides negative predictions and gives them no gradient. "
        "Here, numbers between -1 and 0 are used as they are, and smaller ones give NaN."
    ),
    source="J. W. Tukey, Exploratory Data Analysis, 1977, for the started logarithm.",
)


def _mape_reference(xp, input, target, epsilon):
    # In |target - input| / |target|, the derivative with respect to the target would cancel; in 1 - input / target it
    # does not.
    relative = ~(xp.abs(target) <= epsilon)
    ratio = 1 - input / xp.where(relative, target, xp.ones_like(target))
    ratio = xp.where(input == target, xp.zeros_like(ratio), ratio)  # a rounded quotient might not be 1
    return where_nan(xp, xp.isinf(target), 100 * xp.abs(xp.where(relative, ratio, (target - input) / epsilon)))


mape_loss = define(
    name="mape_loss",
    summary="Absolute percentage error; mean absolute percentage error (MAPE) with the default reduction.",
    formula="100 |target - input| / max(|target|, epsilon)",
    operands=(
        Operand("input", "The prediction.", integer=True),
        Operand("target", "The ground truth.", integer=True),
    ),
    parameters=(Parameter("epsilon", 1e-7, "Lower bound of the denominator.", minimum=0.0, exclusive=True),),
    value="percentage_error(input, target, epsilon)",
    reference=_mape_reference,
    heavy=1,
    kinks=lambda epsilon: [Kink((0.75, 0.75), 0.0, (0.0, 0.0))],
    convention="At input = target the gradient is 0. At |target| = epsilon the denominator is treated as constant.",
    cases=({}, {"epsilon": 0.5}),
    notes="The default of epsilon is that of Keras.",
    source="S. Makridakis, Accuracy measures: theoretical and practical concerns, International Journal of Forecasting "
    "9, 1993.",
)
