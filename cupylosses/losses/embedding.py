"""Losses of vectors: cosines of pairs."""

from math import nan

from cupylosses.definition.base import Operand, Parameter
from cupylosses.engines.row_statistics.definition import define_statistics
from cupylosses.reference_math import detached


def _cosine(xp, input1, input2, eps):
    """The cosine of each pair of rows; 0, with derivatives 0, where one of them is zero."""
    dot = xp.sum(input1 * input2, axis=-1)
    xx, yy = (xp.sum(x * x, axis=-1) for x in (input1, input2))
    nowhere = (xx == 0) | (yy == 0)
    one = xp.ones_like(dot)
    length = xp.sqrt(xp.where(nowhere, one, xx + eps)) * xp.sqrt(xp.where(nowhere, one, yy + eps))
    return xp.where(nowhere, dot * 0, dot / length)


def _cosine_embedding_reference(xp, input1, input2, target, margin, eps):
    c = _cosine(xp, input1, input2, eps)
    zero, apart, excess = xp.zeros_like(c), 1 - c, c - margin
    # Derivatives pass where 1 - c is below 0 by rounding only.
    similar = apart - xp.where(apart < 0, detached(apart), zero)
    value = xp.where(target > 0, similar, xp.where(excess < 0, zero, excess))
    return xp.where((target > 0) | (target < 0), value, zero + nan)


cosine_embedding_loss = define_statistics(
    name="cosine_embedding_loss",
    summary="Cosine embedding loss: one minus the cosine of similar pairs, and the hinge of that of dissimilar pairs.",
    formula="1 - c where target > 0, max(0, c - margin) where target < 0, with "
    "c = <input1, input2> / sqrt((|input1|^2 + eps) (|input2|^2 + eps))",
    operands=(Operand("input1", "The first vectors."), Operand("input2", "The vectors to compare with.")),
    row_operands=(
        Operand(
            "target",
            "The label: +1 for similar pairs, -1 for dissimilar ones. Only its sign matters; the loss is NaN where it "
            "is 0.",
            domain="sign",
            integer=True,
        ),
    ),
    parameters=(
        Parameter("margin", 0.0, "Cosine up to which a dissimilar pair has loss 0."),
        Parameter("eps", 1e-12, "Added to each squared length; 0 for the exact cosine.", minimum=0.0),
    ),
    constants={"zero": "0"},
    statistics={"dot": "input1 * input2", "xx": "square(input1)", "yy": "square(input2)"},
    let={"c": "cosine(dot, xx, yy, eps)"},
    value="nan_unless(abs(target) > 0, where(target > 0, at_least(1 - c, zero), relu_active(c - margin)))",
    reference=_cosine_embedding_reference,
    torch="cosine_embedding_loss",
    module="CosineEmbeddingLoss",
    positional="input1 input2 target margin size_average reduce reduction",
    convention="At c = margin a dissimilar pair is active. A vector of zeros has no direction: c is 0, with gradient 0 "
    "with respect to both vectors. The label has gradient 0.",
    cases=({}, {"margin": 0.5}, {"eps": 0.0}),
    source="R. Hadsell, S. Chopra, Y. LeCun, Dimensionality reduction by learning an invariant mapping, CVPR 2006.",
)
