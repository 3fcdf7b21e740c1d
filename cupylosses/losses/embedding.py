"""Losses and functions of vectors: cosines and distances of pairs, and triplets."""

from math import inf, nan

from cupylosses.definition.base import Flag, Operand, Parameter
from cupylosses.definition.registry import remember
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.row_statistics.definition import (
    StatisticsLoss,
    define_statistics,
    define_statistics_function,
)
from cupylosses.engines.row_statistics.distance import DistanceLoss
from cupylosses.reference_math import detached


def _cosine(xp, input1, input2, eps):
    """Cosine of each pair of rows; 0, with derivatives 0, if one of the rows is zero."""
    dot = xp.sum(input1 * input2, axis=-1)
    xx, yy = (xp.sum(x * x, axis=-1) for x in (input1, input2))
    nowhere = (xx == 0) | (yy == 0)
    one = xp.ones_like(dot)
    length = xp.sqrt(xp.where(nowhere, one, xx + eps)) * xp.sqrt(xp.where(nowhere, one, yy + eps))
    return xp.where(nowhere, dot * 0, dot / length)


def _cosine_embedding_reference(xp, input1, input2, target, margin, eps):
    c = _cosine(xp, input1, input2, eps)
    zero, apart, excess = xp.zeros_like(c), 1 - c, c - margin
    # If rounding makes 1 - c negative, the value becomes 0 and the derivatives are kept.
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


def _cosine_at_least(xp, x1, x2, eps):
    """Cosine of each pair of rows, whose lengths count as eps if they are below eps; it may exceed 1 by rounding."""
    dot = xp.sum(x1 * x2, axis=-1)
    squares = [xp.sum(x * x, axis=-1) for x in (x1, x2)]
    nowhere = (squares[0] == 0) | (squares[1] == 0)
    one = xp.ones_like(dot)
    lengths = [xp.sqrt(xp.where(nowhere, one, x)) for x in squares]
    first, second = (xp.where(x < eps, eps * one, x) for x in lengths)
    return xp.where(nowhere, dot * 0, dot / (first * second))


def _cosine_loss_reference(xp, input, target, eps):
    c = _cosine_at_least(xp, input, target, eps)
    # If rounding makes 1 - c negative, the value becomes 0 and the derivatives are kept.
    return 1 - c - xp.where(c > 1, detached(1 - c), xp.zeros_like(c))


def _cosine_similarity_reference(xp, x1, x2, eps):
    c = _cosine_at_least(xp, x1, x2, eps)
    beyond = detached(c) - xp.where(c > 1, xp.ones_like(c), -xp.ones_like(c))
    return c - xp.where(xp.abs(c) > 1, beyond, xp.zeros_like(c))


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


def _norm(xp, x, p):
    """Norm of degree p of each row; a norm of 0 or infinity has derivatives of 0."""
    if x.shape[-1] == 0:
        return xp.sum(x, axis=-1)
    # Infinite rows are replaced before use: they would have derivatives of 0 times infinity.
    infinite = xp.max(xp.abs(detached(x)), axis=-1) == inf
    x = xp.where(infinite[..., None], xp.ones_like(x), x)
    size = xp.abs(x)
    if p == 1:
        norm = xp.sum(size, axis=-1)
    elif p == inf:
        norm = xp.max(size, axis=-1)
    elif p == 2:
        squares = xp.sum(x * x, axis=-1)
        nowhere = detached(squares) == 0
        norm = xp.where(nowhere, squares * 0, xp.sqrt(xp.where(nowhere, xp.ones_like(squares), squares)))
    else:
        largest = detached(xp.max(size, axis=-1))
        scale = xp.where(largest == 0, xp.ones_like(largest), largest)
        ratio = size / scale[..., None]
        zero = ratio == 0
        powers = xp.where(zero, xp.zeros_like(ratio), xp.where(zero, xp.ones_like(ratio), ratio) ** p)
        total = xp.sum(powers, axis=-1)
        nowhere = total == 0
        norm = xp.where(nowhere, total, scale * xp.where(nowhere, xp.ones_like(total), total) ** (1 / p))
    return xp.where(infinite, xp.zeros_like(norm) + inf, norm)


