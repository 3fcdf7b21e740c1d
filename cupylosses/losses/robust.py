"""Losses of a difference that outliers pull on less than on the squared error, and the quantile's."""

import math

from cupylosses.definition import Kink, Operand, Parameter, define

_INPUT = Operand("input", "The prediction.", integer=True)
_TARGET = Operand("target", "The ground truth.", integer=True)
_SCALE = Parameter(
    "scale", 1.0, "The residual around which errors begin to count as outliers.", minimum=0.0, exclusive=True
)

#: Multiplied by instead of divided by: a kernel divides once per thread.
_SHARPNESS = {"sharpness": "1 / scale"}

#: Beyond this residual, 1 + r^2 is r^2, and its square need not be in range.
_LARGE = 2.0**60


def _residual(xp, input, target, scale):
    # The residual, where it is large, and 1 there instead: what a formula must not see, not even where it is not
    # chosen, because the inf or NaN of it would reach the gradient.
    r = (input - target) * (1 / scale)
    large = xp.abs(r) > _LARGE
    return r, large, xp.where(large, xp.ones_like(r), r)


def _log_cosh_reference(xp, input, target):
    d = input - target
    near = xp.abs(d) < 1
    tangent = xp.tanh(xp.where(near, d, xp.zeros_like(d)))
    a = xp.abs(d)
    return xp.where(near, -0.5 * xp.log1p(-tangent * tangent), xp.log1p(xp.exp(-2 * a)) + (a - math.log(2)))


log_cosh_loss = define(
    name="log_cosh_loss",
    summary="Logarithm of the hyperbolic cosine: half the squared error for small differences, the absolute for large.",
    formula="log(cosh(input - target))",
    operands=(_INPUT, _TARGET),
    value="log_cosh(input - target)",
    reference=_log_cosh_reference,
    heavy=True,
    source="P. J. Green, Bayesian reconstructions from emission tomography data using a modified EM algorithm, "
    "IEEE Transactions on Medical Imaging 9, 1990.",
)


def _charbonnier_reference(xp, input, target, scale):
    r, large, r1 = _residual(xp, input, target, scale)
    return xp.where(large, xp.abs(r), r1 * r1 / (xp.sqrt(r1 * r1 + 1) + 1))


charbonnier_loss = define(
    name="charbonnier_loss",
    summary="Charbonnier loss, a smooth absolute error, also known as pseudo-Huber.",
    formula="sqrt(r^2 + 1) - 1, with r = (input - target) / scale",
    operands=(_INPUT, _TARGET),
    parameters=(_SCALE,),
    constants=_SHARPNESS,
    value="hypotenuse_minus_one((input - target) * sharpness)",
    reference=_charbonnier_reference,
    heavy=True,
    cases=({}, {"scale": 2.0}),
    notes=(
        "As kornia has it: without the 1 taken off, and as sqrt(d^2 + epsilon^2), it is `epsilon` times this plus "
        "`epsilon`, with scale = epsilon. It is Barron's general loss with alpha = 1."
    ),
    source="P. Charbonnier, L. Blanc-Feraud, G. Aubert, M. Barlaud, Two deterministic half-quadratic regularization "
    "algorithms for computed imaging, ICIP 1994.",
)


def _cauchy_reference(xp, input, target, scale):
    r, large, r1 = _residual(xp, input, target, scale)
    far = xp.abs(xp.where(large, r, xp.ones_like(r)))
    return xp.where(large, 2 * xp.log(far) - math.log(2), xp.log1p(0.5 * r1 * r1))


cauchy_loss = define(
    name="cauchy_loss",
    summary="Cauchy loss, the negative log-likelihood of a Cauchy distribution; also known as Lorentzian.",
    formula="log(1 + r^2 / 2), with r = (input - target) / scale",
    operands=(_INPUT, _TARGET),
    parameters=(_SCALE,),
    constants=_SHARPNESS,
    value="log1p_half_square((input - target) * sharpness)",
    reference=_cauchy_reference,
    heavy=True,
    cases=({}, {"scale": 2.0}),
    notes="As kornia and Barron have it; it is Barron's general loss with alpha = 0.",
    source="M. J. Black, P. Anandan, The robust estimation of multiple motions: parametric and piecewise-smooth flow "
    "fields, Computer Vision and Image Understanding 63, 1996.",
)


def _welsch_reference(xp, input, target, scale):
    _, large, r1 = _residual(xp, input, target, scale)
    # Two ways to write one thing: torch differentiates the first with a cancellation where the value is near 1.
    z = 0.5 * r1 * r1
    return xp.where(large, xp.ones_like(z), xp.where(z < 1, -xp.expm1(-z), 1 - xp.exp(-z)))


