"""Regression losses: squared error, absolute error, smooth L1 and Huber."""

from cupylosses.definition.base import Kink, Operand, Parameter
from cupylosses.engines.pointwise.definition import define

_INPUT = Operand("input", "The prediction.", integer=True)
_TARGET = Operand("target", "The ground truth.", integer=True)


def _zero_difference(**parameters):
    return [Kink((0.75, 0.75), 0.0, (0.0, 0.0))]


mse_loss = define(
    name="mse_loss",
    summary="Squared error; mean squared error with the default reduction.",
    formula="(input - target)^2",
    operands=(_INPUT, _TARGET),
    value="square(input - target)",
    reference=lambda xp, input, target: (input - target) ** 2,
    torch="mse_loss",
    module="MSELoss",
    positional="input target size_average reduce reduction weight",
    mean_of_weights=True,
    warn_broadcast=True,
    source="C. F. Gauss, Theoria combinationis observationum, 1823.",
)

l1_loss = define(
    name="l1_loss",
    summary="Absolute error; mean absolute error with the default reduction.",
    formula="|input - target|",
    operands=(_INPUT, _TARGET),
    value="abs(input - target)",
    reference=lambda xp, input, target: xp.abs(input - target),
    torch="l1_loss",
    module="L1Loss",
    positional="input target size_average reduce reduction weight",
    mean_of_weights=True,
    warn_broadcast=True,
    kinks=_zero_difference,
    convention="At input = target the gradient is 0.",
    source="P. S. Laplace, Theorie analytique des probabilites, 1812.",
)


def _smooth_l1_reference(xp, input, target, beta):
    difference = input - target
    d = xp.abs(difference)
    if beta == 0:
        return d
    # Each branch sees only its own elements: the square of a large d would make the gradient NaN even where it is not
    # chosen. The square is taken of the difference, because that of d would have no second derivative at 0.
    small = xp.where(d < beta, difference, xp.zeros_like(d))
    return xp.where(d < beta, 0.5 * small * (small / beta), d - 0.5 * beta)


def _smooth_l1_kinks(beta):
    switch = [Kink((beta, 0.0), beta / 2, (1.0, -1.0))] if 0 < beta < float("inf") else []
    return [Kink((0.75, 0.75), 0.0, (0.0, 0.0)), *switch]


smooth_l1_loss = define(
    name="smooth_l1_loss",
    summary="Smooth L1 loss: squared error for small differences, absolute error for large ones.",
    formula="d^2 / (2 beta) where d < beta, else d - beta / 2, with d = |input - target|",
    operands=(_INPUT, _TARGET),
    parameters=(Parameter("beta", 1.0, "Difference at which the two branches meet; 0 gives `l1_loss`.", minimum=0.0),),
    value="smooth_abs(input - target, beta, 1 / beta)",
    reference=_smooth_l1_reference,
    torch="smooth_l1_loss",
    module="SmoothL1Loss",
    positional="input target size_average reduce reduction beta",
    warn_broadcast=True,
    kinks=_smooth_l1_kinks,
    convention="At d = beta both branches have slope 1. With beta = 0, the gradient at input = target is 0.",
    cases=({}, {"beta": 0.25}, {"beta": 0.0}, {"beta": float("inf")}),
    source="R. Girshick, Fast R-CNN, ICCV 2015.",
)


def _huber_reference(xp, input, target, delta):
    difference = input - target
    if delta == float("inf"):
        return 0.5 * difference * difference
    d = xp.abs(difference)
    small = xp.where(d <= delta, difference, xp.zeros_like(d))  # as in smooth L1
    return xp.where(d <= delta, 0.5 * small * small, delta * (d - 0.5 * delta))


def _huber_kinks(delta):
    switch = [Kink((delta, 0.0), delta**2 / 2, (delta, -delta))] if delta < float("inf") else []
    return [Kink((0.75, 0.75), 0.0, (0.0, 0.0)), *switch]


huber_loss = define(
    name="huber_loss",
    summary="Huber loss: squared error for small differences, absolute error scaled by delta for large ones.",
    formula="d^2 / 2 where d <= delta, else delta (d - delta / 2), with d = |input - target|",
    operands=(_INPUT, _TARGET),
    parameters=(Parameter("delta", 1.0, "Difference at which the two branches meet.", minimum=0.0, exclusive=True),),
    value="clipped_square(input - target, delta)",
    reference=_huber_reference,
    torch="huber_loss",
    module="HuberLoss",
    positional="input target reduction delta weight",
    warn_broadcast=True,
    kinks=_huber_kinks,
    convention="At d = delta both branches have slope delta.",
    cases=({}, {"delta": 0.25}, {"delta": float("inf")}),
    source="P. J. Huber, Robust estimation of a location parameter, Annals of Mathematical Statistics 35, 1964.",
)