def _hinge(xp, excess):
    return xp.where(excess < 0, xp.zeros_like(excess), excess)


def _smaller(xp, x, y):
    """Element-wise minimum; of two equal elements, each has half of the derivative."""
    return xp.where(x < y, x, xp.where(y < x, y, (x + y) / 2))


def _triplet_reference(xp, anchor, positive, negative, margin, p, eps, swap):
    near, far = _norm(xp, anchor - positive + eps, p), _norm(xp, anchor - negative + eps, p)
    if swap:
        other = _norm(xp, positive - negative + eps, p)
        far = _smaller(xp, far, other)
    return _hinge(xp, margin + near - far)


_DEGREE = Parameter(
    "p",
    2.0,
    "Degree of the distance, > 0: 1 sums absolute differences, 2 is Euclidean, infinity takes the largest difference.",
    minimum=0.0,
    exclusive=True,
)
_OFFSET = Parameter(
    "eps",
    1e-6,
    "Added to each difference, as torch does: equal vectors have the distance eps D^(1/p). With 0 it is a metric.",
)

triplet_margin_loss = define_statistics(
    name="triplet_margin_loss",
    summary="Triplet margin loss: an anchor should be nearer to a positive than to a negative, by a margin.",
    formula="max(0, margin + d(anchor, positive) - d(anchor, negative)), with swap the smaller one of "
    "d(anchor, negative) and d(positive, negative); d(x, y) = (sum |x - y + eps|^p)^(1/p)",
    operands=(
        Operand("anchor", "The vectors to compare."),
        Operand("positive", "Vectors that each anchor should be near to."),
        Operand("negative", "Vectors that each anchor should be far from."),
    ),
    parameters=(
        Parameter("margin", 1.0, "Distance by which the negative should be farther away.", minimum=0.0, exclusive=True),
        _DEGREE,
        _OFFSET,
    ),
    flags=(
        Flag("swap", False, "If True, the distance from the positive to the negative counts where it is the smaller."),
    ),
    norms={"ap": "anchor - positive + eps", "an": "anchor - negative + eps", "pn": "positive - negative + eps"},
    only_with={"pn": "swap"},
    value="relu_active(margin + (ap - where(swap, smaller(an, pn), an)))",
    reference=_triplet_reference,
    torch="triplet_margin_loss",
    module="TripletMarginLoss",
    positional="anchor positive negative margin p eps swap size_average reduce reduction",
    convention="At a value of 0 on the boundary the row is active. A distance of 0, and an infinite one, has gradient "
    "0; of equal distances under `swap`, and of equal largest differences, each has its share.",
    cases=({}, {"p": 1.0}, {"p": 3.0, "swap": True}, {"p": inf}, {"swap": True, "margin": 2.0, "eps": 0.0}),
    notes="Distances are computed in float64, and powers do not overflow for any degree. The second derivative of a "
    "distance of 0 is 0, where torch's is NaN.",
    source="V. Balntas et al., Learning local feature descriptors with triplets and shallow convolutional neural "
    "networks, BMVC 2016.",
)

_SHORTEST = Parameter("eps", 1e-8, "Length that shorter vectors count as; 0 for the exact cosine.", minimum=0.0)
_PAIR = (Operand("x1", "The first vectors."), Operand("x2", "The second vectors."))
_COSINE_SOURCE = (
    "G. Salton, A. Wong, C. S. Yang, A vector space model for automatic indexing, Communications of the ACM 18, 1975."
)
_NO_DIRECTION = (
    "A vector of zeros has no direction: the cosine is 0, with gradient 0 with respect to both vectors. The length of "
    "a vector shorter than `eps` is a constant."
)

