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


def _cosine_loss_reference(xp, input, target, eps):
    dot = xp.sum(input * target, axis=-1)
    squares = [xp.sum(x * x, axis=-1) for x in (input, target)]
    nowhere = (squares[0] == 0) | (squares[1] == 0)
    one = xp.ones_like(dot)
    lengths = [xp.sqrt(xp.where(nowhere, one, x)) for x in squares]
    first, second = (xp.where(x < eps, eps * one, x) for x in lengths)
    c = xp.where(nowhere, dot * 0, dot / (first * second))
    # Derivatives pass where 1 - c is below 0 by rounding only.
    return 1 - c - xp.where(c > 1, detached(1 - c), xp.zeros_like(c))


cosine_loss = define_statistics(
    name="cosine_loss",
    summary="One minus the cosine of two vectors.",
    formula="1 - <input, target> / (max(|input|, eps) max(|target|, eps))",
    operands=(Operand("input", "The predicted vectors."), Operand("target", "The vectors to point along.")),
    parameters=(Parameter("eps", 1e-8, "Length that shorter vectors count as; 0 for the exact cosine.", minimum=0.0),),
    constants={"zero": "0"},
    statistics={"dot": "input * target", "xx": "square(input)", "yy": "square(target)"},
    value="at_least(1 - cosine_at_least(dot, xx, yy, eps), zero)",
    reference=_cosine_loss_reference,
    convention="A vector of zeros has no direction: the cosine is 0, with gradient 0 with respect to both vectors. The "
    "length of a vector shorter than `eps` is a constant.",
    cases=({}, {"eps": 0.0}),
    notes="The cosine is that of `torch.nn.functional.cosine_similarity`, without its values beyond 1. Gradients of "
    "vectors shorter than `eps` are those of the value, which torch's are not.",
    source="J. Bromley et al., Signature verification using a Siamese time delay neural network, NIPS 1993.",
)
