"""Losses of a ratio: relative errors, and errors of logarithms."""

from cupylosses.definition.base import Kink, Operand, Parameter
from cupylosses.engines.pointwise.definition import define
from cupylosses.reference_math import log_ratio, where_nan


def _msle_reference(xp, input, target):
    return log_ratio(xp, 1 + input, 1 + target, input - target) ** 2


msle_loss = define(
    name="msle_loss",
    summary="Squared error of the logarithms, each of 1 plus a number: mean squared logarithmic error.",
    formula="(log(1 + input) - log(1 + target))^2",
    operands=(
        Operand("input", "The prediction, more than -1.", domain="nonnegative", integer=True),
        Operand("target", "The ground truth, more than -1.", domain="nonnegative", integer=True),
    ),
    value="squared_log_error(input, target)",
    reference=_msle_reference,
    heavy=1,
    notes=(
        "Keras raises either operand to 1e-7 first, which hides a negative prediction and takes its gradient away; "
        "here numbers between -1 and 0 are taken as they are, and smaller ones give NaN."
    ),
    source="J. W. Tukey, Exploratory Data Analysis, 1977, for the started logarithm.",
)


def _mape_reference(xp, input, target, epsilon):
    # 1 - input / target has the derivative with respect to the target that |target - input| / |target| cancels to.
    relative = ~(xp.abs(target) <= epsilon)
    ratio = 1 - input / xp.where(relative, target, xp.ones_like(target))
    ratio = xp.where(input == target, xp.zeros_like(ratio), ratio)  # which a rounded quotient might miss
    return where_nan(xp, xp.isinf(target), 100 * xp.abs(xp.where(relative, ratio, (target - input) / epsilon)))


mape_loss = define(
    name="mape_loss",
    summary="Absolute error relative to the target, in percent: mean absolute percentage error.",
    formula="100 |target - input| / max(|target|, epsilon)",
    operands=(
        Operand("input", "The prediction.", integer=True),
        Operand("target", "The ground truth.", integer=True),
    ),
    parameters=(
        Parameter("epsilon", 1e-7, "What a smaller target counts as in the denominator.", minimum=0.0, exclusive=True),
    ),
    value="percentage_error(input, target, epsilon)",
    reference=_mape_reference,
    kinks=lambda epsilon: [Kink((0.75, 0.75), 0.0, (0.0, 0.0))],
    convention="At input = target the gradient is 0; at |target| = epsilon the denominator counts as constant.",
    cases=({}, {"epsilon": 0.5}),
    notes="The defaults are those of Keras.",
    source="S. Makridakis, Accuracy measures: theoretical and practical concerns, International Journal of Forecasting "
    "9, 1993.",
)