welsch_loss = define(
    name="welsch_loss",
    summary="Welsch loss, an upside-down Gaussian; also known as Leclerc.",
    formula="1 - exp(-r^2 / 2), with r = (input - target) / scale",
    operands=(_INPUT, _TARGET),
    parameters=(_SCALE,),
    constants=_SHARPNESS,
    value="one_minus_gaussian((input - target) * sharpness)",
    reference=_welsch_reference,
    heavy=True,
    cases=({}, {"scale": 2.0}),
    notes="As kornia and Barron have it; it is the limit of Barron's general loss for alpha to -inf.",
    source="J. E. Dennis, R. E. Welsch, Techniques for nonlinear least squares and robust regression, Communications "
    "in Statistics 7, 1978.",
)


def _geman_mcclure_reference(xp, input, target, scale):
    r, large, r1 = _residual(xp, input, target, scale)
    far = xp.where(large, r, xp.ones_like(r))
    # Two ways to write one thing: the derivative of the first cancels for large residuals, the second for small ones.
    near = xp.abs(r1) < 2
    value = xp.where(near, 2 * r1 * r1 / (r1 * r1 + 4), 2 - 8 / (r1 * r1 + 4))
    return xp.where(large, 2 - 8 / far / far, value)


geman_mcclure_loss = define(
    name="geman_mcclure_loss",
    summary="Geman-McClure loss, which is never more than 2.",
    formula="2 r^2 / (r^2 + 4), with r = (input - target) / scale",
    operands=(_INPUT, _TARGET),
    parameters=(_SCALE,),
    constants=_SHARPNESS,
    value="geman_mcclure((input - target) * sharpness)",
    reference=_geman_mcclure_reference,
    heavy=True,
    cases=({}, {"scale": 2.0}),
    notes=(
        "As kornia and Barron have it; r^2 / (r^2 + 1), which is common too, is half of it with twice the scale. "
        "It is Barron's general loss with alpha = -2."
    ),
    source="S. Geman, D. E. McClure, Bayesian image analysis: an application to single photon emission tomography, "
    "Proceedings of the Statistical Computing Section of the American Statistical Association, 1985.",
)


def _wing_reference(xp, input, target, width, epsilon):
    d = xp.abs(input - target)
    near = d < width
    within = xp.where(near, d, width * xp.ones_like(d))
    return width * xp.log1p(within / epsilon) + xp.where(near, xp.zeros_like(d), d - width)


def _wing_kinks(width, epsilon):
    return [Kink((0.75, 0.75), 0.0, (0.0, 0.0)), Kink((width, 0.0), width * math.log1p(width / epsilon), (1.0, -1.0))]


wing_loss = define(
    name="wing_loss",
    summary="Wing loss: logarithmic, and so steep, for small differences, absolute error for large ones.",
    formula="width log(1 + d / epsilon) where d < width, else d - width + width log(1 + width / epsilon), "
    "with d = |input - target|",
    operands=(_INPUT, _TARGET),
    parameters=(
        Parameter("width", 5.0, "Where the two branches meet.", minimum=0.0, exclusive=True),
        Parameter("epsilon", 0.5, "How flat the logarithm is around 0.", minimum=0.0, exclusive=True),
    ),
    constants={"steepness": "1 / epsilon"},
    # One logarithm for both branches.
    let={
        "d": "abs(input - target)",
        "within": "where(d < width, d, width)",
        "beyond": "where(d < width, 0.0, d - width)",
    },
    value="width * log1p(within * steepness) + beyond",
    reference=_wing_reference,
    heavy=True,
    kinks=_wing_kinks,
    convention="At input = target the gradient is 0; at d = width it is that of the absolute error.",
    cases=({}, {"width": 2.0, "epsilon": 4.0}),
    notes="The defaults are those of segmentation-models-pytorch; the paper has width 10 and epsilon 2.",
    source="Z.-H. Feng, J. Kittler, M. Awais, P. Huber, X.-J. Wu, Wing loss for robust facial landmark localisation "
    "with convolutional neural networks, CVPR 2018.",
)

quantile_loss = define(
    name="quantile_loss",
    summary="Quantile loss, also known as pinball: absolute error with one weight below the target and one above.",
    formula="quantile (target - input) where input < target, else (1 - quantile) (input - target)",
    operands=(_INPUT, _TARGET),
    parameters=(
        Parameter(
            "quantile", 0.5, "The quantile to predict, between 0 and 1.", minimum=0.0, maximum=1.0, exclusive=True
        ),
    ),
    constants={"complement": "1 - quantile"},
    let={"d": "target - input"},
    value="where(d < 0, complement * -d, where(d > 0, quantile * d, d * 0))",
    reference=lambda xp, input, target, quantile: (
        xp.abs(target - input)
        * xp.where(target > input, quantile * xp.ones_like(input), (1 - quantile) * xp.ones_like(input))
    ),
    kinks=lambda quantile: [Kink((0.75, 0.75), 0.0, (0.0, 0.0))],
    convention="At input = target the gradient is 0.",
    cases=({}, {"quantile": 0.95}),
    source="R. Koenker, G. Bassett, Regression quantiles, Econometrica 46, 1978.",
)