cosine_similarity = define_statistics_function(
    name="cosine_similarity",
    summary="Cosine of each pair of vectors, from -1 to 1.",
    formula="<x1, x2> / (max(|x1|, eps) max(|x2|, eps))",
    operands=_PAIR,
    parameters=(_SHORTEST,),
    statistics={"dot": "x1 * x2", "xx": "square(x1)", "yy": "square(x2)"},
    value="cosine_at_least(dot, xx, yy, eps)",
    reference=_cosine_similarity_reference,
    torch="cosine_similarity",
    positional="x1 x2 dim eps",
    dim=1,
    convention=_NO_DIRECTION,
    notes="As `torch.nn.functional.cosine_similarity`, without its values beyond 1, its overflow in float16 and "
    "float32, and its gradients of vectors shorter than `eps`, which are not those of the value.",
    example=(
        ">>> import torch\n"
        ">>> import cupylosses.functional as F\n"
        ">>> x1, x2 = torch.tensor([[1.0, 2.0, 2.0]]), torch.tensor([[2.0, 0.0, 1.0]])\n"
        ">>> [round(x, 4) for x in F.cosine_similarity(x1, x2).tolist()]\n"
        "[0.5963]"
    ),
    source=_COSINE_SOURCE,
)

cosine_distance = define_statistics_function(
    name="cosine_distance",
    summary="One minus the cosine of each pair of vectors.",
    formula="1 - <x1, x2> / (max(|x1|, eps) max(|x2|, eps))",
    operands=_PAIR,
    parameters=(_SHORTEST,),
    constants={"zero": "0"},
    statistics={"dot": "x1 * x2", "xx": "square(x1)", "yy": "square(x2)"},
    value="at_least(1 - cosine_at_least(dot, xx, yy, eps), zero)",
    reference=lambda xp, x1, x2, eps: _cosine_loss_reference(xp, x1, x2, eps),
    positional="x1 x2 dim eps",
    dim=-1,
    convention=_NO_DIRECTION,
    notes="It is never below 0, and keeps its digits where vectors are similar: cosine and difference are computed in "
    "float64. `triplet_margin_with_distance_loss` recognizes it, and computes both distances and the loss in one pass.",
    example=(
        ">>> import torch\n"
        ">>> import cupylosses.functional as F\n"
        ">>> x1, x2 = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([2.0, 0.0, 1.0])\n"
        ">>> round(F.cosine_distance(x1, x2).item(), 4)\n"
        "0.4037"
    ),
    source=_COSINE_SOURCE,
)

pairwise_distance = define_statistics_function(
    name="pairwise_distance",
    summary="Distance of degree p between each pair of vectors.",
    formula="(sum |x1 - x2 + eps|^p)^(1/p)",
    operands=_PAIR,
    parameters=(_DEGREE, _OFFSET),
    flags=(Flag("keepdim", False, "If True, the result has a last dimension of size 1."),),
    norms={"distance": "x1 - x2 + eps"},
    value="distance",
    reference=lambda xp, x1, x2, p, eps, keepdim: _norm(xp, x1 - x2 + eps, p),
    torch="pairwise_distance",
    positional="x1 x2 p eps keepdim",
    convention="A distance of 0, and an infinite one, has gradient 0; equal largest differences share theirs.",
    notes="As `torch.nn.functional.pairwise_distance`; powers and squares do not overflow for float32 vectors.",
    example=(
        ">>> import torch\n"
        ">>> import cupylosses.functional as F\n"
        ">>> x1, x2 = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0]])\n"
        ">>> F.pairwise_distance(x1, x2, p=1.0, eps=0.0).tolist()\n"
        "[7.0]"
    ),
    source="H. Minkowski, Geometrie der Zahlen, Teubner, 1896.",
)


def _cosine_triplet_reference(xp, anchor, positive, negative, margin, eps, swap):
    near, far = (_cosine_loss_reference(xp, anchor, x, eps) for x in (positive, negative))
    if swap:
        far = _smaller(xp, far, _cosine_loss_reference(xp, positive, negative, eps))
    return _hinge(xp, margin + near - far)


