"""Robust regression losses, whose gradient for outliers is smaller than that of the squared error; quantile loss."""

import math

from cupylosses.definition.base import Kink, Operand, Parameter
from cupylosses.engines.pointwise.definition import define
from cupylosses.reference_math import where_nan

_INPUT = Operand("input", "The prediction.", integer=True)
_TARGET = Operand("target", "The ground truth.", integer=True)
_SCALE = Parameter(
    "scale", 1.0, "Scale of the residual, around which differences become outliers.", minimum=0.0, exclusive=True
)

#: Multiplication by the reciprocal instead of a division: a kernel then divides once per thread.
_SHARPNESS = {"sharpness": "1 / scale"}

#: Above this residual, 1 + r^2 rounds to r^2, whose square may overflow.
_LARGE = 2.0**60


def _residual(xp, input, target, scale):
    # Returns the residual, a mask of the large residuals, and the residual with 1 instead of large ones: the inf or NaN
    # that a formula makes of a large residual would reach the gradient even where the formula is not chosen.
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
    summary="Log-cosh loss: half the squared error for small differences, the absolute error for large ones.",
    formula="log(cosh(input - target))",
    operands=(_INPUT, _TARGET),
    value="log_cosh(input - target)",
    reference=_log_cosh_reference,
    heavy=1,
    source="P. J. Green, Bayesian reconstructions from emission tomography data using a modified EM algorithm, "
    "IEEE Transactions on Medical Imaging 9, 1990.",
)


def _charbonnier_reference(xp, input, target, scale):
    r, large, r1 = _residual(xp, input, target, scale)
    return xp.where(large, xp.abs(r), r1 * r1 / (xp.sqrt(r1 * r1 + 1) + 1))


