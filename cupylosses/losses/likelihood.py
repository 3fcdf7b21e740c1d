"""Negative log-likelihoods of a target under the predicted parameters of its distribution."""

from math import inf, log, pi

from cupylosses.definition.base import Flag, Kink, Operand, Parameter
from cupylosses.engines.pointwise.definition import define
from cupylosses.reference_math import detached, log_factorial, stirling_remainder, where_nan, with_derivative_of


def _log_of_sum(xp, x, eps):
    # If x is close to 1, the rounding error of x + eps is as large as the logarithm.
    one = xp.ones_like(x)
    split = (x > eps) & (x < inf)
    safe = detached(xp.where(split, x, one))
    true = xp.log(safe) + xp.log1p(eps / safe)
    return xp.where(split, with_derivative_of(true, xp.log(xp.where(split, x + eps, one))), xp.log(x + eps))


def _product(xp, rate, target, factor):
    # If both overflow, the rate is larger, so the product is dropped. Its derivative with respect to the target (the
    # factor) is kept.
    product = target * factor
    both = xp.isinf(rate) & xp.isinf(product) & xp.isfinite(factor)
    return xp.where(both, (target - detached(target)) * xp.where(both, factor, xp.zeros_like(factor)), product)


def _deviance(xp, rate, log_ratio, target):
    # rate - target - target log_ratio, with log_ratio = log(rate / target). Where the rate is close to the target, this
    # cancels, and is computed as target (exp(log_ratio) - 1 - log_ratio), by a series.
    near = xp.abs(log_ratio) < 0.5
    zero = xp.zeros_like(log_ratio)
    u = xp.where(near, log_ratio, zero)
    series = zero + 1
    for k in range(15, 2, -1):
        series = 1 + u * series / k
    far = xp.where(near, zero, rate) - _product(xp, rate, target, 1 + xp.where(near, zero, log_ratio))
    return xp.where(near, 0.5 * target * u * u * series, far)


def _poisson_reference(xp, input, target, eps, log_input, full):
    zero, one = xp.zeros_like(input), xp.ones_like(input)
    large = (target > 1) & (target < inf) & (full is not False)
    rate = xp.exp(input) if log_input else input + eps
    # 0 log 0 = 0 log inf = 0, and so are their derivatives.
    nothing = (target == 0) & (xp.isinf(input) if log_input else (rate == 0) | xp.isinf(rate))
    safe = xp.where(nothing | large, one, input)
    log_rate = xp.where(nothing, zero, safe if log_input else _log_of_sum(xp, safe, eps))
    plain = (rate if log_input else input) - _product(xp, rate, target, log_rate)
    if full is False:
        return plain
    # For targets above 1, the part target log(target) - target of log(target!) is combined with the other terms, most
    # of which it cancels.
    count = xp.where(large, target, xp.ones_like(target))
    log_rate = xp.where(large, input, zero) if log_input else xp.log(xp.where(large, rate, one))
    deviance = _deviance(xp, rate, log_rate - xp.log(count), count) - (0.0 if log_input else eps)
    with_factorial = deviance + 0.5 * xp.log(2 * pi * count)
    if full is True:
        return xp.where(large, with_factorial, where_nan(xp, target == inf, plain))
    small = (target >= 0) & (target <= 1)
    factorial = log_factorial(xp, xp.where(small, target, xp.zeros_like(target)))
    return xp.where(large, with_factorial + stirling_remainder(xp, count), where_nan(xp, ~small, plain + factorial))


def _poisson_kinks(eps, log_input, full):
    if full == "exact":
        return []
    if log_input:
        return [Kink((-inf, 0.0), 0.0, (0.0, 0.0)), Kink((0.0, 1.0), 1.0, (0.0, 0.0))]
    return [Kink((0.0, 0.0), 0.0, (1.0, 0.0))] if eps == 0 else []