_NAME = "triplet_margin_with_distance_loss"
_SUMMARY = "Triplet margin loss of any distance: an anchor should be nearer to a positive than to a negative."
_MARGIN, _SWAP = triplet_margin_loss.parameters[0], triplet_margin_loss.flags[0]

_cosine_triplet = StatisticsLoss(
    name=_NAME,
    summary=_SUMMARY,
    formula="max(0, margin + d(anchor, positive) - d(anchor, negative)), with the cosine distance",
    operands=triplet_margin_loss.operands,
    parameters=(_MARGIN, _SHORTEST),
    flags=(_SWAP,),
    constants={"zero": "0"},
    statistics={
        "aa": "square(anchor)",
        "pp": "square(positive)",
        "nn": "square(negative)",
        "ap": "anchor * positive",
        "an": "anchor * negative",
        "pn": "positive * negative",
    },
    only_with={"pn": "swap"},
    let={
        "near": "at_least(1 - cosine_at_least(ap, aa, pp, eps), zero)",
        "far": "at_least(1 - cosine_at_least(an, aa, nn, eps), zero)",
        "other": "at_least(1 - cosine_at_least(pn, pp, nn, eps), zero)",
    },
    value="relu_active(margin + (near - where(swap, smaller(far, other), far)))",
    reference=_cosine_triplet_reference,
)
_DISTANCES = (Operand("near", "Distances to positives."), Operand("far", "Distances to negatives."))
_of_distances = Loss(
    name=_NAME,
    summary=_SUMMARY,
    formula="max(0, margin + near - far)",
    operands=_DISTANCES,
    parameters=(_MARGIN,),
    value="relu_active(margin + (near - far))",
    reference=lambda xp, near, far, margin: _hinge(xp, margin + near - far),
)
_of_distances_swapped = Loss(
    name=_NAME,
    summary=_SUMMARY,
    formula="max(0, margin + near - min(far, other))",
    operands=(*_DISTANCES, Operand("other", "Distances from positives to negatives.")),
    parameters=(_MARGIN,),
    value="relu_active(margin + (near - smaller(far, other)))",
    reference=lambda xp, near, far, other, margin: _hinge(xp, margin + near - _smaller(xp, far, other)),
)
for _loss in (_cosine_triplet, _of_distances, _of_distances_swapped):
    remember(_loss)
    # torch.compile cannot trace the lock that the first access to a cached property takes.
    _loss.resolve()

triplet_margin_with_distance_loss = define_statistics(
    DistanceLoss,
    name=_NAME,
    summary=_SUMMARY,
    formula="max(0, margin + d(anchor, positive) - d(anchor, negative)), with swap the smaller one of "
    "d(anchor, negative) and d(positive, negative)",
    operands=triplet_margin_loss.operands,
    parameters=(_MARGIN,),
    flags=(_SWAP,),
    norms={
        "ap": "anchor - positive + 0.000001",
        "an": "anchor - negative + 0.000001",
        "pn": "positive - negative + 0.000001",
    },
    only_with={"pn": "swap"},
    value=triplet_margin_loss.value,
    reference=lambda xp, anchor, positive, negative, margin, swap: _triplet_reference(
        xp, anchor, positive, negative, margin, 2.0, 1e-6, swap
    ),
    fused=((pairwise_distance, triplet_margin_loss), (cosine_distance, _cosine_triplet)),
    composed=(_of_distances, _of_distances_swapped),
    torch=_NAME,
    module="TripletMarginWithDistanceLoss",
    positional="anchor positive negative",
    convention=triplet_margin_loss.convention,
    cases=({}, {"swap": True, "margin": 2.0}),
    notes="With a `distance_function` of your own, gradients are those of your function, and the operands of "
    "`value_and_grad` are the distances, not the vectors.",
    source=triplet_margin_loss.source,
)
