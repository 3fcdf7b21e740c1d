"""Divergences between distributions, element by element."""

from cupylosses.definition import Flag, Kink, Operand, define


def _kl_reference(xp, input, target, log_target, log_input):
    # Where the target has no mass the term is 0 with gradient 0 whatever finite or infinite the other operand is,
    # so both operands are replaced there before anything is computed: 0 * log 0 and 0 * inf never arise.
    mass = xp.exp(target) if log_target else target
    empty = mass == 0
    stand_in = xp.ones_like(target)
    target = xp.where(empty, 0.0 * stand_in if log_target else stand_in, target)
    x = xp.where(empty & ~xp.isnan(input), 0.0 * stand_in if log_input else stand_in, input)
    log_t = target if log_target else xp.log(target)
    mass = xp.exp(target) if log_target else target
    term = mass * (log_t - (x if log_input else xp.log(x)))
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
    # Between two probabilities the logarithm of the ratio keeps the digits that a difference of logarithms cancels.
    let={
        "mass": "where(log_target, exp(target), target)",
        "log_mass": "where(log_target, target, log(target))",
        "log_ratio_": (
            "where(log_input, log_mass - input, where(log_target, target - log(input), log_ratio(target, input)))"
        ),
    },
    value="where(mass == 0, zero_unless_nan(input), mass * log_ratio_)",
    reference=_kl_reference,
    torch="kl_div",
    legacy=True,
    batchmean=True,
    kinks=_kl_kinks,
    convention="Where the target has no mass, value and both gradients are 0, also against an impossible prediction.",
    cases=({}, {"log_target": True}, {"log_input": False}, {"log_target": True, "log_input": False}),
    notes=(
        "`mean` divides by the number of elements, as torch does; `batchmean`, which divides by the size of the first "
        "dimension of the broadcast shape, is the divergence itself."
    ),
    source="S. Kullback, R. A. Leibler, On information and sufficiency, Annals of Mathematical Statistics 22, 1951.",
)
