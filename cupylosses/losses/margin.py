"""Losses of a margin: the prediction times a label of -1 or +1."""

from cupylosses.definition import Kink, Operand, Parameter, define


def _hinge_reference(xp, input, target, margin):
    # An inactive element has gradient 0 also where an operand is infinite, so the product is not formed there.
    inactive = margin - input * target < 0
    zero = xp.zeros_like(input * target)
    product = xp.where(inactive, zero, input) * xp.where(inactive, zero, target)
    return xp.where(inactive, zero, margin - product)


hinge_loss = define(
    name="hinge_loss",
    summary="Hinge loss of a margin classifier, element by element, with broadcasting.",
    formula="max(0, margin - input * target)",
    operands=(
        Operand("input", "The score."),
        Operand("target", "The label, -1 or +1; any number is taken as it is.", domain="sign", integer=True),
    ),
    parameters=(Parameter("margin", 1.0, "The product above which an element costs nothing."),),
    value="relu_active(margin - input * target)",
    reference=_hinge_reference,
    kinks=lambda margin: [Kink((margin, 1.0), 0.0, (-1.0, -margin))],
    convention="At input * target = margin the element counts as active: the gradient is (-target, -input).",
    cases=({}, {"margin": 0.5}),
    notes=(
        "A target of shape (D,) belongs to the columns of an input (N, D), as everywhere in NumPy and torch; "
        "one target per row is `target[:, None]`."
    ),
    source="C. Cortes, V. Vapnik, Support-vector networks, Machine Learning 20, 1995.",
)
