"""Divergences between distributions, element by element."""

from cupylosses.definition import Flag, Kink, Operand, define


def _log_ratio(xp, a, b):
    # log(a / b) without the digits that log(a) - log(b) cancels, where the quotient is in range; each branch is kept
    # from operands that it is not chosen for, because their NaN would reach the gradient.
    less = a < b
    high, low = xp.where(less, b, a), xp.where(less, a, b)
    near = (low > 0) & (high < 1e30 * low)
    one = xp.ones_like(high)
    excess = (xp.where(near, high, one) - xp.where(near, low, one)) / xp.where(near, low, one)
    ratio = xp.where(near, xp.log1p(excess), xp.log(xp.where(near, one, high)) - xp.log(xp.where(near, one, low)))
    return xp.where(less, -ratio, ratio)


def _kl_reference(xp, input, target, log_target, log_input):
    # Where the target has no mass the term is 0 with gradient 0 whatever finite or infinite the other operand is,
    # so both operands are replaced there before anything is computed: 0 * log 0 and 0 * inf never arise.
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
    summary="Kullback-Leibler divergence of the prediction from the target, element by element.",
    formula="target (log target - input), with input = log of the predicted probability",
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
        Flag("log_target", False, "Whether `target` holds log-probabilities."),
        Flag("log_input", True, "Whether `input` holds log-probabilities; False fuses the logarithm in."),
    ),
    let={
        "mass": "where(log_target, exp(target), target)",
        "from_log": "where(log_target, mass * (target - input), times_log(target, input))",
        "from_probability": "where(log_target, mass * (target - log(input)), times_log_ratio(target, input))",
    },
    value="where(mass == 0, zero_unless_nan(input), where(log_input, from_log, from_probability))",
    reference=_kl_reference,
    torch="kl_div",
    positional="input target size_average reduce reduction log_target",
    module="KLDivLoss",
    kinks=_kl_kinks,
    convention="Where the target has no mass, value and both gradients are 0, also against an impossible prediction.",
    cases=({}, {"log_target": True}, {"log_input": False}, {"log_target": True, "log_input": False}),
    notes=(
        "`mean` divides by the number of elements, as torch does; `batchmean`, which divides by the size of the first "
        "dimension of the broadcast shape, is the divergence itself."
    ),
    source="S. Kullback, R. A. Leibler, On information and sufficiency, Annals of Mathematical Statistics 22, 1951.",
)