charbonnier_loss = define(
    name="charbonnier_loss",
    summary="Charbonnier loss, a smooth absolute error, also known as the pseudo-Huber loss.",
    formula="sqrt(r^2 + 1) - 1, with r = (input - target) / scale",
    operands=(_INPUT, _TARGET),
    parameters=(_SCALE,),
    constants=_SHARPNESS,
    value="hypotenuse_minus_one((input - target) * sharpness)",
    reference=_charbonnier_reference,
    heavy=1,
    cases=({}, {"scale": 2.0}),
    notes=(
        "Scaled as by kornia. The common form sqrt(d^2 + epsilon^2) is epsilon times this loss, plus epsilon, with "
        "scale = epsilon. Equals `general_robust_loss` with alpha = 1."
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
    summary="Cauchy loss, the negative log-likelihood of a Cauchy distribution; also known as the Lorentzian loss.",
    formula="log(1 + r^2 / 2), with r = (input - target) / scale",
    operands=(_INPUT, _TARGET),
    parameters=(_SCALE,),
    constants=_SHARPNESS,
    value="log1p_half_square((input - target) * sharpness)",
    reference=_cauchy_reference,
    heavy=1,
    cases=({}, {"scale": 2.0}),
    notes="Scaled as by kornia and Barron. Equals `general_robust_loss` with alpha = 0.",
    source="M. J. Black, P. Anandan, The robust estimation of multiple motions: parametric and piecewise-smooth flow "
    "fields, Computer Vision and Image Understanding 63, 1996.",
)


def _welsch_reference(xp, input, target, scale):
    _, large, r1 = _residual(xp, input, target, scale)
    # The two forms are equal in exact arithmetic, but torch's derivative of the first cancels where the value is close
    # to 1.
    z = 0.5 * r1 * r1
    return xp.where(large, xp.ones_like(z), xp.where(z < 1, -xp.expm1(-z), 1 - xp.exp(-z)))


welsch_loss = define(
    name="welsch_loss",
    summary="Welsch loss, an inverted Gaussian; also known as the Leclerc loss.",
    formula="1 - exp(-r^2 / 2), with r = (input - target) / scale",
    operands=(_INPUT, _TARGET),
    parameters=(_SCALE,),
    constants=_SHARPNESS,
    value="one_minus_gaussian((input - target) * sharpness)",
    reference=_welsch_reference,
    heavy=1,
    cases=({}, {"scale": 2.0}),
    notes="Scaled as by kornia and Barron. Equals `general_robust_loss` with alpha = -inf.",
    source="J. E. Dennis, R. E. Welsch, Techniques for nonlinear least squares and robust regression, Communications "
    "in Statistics 7, 1978.",
)


def _geman_mcclure_reference(xp, input, target, scale):
    r, large, r1 = _residual(xp, input, target, scale)
    far = xp.where(large, r, xp.ones_like(r))
    # The two forms are equal in exact arithmetic, but the derivative of the first cancels for large residuals, and that
    # of the second for small ones.
    near = xp.abs(r1) < 2
    value = xp.where(near, 2 * r1 * r1 / (r1 * r1 + 4), 2 - 8 / (r1 * r1 + 4))
    return xp.where(large, 2 - 8 / far / far, value)


geman_mcclure_loss = define(
    name="geman_mcclure_loss",
    summary="Geman-McClure loss, bounded by 2.",
    formula="2 r^2 / (r^2 + 4), with r = (input - target) / scale",
    operands=(_INPUT, _TARGET),
    parameters=(_SCALE,),
    constants=_SHARPNESS,
    value="geman_mcclure((input - target) * sharpness)",
    reference=_geman_mcclure_reference,
    heavy=1,
    cases=({}, {"scale": 2.0}),
    notes=(
        "Scaled as by kornia and Barron. The other common form, r^2 / (r^2 + 1), is half of this loss at half "
        "the scale. Equals `general_robust_loss` with alpha = -2."
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
    summary="Wing loss: logarithmic and steep for small differences, absolute error for large ones.",
    formula="width log(1 + d / epsilon) where d < width, else d - width + width log(1 + width / epsilon), "
    "with d = |input - target|",
    operands=(_INPUT, _TARGET),
    parameters=(
        Parameter("width", 5.0, "Difference at which the two branches meet.", minimum=0.0, exclusive=True),
        Parameter(
            "epsilon",
            0.5,
            "Curvature of the logarithm: the slope at 0 is width / epsilon.",
            minimum=0.0,
            exclusive=True,
        ),
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
    heavy=1,
    tentative="true",
    kinks=_wing_kinks,
    convention="At input = target the gradient is 0. At d = width it is that of the absolute error.",
    cases=({}, {"width": 2.0, "epsilon": 4.0}),
    notes="The defaults are those of segmentation-models-pytorch; the paper uses width 10 and epsilon 2.",
    source="Z.-H. Feng, J. Kittler, M. Awais, P. Huber, X.-J. Wu, Wing loss for robust facial landmark localisation "
    "with convolutional neural networks, CVPR 2018.",
)

quantile_loss = define(
    name="quantile_loss",
    summary="Quantile (pinball) loss: absolute error weighted differently below and above the target.",
    formula="quantile (target - input) where input < target, else (1 - quantile) (input - target)",
    operands=(_INPUT, _TARGET),
    parameters=(Parameter("quantile", 0.5, "The quantile to predict.", minimum=0.0, maximum=1.0, exclusive=True),),
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


def _log1p_ratio(u):
    # log(1 + u) / u for small u.
    tangent = u / (2 + u)
    series = 0.0
    for k in range(25, 0, -2):
        series = series * tangent * tangent + 1 / k
    return 2 * series / (2 + u)


def _robust_series(z, b, sign):
    # The binomial series, used where it converges fast: the derivatives of all other formulas cancel there.
    term, total = 1.0, 1.0
    for k in range(1, 29):
        term = term * (0.5 * sign * z - (k - 1) * (z / b)) / k
        total = total + term / (k + 1)
    return 0.5 * z * total


def _robust_power(xp, alpha, b, sign, log, product, times_z):
    # Written in terms of log = log(1 + z / b) and product = b log, because z may overflow. times_z(x, there) returns
    # z e^x at the elements of the mask `there`.
    power = 0.5 * sign * product
    exponent = log + power  # equals (alpha / 2) log
    near_two = b < 0.5
    small = ~near_two & (xp.abs(exponent) < 2)
    one = xp.ones_like(log)
    zero = 0 * one
    series, v = 1.0, xp.where(small, exponent, zero)
    for k in range(24, 1, -1):
        series = 1 + series * v / k
    p, a = xp.where(near_two, power, zero), xp.where(small, one, alpha)
    near = (times_z(p, near_two) + b * xp.expm1(p)) / a
    far = b * (xp.exp(xp.where(near_two | small, zero, exponent)) - 1) / a
    return xp.where(small, 0.5 * product * series, xp.where(near_two, near, far))


def _general_reference(xp, input, target, alpha, scale):
    # In float64, neither the exponential nor the residual overflows before the loss does.
    kind = (input + target + alpha + scale).dtype
    input, target, alpha, scale = (xp.astype(x, xp.float64, copy=False) for x in (input, target, alpha, scale))
    d = input - target
    zero = xp.zeros_like(d + alpha + scale)
    one = zero + 1
    d, alpha, scale = d + zero, alpha + zero, scale + zero
    distance = xp.abs(alpha - 2)
    r = d / scale
    usual = (distance > 0) & (distance < _LARGE)
    beyond = ~(r * r < 2.0**100 * distance)
    smooth = (r * r <= 2) & (r * r <= 0.25 * distance)
    # If the power overflows, its derivatives would be inf - inf.
    log = xp.where(beyond, 2 * xp.log(xp.abs(d)) - 2 * xp.log(scale) - xp.log(distance), xp.log1p(r * r / distance))
    over = xp.where(usual, 0.5 * alpha * log, xp.where(alpha > 2, 0.5 * r * r, zero)) > 709
    usual = usual & ~over

    def choose(value, region, formula):
        # Each formula sees the elements of its own region, and 1 elsewhere.
        x, a, c = (xp.where(region, y, one) for y in (d, alpha, scale))
        return xp.where(region, formula(x, x / c, a, xp.abs(a - 2), xp.where(a > 2, one, -one), c), value)

    def endless(x, r, a, b, sign, c):
        large = xp.abs(r) > _LARGE
        half = 0.5 * xp.where(large & (sign < 0), one, r) ** 2
        falling = xp.where(half < 1, -xp.expm1(-half), 1 - xp.exp(-xp.where(half < 1, one, half)))
        rising = xp.expm1(xp.where(sign > 0, half, zero))
        return xp.where(sign > 0, rising, xp.where(large, one, falling))

    def far(x, r, a, b, sign, c):
        log_z = 2 * (xp.log(xp.abs(x)) - xp.log(c))
        log = log_z - xp.log(b)
        return _robust_power(xp, a, b, sign, log, b * log, lambda p, there: xp.exp(xp.where(there, log_z + p, zero)))

    def near(x, r, a, b, sign, c):
        u = r * r / b
        small = u < 0.5
        ratio, large = _log1p_ratio(xp.where(small, u, one)), xp.log1p(xp.where(small, one, u))
        # Each is written as a product with its leading factor; otherwise its derivatives would cancel.
        log, product = xp.where(small, u * ratio, large), xp.where(small, r * r * ratio, b * large)
        return _robust_power(xp, a, b, sign, log, product, lambda p, _: r * r * xp.exp(p))

    def infinite(x, r, a, b, sign, c):
        return xp.abs(x) / c * xp.where(b < _LARGE, a, one) * math.inf

    value = choose(zero, distance == 0, lambda x, r, a, b, sign, c: 0.5 * r * r)
    value = choose(value, (distance >= _LARGE) & ~over, endless)
    value = choose(value, over, infinite)
    value = choose(value, usual & beyond, far)
    value = choose(value, usual & ~beyond & smooth, lambda x, r, a, b, sign, c: _robust_series(r * r, b, sign))
    value = choose(value, usual & ~beyond & ~smooth, near)
    normal = scale >= 2.0**-1022
    return xp.astype(where_nan(xp, ~normal | ~xp.isfinite(d) | xp.isnan(alpha), value), kind, copy=False)


general_robust_loss = define(
    name="general_robust_loss",
    summary="Barron's general and adaptive robust loss; the smaller `alpha`, the less an outlier matters.",
    formula="(b / alpha) ((r^2 / b + 1)^(alpha / 2) - 1), with b = |alpha - 2| and r = (input - target) / scale",
    operands=(
        _INPUT,
        _TARGET,
        Operand("alpha", "The shape; infinities are allowed.", integer=True, number=True, default=1.0),
        Operand(
            "scale",
            "The scale of the residual, around which differences become outliers.",
            domain="positive",
            number=True,
            default=1.0,
        ),
    ),
    value="robust_loss(input - target, alpha, scale)",
    reference=_general_reference,
    heavy=2,
    tentative=(
        "(alpha == 0 || (alpha >= 0.0625 && alpha <= 4) || (alpha <= -0.0625 && alpha >= -4)) "
        "&& scale >= 1e-6 && scale <= 1e6"
    ),
    convention=(
        "The derivative with respect to `alpha` is 0 at alpha = 2, where the true one is infinite, and where |alpha| "
        "exceeds 2^60, which is treated as infinite."
    ),
    notes=(
        "alpha = 2 gives half the squared error, 1 `charbonnier_loss`, 0 `cauchy_loss`, -2 `geman_mcclure_loss` and "
        "-inf `welsch_loss`. These limits are exact, and values and derivatives near them are as accurate as "
        "elsewhere. The loss is NaN for an infinite difference and for a scale that is not positive. To learn `alpha` "
        "and `scale`, add log(scale) and the logarithm of the partition function, which depends on `alpha`."
    ),
    source="J. T. Barron, A general and adaptive robust loss function, CVPR 2019.",
)
