"""Divergences between distributions, as a summand per element."""

from math import inf

from cupylosses.definition.base import Flag, Kink, Operand, Parameter
from cupylosses.engines.pointwise.definition import define
from cupylosses.reference_math import itakura_saito, log_ratio, of_degree_one, relative_entropy, where_nan


def _log_ratio(xp, a, b):
    # log(a / b) without the cancellation of log(a) - log(b), where the quotient is in range. Each branch gets harmless
    # operands where it is not chosen, because a NaN of the real operands would reach the gradient.
    less = a < b
    high, low = xp.where(less, b, a), xp.where(less, a, b)
    near = (low > 0) & (high < 1e30 * low)
    one = xp.ones_like(high)
    excess = (xp.where(near, high, one) - xp.where(near, low, one)) / xp.where(near, low, one)
    ratio = xp.where(near, xp.log1p(excess), xp.log(xp.where(near, one, high)) - xp.log(xp.where(near, one, low)))
    return xp.where(less, -ratio, ratio)


def kl_reference(xp, input, target, log_target, log_input):
    # If the target has no mass, the term and its gradient are 0 for any finite or infinite prediction. Both operands
    # are replaced there first, so that neither 0 * log 0 nor 0 * inf arises.
    empty = (xp.exp(target) if log_target else target) == 0
    one = xp.ones_like(target)
    t = xp.where(empty, 0.0 * one if log_target else one, target)
    x = xp.where(empty & ~xp.isnan(input), 0.0 * one if log_input else one, input)
    if log_target:
        term = xp.exp(t) * (t - (x if log_input else xp.log(x)))
    else:
        term = t * (xp.log(t) - x if log_input else _log_ratio(xp, t, x))
    return xp.where(empty & ~xp.isnan(input), xp.zeros_like(term), term)


def _kl_kinks(log_target, log_input):
    inf = float("inf")
    x = -1.5 if log_input else 0.25
    empty = -inf if log_target else 0.0
    impossible = -inf if log_input else 0.0
    return [Kink((x, empty), 0.0, (0.0, 0.0)), Kink((impossible, empty), 0.0, (0.0, 0.0))]


kl_div = define(
    name="kl_div",
    summary="Kullback-Leibler divergence KL(target || prediction).",
    formula="target (log(target) - input), with the log-probability input",
    operands=(
        Operand(
            "input",
            "The predicted distribution as log-probabilities, or as probabilities with `log_input=False`.",
            domain=("log_input", {True: "log_probability", False: "probability"}),
        ),
        Operand(
            "target",
            "The true distribution as probabilities, or as log-probabilities with `log_target=True`.",
            domain=("log_target", {True: "log_probability", False: "probability"}),
        ),
    ),
    flags=(
        Flag("log_target", False, "If True, `target` holds log-probabilities; otherwise it holds probabilities."),
        Flag(
            "log_input",
            True,
            "If True, `input` holds log-probabilities; otherwise it holds probabilities, and the kernel takes the "
            "logarithm.",
        ),
    ),
    let={
        "mass": "where(log_target, exp(target), target)",
        "from_log": "where(log_target, mass * (target - input), times_log(target, input))",
        "from_probability": "where(log_target, mass * (target - log(input)), times_log_ratio(target, input))",
    },
    value="where(mass == 0, zero_unless_nan(input), where(log_input, from_log, from_probability))",
    reference=kl_reference,
    torch="kl_div",
    positional="input target size_average reduce reduction log_target",
    module="KLDivLoss",
    kinks=_kl_kinks,
    convention="Where the target probability is 0, value and gradients are 0, even if the predicted one is 0 too.",
    cases=({}, {"log_target": True}, {"log_input": False}, {"log_target": True, "log_input": False}),
    notes=(
        "Reduction 'mean' divides by the number of elements, as in torch. 'batchmean', which divides by the size of "
        "the first dimension, is the divergence averaged over the batch."
    ),
    source="S. Kullback, R. A. Leibler, On information and sufficiency, Annals of Mathematical Statistics 22, 1951.",
)