poisson_nll_loss = define(
    name="poisson_nll_loss",
    summary="Poisson negative log-likelihood of counts, given the rate or its logarithm.",
    formula="exp(input) - target input if log_input, else input - target log(input + eps); plus log(target!) if full",
    operands=(
        Operand(
            "input",
            "The logarithm of the rate, or with `log_input=False` the rate; the loss is NaN where a rate is negative.",
            domain=("log_input", {True: "real", False: "positive"}),
        ),
        Operand(
            "target",
            "The count; it need not be an integer.",
            domain=("full", {False: "nonnegative", True: "nonnegative", "exact": "positive"}),
            integer=True,
        ),
    ),
    parameters=(Parameter("eps", 1e-8, "Added to the rate before the logarithm, if `log_input=False`.", minimum=0.0),),
    flags=(
        Flag("log_input", True, "If True, `input` is the logarithm of the rate; otherwise it is the rate."),
        Flag(
            "full",
            False,
            "Adds the term log(target!): if True, Stirling's approximation where target > 1, as in torch; if 'exact', "
            "the term itself, log Gamma(1 + target).",
            choices=(False, True, "exact"),
        ),
    ),
    value="where(log_input, poisson_of_log_rate(input, target, full), poisson_of_rate(input, target, eps, full))",
    reference=_poisson_reference,
    heavy=1,
    torch="poisson_nll_loss",
    module="PoissonNLLLoss",
    positional="input target log_input full size_average eps reduce reduction",
    kinks=_poisson_kinks,
    convention=(
        "Where `target` is 0, target log(rate) is 0 for any rate, with derivatives of 0 where the logarithm is "
        "infinite. At target = 1 the gradient is that without Stirling's approximation."
    ),
    cases=(
        {},
        {"full": True},
        {"full": "exact"},
        {"log_input": False},
        {"log_input": False, "full": True},
        {"log_input": False, "full": "exact"},
        {"log_input": False, "eps": 0.0},
    ),
    source="P. McCullagh, J. A. Nelder, Generalized Linear Models, second edition, 1989.",
)


def _gaussian_reference(xp, input, target, var, eps, full):
    variance = var + detached(xp.where(var < eps, eps - var, xp.zeros_like(var)))
    difference = input - target
    value = 0.5 * (xp.log(variance) + difference * (difference / variance))
    return where_nan(xp, var < 0, value + 0.5 * log(2 * pi) if full else value)


gaussian_nll_loss = define(
    name="gaussian_nll_loss",
    summary="Gaussian negative log-likelihood of a target, given mean and variance.",
    formula="(log(v) + (input - target)^2 / v) / 2, with v = max(var, eps); plus log(2 pi) / 2 if full",
    operands=(
        Operand("input", "The predicted mean.", integer=True),
        Operand("target", "The ground truth.", integer=True),
        Operand(
            "var",
            "The predicted variance; the loss is NaN where it is negative.",
            domain="positive",
            integer=True,
            number=True,
            per_row=True,
        ),
    ),
    parameters=(Parameter("eps", 1e-6, "Lower bound of the variance.", minimum=0.0),),
    flags=(Flag("full", False, "If True, adds the constant log(2 pi) / 2."),),
    let={
        "variance": "nan_unless(var >= 0, at_least(var, eps))",
        "plain": "0.5 * log(variance) + half_square_over(input - target, variance)",
    },
    value="where(full, plain + 0.91893853320467274, plain)",
    reference=_gaussian_reference,
    heavy=1,
    torch="gaussian_nll_loss",
    module="GaussianNLLLoss",
    positional="input target var full eps reduction",
    convention="Where var < eps, the gradients are those at v = eps, with respect to `var` too, so that it can "
    "recover.",
    cases=({}, {"full": True}),
    notes="A negative `var` gives NaN instead of an error, so that the host does not wait for the GPU.",
    source=(
        "D. A. Nix, A. S. Weigend, Estimating the mean and variance of the target probability distribution, IEEE "
        "International Conference on Neural Networks, 1994."
    ),
)
