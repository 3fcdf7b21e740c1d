"""Correlation losses of rows of predictions and rows of targets."""

from cupylosses.definition.base import Flag, Operand
from cupylosses.engines.row_statistics.definition import define_statistics
from cupylosses.reference_math import detached

_OPERANDS = (Operand("input", "The predictions."), Operand("target", "The values to agree with."))
#: Sums, and sums of squares, of differences from the first element of the row.
_MOMENTS = {
    "sx": "input - x0",
    "sy": "target - y0",
    "qx": "square(input - x0)",
    "qy": "square(target - y0)",
}
_VARIANCES = {"xx": "qx - square(sx) / count", "yy": "qy - square(sy) / count"}


def _centred(xp, x):
    """Rows minus their mean: exactly 0 if they are constant."""
    x = x - detached(x[..., :1])
    return x - xp.sum(x, axis=-1)[..., None] / max(x.shape[-1], 1)


def _pearson_reference(xp, input, target):
    x, y = _centred(xp, input), _centred(xp, target)
    xx, yy = (xp.sum(z * z, axis=-1) for z in (x, y))
    constant = (xx == 0) | (yy == 0)
    one = xp.ones_like(xx)
    lengths = xp.sqrt(xp.where(constant, one, xx)) * xp.sqrt(xp.where(constant, one, yy))
    dot = xp.sum(x * y, axis=-1)
    apart = 1 - xp.where(constant, dot * 0, dot / lengths)
    # If rounding makes it negative, the value becomes 0 and the derivatives are kept.
    return apart - xp.where(apart < 0, detached(apart), xp.zeros_like(apart))


pearson_loss = define_statistics(
    name="pearson_loss",
    summary="One minus Pearson's correlation of two rows.",
    formula="1 - sum (x - mean x) (y - mean y) / sqrt(sum (x - mean x)^2 sum (y - mean y)^2), with x = input, "
    "y = target",
    operands=_OPERANDS,
    constants={"zero": "0"},
    first={"x0": "input", "y0": "target"},
    statistics={**_MOMENTS, "qxy": "(input - x0) * (target - y0)"},
    let={**_VARIANCES, "xy": "qxy - sx * sy / count"},
    value="at_least(1 - cosine(xy, xx, yy, zero), zero)",
    reference=_pearson_reference,
    convention="A constant row correlates with nothing: the loss is 1, with gradient 0 with respect to both rows.",
    notes="The loss is invariant to shift and scale of either row. Differences from the first element of each row are "
    "summed in float64, so that a large mean costs no digits.",
    source="K. Pearson, Notes on regression and inheritance in the case of two parents, Proceedings of the Royal "
    "Society of London 58, 1895.",
)


def _ccc_reference(xp, input, target, unbiased):
    x, y = _centred(xp, input), _centred(xp, target)
    count = max(input.shape[-1], 1)
    shift = xp.sum(input - target, axis=-1) / count
    factor = count - 1 if unbiased else count
    difference = input - target
    apart = xp.sum(difference * difference, axis=-1) - (shift * shift if unbiased else 0)
    total = xp.sum(x * x, axis=-1) + xp.sum(y * y, axis=-1) + factor * shift * shift
    nothing = total == 0
    return xp.where(nothing, xp.zeros_like(total), apart / xp.where(nothing, xp.ones_like(total), total))


ccc_loss = define_statistics(
    name="ccc_loss",
    summary="One minus Lin's concordance correlation coefficient of two rows.",
    formula="1 - 2 s_xy / (s_xx + s_yy + (mean x - mean y)^2), with the covariances s, x = input, y = target",
    operands=_OPERANDS,
    flags=(Flag("unbiased", False, "If True, covariances are divided by D - 1 instead of D, the number of features."),),
    first={"x0": "input", "y0": "target"},
    statistics={**_MOMENTS, "qd": "square(input - target)"},
    let={
        **_VARIANCES,
        "shift": "(x0 - y0) + (sx - sy) / count",
        "degrees": "where(unbiased, count - 1, count)",
        "apart": "qd - where(unbiased, square(shift), 0 * shift)",
        "total": "xx + yy + degrees * square(shift)",
    },
    value="where(total == 0, 0 * total, apart / total)",
    reference=_ccc_reference,
    convention="Two equal constant rows have loss and gradient 0.",
    cases=({}, {"unbiased": True}),
    notes="Unlike Pearson's correlation, the coefficient is 1 only if the rows are equal: shift and scale cost. "
    "Differences are summed in float64, so that neither a large mean nor nearly equal rows cost digits.",
    source="L. I. Lin, A concordance correlation coefficient to evaluate reproducibility, Biometrics 45, 1989.",
)