def _generalized_kl_reference(xp, input, target):
    empty = (target == 0) & (input >= 0)
    one = xp.ones_like(target)
    # If the target is 0, the derivative with respect to it would be -inf.
    t, x = xp.where(empty, one, target), xp.where(empty, one, input)
    ordinary = (t > 0) & (x > 0)
    safe_t, safe_x = xp.where(ordinary, t, one), xp.where(ordinary, x, one)
    value = relative_entropy(xp, safe_t, safe_x, safe_t - safe_x)
    value = xp.where(ordinary, value, t * (xp.log(t) - xp.log(x)) - t + x)
    value = xp.where(empty, xp.where(empty, input, one), value)
    return where_nan(xp, xp.isinf(input) | xp.isinf(target), value)


generalized_kl_div = define(
    name="generalized_kl_div",
    summary="Generalized Kullback-Leibler divergence, for measures that need not sum to 1; no element is negative.",
    formula="target log(target / input) - target + input",
    operands=(
        Operand("input", "The prediction, for example an intensity.", domain="positive"),
        Operand("target", "The ground truth, for example a count.", domain="nonnegative", integer=True),
    ),
    value="relative_entropy(target, input)",
    reference=_generalized_kl_reference,
    heavy=2,
    tentative="true",
    kinks=lambda: [Kink((0.25, 0.0), 0.25, (1.0, 0.0)), Kink((0.0, 0.0), 0.0, (1.0, 0.0))],
    convention=(
        "Where `target` is 0, the gradient with respect to it is 0. Where `input` is 0 and `target` is positive, the "
        "loss is infinite."
    ),
    notes=(
        "Also known as I-divergence, and as half the deviance of a Poisson distribution. An infinite or negative "
        "operand gives NaN. For distributions the sum equals that of `kl_div`, whose elements have both signs, so that "
        "rounding can make its sum negative. Equals the loss of optax, except that `input` is the prediction, not its "
        "logarithm."
    ),
    source="I. Csiszar, Why least squares and maximum entropy? Annals of Statistics 19, 1991.",
)


def _itakura_saito_reference(xp, input, target):
    ordinary = (target > 0) & (input > 0)
    one = xp.ones_like(target)
    value = itakura_saito(xp, xp.where(ordinary, target, one), xp.where(ordinary, input, one))
    silent = (input == 0) & (target > 0)
    limit = xp.where(silent, target, one) / xp.where(silent, input, one)
    t, x = xp.where(ordinary | silent, one, target), xp.where(ordinary | silent, one, input)
    value = xp.where(ordinary, value, xp.where(silent, limit, t / x - xp.log(t) + xp.log(x)))
    return where_nan(xp, xp.isinf(input) | xp.isinf(target), value)


itakura_saito_loss = define(
    name="itakura_saito_loss",
    summary="Itakura-Saito divergence of power spectra, which depends on their ratio only.",
    formula="target / input - log(target / input) - 1",
    operands=(
        Operand("input", "The predicted power.", domain="positive"),
        Operand("target", "The true power.", domain="positive", integer=True),
    ),
    value="itakura_saito(target, input)",
    reference=_itakura_saito_reference,
    heavy=2,
    tentative="true",
    notes="The loss is infinite where one operand is 0, and NaN where both are 0 or one is negative or infinite.",
    source="F. Itakura, S. Saito, Analysis synthesis telephony based on the maximum likelihood method, 6th "
    "International Congress on Acoustics, 1968.",
)


_TINY = 2.0**-100


def js_reference(xp, input, target, beta, log_target, log_input):
    p = xp.exp(target) if log_target else target
    q = xp.exp(input) if log_input else input
    zero, one = xp.zeros_like(p + q), xp.ones_like(p + q)
    no_p, no_q = p == 0, q == 0
    # If a probability is 0, its derivative is 0 by convention, so it becomes a constant.
    p, q = xp.where(no_p, zero, p), xp.where(no_q, zero, q)
    difference = p - q
    if log_target and log_input:
        both = ~(no_p & no_q)
        t, x = xp.where(both, target, zero), xp.where(both, input, zero)
        above = t > x
        fraction = xp.expm1(xp.where(above, x - t, t - x))
        difference = xp.where(above, -p, q) * xp.where(both, fraction, zero)
    if beta in (0, 1):
        a, b, gap, nothing = (p, q, difference, no_p) if beta == 0 else (q, p, -difference, no_q)
        a, b, gap = xp.where(nothing, one, a), xp.where(nothing, one, b), xp.where(nothing, zero, gap)
        value = xp.where(nothing, zero, a * log_ratio(xp, a, b, gap))
    else:
        # Numbers so small that their products underflow are scaled up. The loss is homogeneous of degree one, so by
        # Euler's formula its value follows from the derivatives.
        tiny = (p < _TINY) & (q < _TINY)
        scale = xp.where(tiny, one * 2.0**32, one)
        gap = difference * scale
        mean, value, linear = q * scale + beta * gap, zero, zero
        for mass, nothing, weight, moved in ((p, no_p, beta, (1 - beta) * gap), (q, no_q, 1 - beta, -beta * gap)):
            a, b = xp.where(nothing, one, mass * scale), xp.where(nothing, one, mean)
            excess = xp.where(nothing, zero, moved)
            value = value + weight * xp.where(nothing, mean, relative_entropy(xp, a, b, excess))
            linear = linear + of_degree_one(mass, weight * log_ratio(xp, a, b, excess))
        value = xp.where(tiny, linear, value)
    finite = (p >= 0) & (q >= 0) & xp.isfinite(p) & xp.isfinite(q)
    return where_nan(xp, ~finite, xp.where(no_p & no_q, zero, value))


js_div = define(
    name="js_div",
    summary="Generalized Jensen-Shannon divergence of prediction and target.",
    formula="beta p log(p / m) + (1 - beta) q log(q / m), with m = beta p + (1 - beta) q, p = target and "
    "q = exp(input); p log(p / q) if beta = 0, and q log(q / p) if beta = 1",
    operands=(
        Operand(
            "input",
            "The predicted distribution q as log-probabilities, or as probabilities with `log_input=False`.",
            domain=("log_input", {True: "log_probability", False: "probability"}),
        ),
        Operand(
            "target",
            "The true distribution p as probabilities, or as log-probabilities with `log_target=True`.",
            domain=("log_target", {True: "log_probability", False: "probability"}),
        ),
    ),
    parameters=(Parameter("beta", 0.5, "Weight of the target in the mixture m.", minimum=0.0, maximum=1.0),),
    flags=(
        Flag("log_target", False, "If True, `target` holds log-probabilities; otherwise it holds probabilities."),
        Flag(
            "log_input",
            True,
            "If True, `input` holds log-probabilities; otherwise it holds probabilities, and the kernel takes the "
            "logarithm.",
        ),
    ),
    constants={"rest": "1 - beta"},
    let={
        "p": "where(log_target, exp(target), target)",
        "q": "where(log_input, exp(input), input)",
        "difference": "where(log_target && log_input, exp_difference(target, input), p - q)",
    },
    value="jensen_shannon(p, q, difference, beta, rest)",
    reference=js_reference,
    heavy=3,
    tentative="beta == 0.5",
    kinks=lambda beta, log_target, log_input: [
        Kink((-inf if log_input else 0.0, -inf if log_target else 0.0), 0.0, (0.0, 0.0))
    ],
    convention="Where p or q is 0, the gradient with respect to it is 0.",
    cases=(
        {},
        {"log_target": True},
        {"log_input": False, "beta": 0.1},
        {"log_target": True, "log_input": False},
        {"log_target": True, "beta": 0.0},
        {"log_input": False, "beta": 1.0},
    ),
    notes=(
        "No element is negative for beta strictly between 0 and 1. The divergence is the sum over a distribution, so "
        "its average over the batch is reduction 'batchmean'. As in Liger Kernel, beta = 0 and beta = 1 give the "
        "Kullback-Leibler divergences instead of the limits, which are 0."
    ),
    source="J. Lin, Divergence measures based on the Shannon entropy, IEEE Transactions on Information Theory 37, "
    "1991.",
)


tv_distance = define(
    name="tv_distance",
    summary="Total variation distance between distributions.",
    formula="|input - target| / 2",
    operands=(
        Operand("input", "The predicted probabilities.", domain="probability"),
        Operand("target", "The true probabilities.", domain="probability"),
    ),
    value="0.5 * abs(input - target)",
    reference=lambda xp, input, target: 0.5 * xp.abs(input - target),
    kinks=lambda: [Kink((0.25, 0.25), 0.0, (0.0, 0.0))],
    convention="At input = target the gradient is 0.",
    notes="The distance is the sum over a distribution, so its average over the batch is reduction 'batchmean'.",
    source="A. L. Gibbs, F. E. Su, On choosing and bounding probability metrics, International Statistical Review 70, "
    "2002.",
)
