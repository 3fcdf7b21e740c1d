"""Losses of binary classification of logits that weight an element by the predicted probability."""

import math

from cupylosses.definition.base import Parameter
from cupylosses.engines.pointwise.definition import define
from cupylosses.losses.classification import LABEL, LOGIT, logistic_reference, perfect_logits
from cupylosses.reference_math import detached, softplus, softplus_excess, where_nan


def _power(xp, x, exponent):
    # At 0 neither the logarithm nor a negative power is computed, and 0^0 = 1.
    if exponent == 0:
        return xp.ones_like(x)
    positive = x > 0
    return xp.where(positive, xp.where(positive, x, xp.ones_like(x)) ** exponent, xp.zeros_like(x))


def _wrong(xp, x, y):
    # The part of the label that disagrees with the sign of the logit.
    return xp.where(x > 0, 1 - y, y)


def _miss(xp, x, y):
    # Probability of a wrong decision. In y sigmoid(-x) + (1 - y) sigmoid(x), the derivative with respect to y would
    # cancel around x = 0.
    size = xp.where(x > 0, x, -x)
    return xp.exp(-softplus(xp, size)) + _wrong(xp, x, y) * xp.tanh(0.5 * size)


def _focal_reference(xp, input, target, alpha, gamma):
    infinite = xp.isinf(input)
    x = xp.where(infinite, xp.zeros_like(input), input)
    balance = alpha * target + (1 - alpha) * (1 - target) if alpha >= 0 else xp.ones_like(target)
    value = balance * _power(xp, _miss(xp, x, target), gamma) * logistic_reference(xp, x, target, 1.0)
    wrong, weight = detached(_wrong(xp, input, target)), detached(balance)
    counts = infinite & (wrong != 0) & (weight != 0)
    limit = weight * wrong * xp.where(counts, xp.abs(input), xp.zeros_like(input))
    # The factors are multiplied one at a time, because the power may underflow, and 0 * inf is not inf.
    steps = max(1, math.ceil(float(gamma)))
    for _ in range(steps):
        limit = limit * _power(xp, wrong, gamma / steps)
    probable = (target >= 0) & (target <= 1)
    return where_nan(xp, ~probable, xp.where(infinite, limit, value))


sigmoid_focal_loss = define(
    name="sigmoid_focal_loss",
    summary="Sigmoid focal loss: binary cross entropy of logits that down-weights well-classified elements.",
    formula="-a (1 - p)^gamma log(p), with p = sigmoid(input) and a = alpha where target = 1, and "
    "p = 1 - sigmoid(input) and a = 1 - alpha where target = 0; a = 1 if alpha < 0",
    operands=(LOGIT, LABEL),
    parameters=(
        Parameter(
            "alpha",
            0.25,
            "Weight of positive examples; negative ones have 1 - alpha. A negative alpha turns the weights off.",
            maximum=1.0,
        ),
        Parameter(
            "gamma",
            2.0,
            "Focusing exponent: an element of probability p is weighted by (1 - p)^gamma. 0 gives the cross entropy.",
            minimum=0.0,
        ),
    ),
    constants={"rest": "1 - alpha"},
    value="focal(input, target, alpha, rest, gamma)",
    reference=_focal_reference,
    heavy=2,
    tentative="gamma == 2",
    kinks=lambda alpha, gamma: perfect_logits(),
    convention="An infinite logit of the correct sign has loss 0 and gradient 0. At any infinite logit, the gradient "
    "with respect to `target` is 0.",
    cases=({}, {"alpha": -1.0}, {"gamma": 0.5}, {"gamma": 0.0}, {"alpha": 0.6, "gamma": 3.0}),
    notes=(
        "Equals the loss of torchvision and fvcore: for a target between 0 and 1, a, 1 - p and the cross entropy are "
        "each interpolated linearly between the two labels. Other targets give NaN. Keras has the same defaults; "
        "optax, MONAI and kornia use no alpha by default."
    ),
    source="T.-Y. Lin, P. Goyal, R. Girshick, K. He, P. Dollar, Focal loss for dense object detection, ICCV 2017.",
)


def _asymmetric_reference(xp, input, target, gamma_neg, gamma_pos, clip):
    p, not_p = xp.exp(-softplus(xp, -input)), xp.exp(-softplus(xp, input))
    zero, one = xp.zeros_like(input), xp.ones_like(input)
    infinite = xp.isinf(input)

    def focused(mass, exponent, log):
        # At an infinite logarithm the probability is 0, with derivative 0.
        beyond = xp.isinf(log)
        power = xp.where(beyond, one, _power(xp, xp.where(beyond, one, mass), exponent))
        return power * log

    hit = focused(not_p, gamma_pos, softplus(xp, -input))
    if clip > 0:
        active = p > clip
        q = xp.where(active, p - clip, zero)
        near = q < 0.25
        safe = xp.where(near, one, not_p + clip)
        log = xp.where(near, -xp.log1p(-xp.where(near, q, zero)), -xp.log(safe))
        miss = xp.where(active, _power(xp, q, gamma_neg) * log, 0 * q)
    else:
        miss = focused(p, gamma_neg, softplus(xp, input))
    hit = xp.where(infinite & (hit == xp.inf) & (target == 0), zero, hit)
    miss = xp.where(infinite & (miss == xp.inf) & (target == 1), zero, miss)
    return target * hit + (1 - target) * miss


asymmetric_loss = define(
    name="asymmetric_loss",
    summary="Asymmetric multi-label loss: focal loss with a stronger focus and a margin for negatives.",
    formula="-target (1 - p)^gamma_pos log(p) - (1 - target) q^gamma_neg log(1 - q), with p = sigmoid(input) and "
    "q = max(p - clip, 0)",
    operands=(LOGIT, LABEL),
    parameters=(
        Parameter("gamma_neg", 4.0, "Focusing exponent of negatives, weighted by q^gamma_neg.", minimum=0.0),
        Parameter("gamma_pos", 1.0, "Focusing exponent of positives, weighted by (1 - p)^gamma_pos.", minimum=0.0),
        Parameter("clip", 0.05, "Probability up to which a negative has loss 0.", minimum=0.0, maximum=1.0),
    ),
    value="asymmetric(input, target, gamma_neg, gamma_pos, clip)",
    reference=_asymmetric_reference,
    heavy=2,
    tentative="gamma_neg == 4 && gamma_pos == 1 && clip >= 0.001",
    # With a clip, even a perfectly predicted positive has a derivative with respect to the label.
    kinks=lambda gamma_neg, gamma_pos, clip: [x for x in perfect_logits() if clip == 0 or x.operands[1] == 0],
    convention="Where p <= clip, a negative has loss 0 and gradient 0. So has an infinite logit of the correct sign.",
    cases=({}, {"clip": 0.0}, {"gamma_neg": 1.0, "gamma_pos": 0.0, "clip": 0.0}, {"gamma_neg": 2.5, "gamma_pos": 0.5}),
    notes=(
        "The defaults are those of the authors' code and of timm, which clamp the logarithms at log(1e-8); here they "
        "are exact. The focusing factors are differentiated, which their code can turn off."
    ),
    source="T. Ridnik, E. Ben-Baruch, N. Zamir, A. Noy, I. Friedman, M. Protter, L. Zelnik-Manor, Asymmetric loss for "
    "multi-label classification, ICCV 2021.",
)


def _poly1_reference(xp, input, target, epsilon):
    infinite = xp.isinf(input)
    x = xp.where(infinite, xp.zeros_like(input), input)
    size = xp.where(x > 0, x, -x)
    # -log(p) - (1 - p) as the series of -log(p) without its first term, so that nothing cancels.
    wrong = _wrong(xp, x, target)
    smaller, confidence = xp.exp(-softplus(xp, size)), xp.tanh(0.5 * size)
    near = smaller < 0.03125
    little = xp.where(near, smaller, xp.zeros_like(smaller))
    series = 0.0
    for k in range(20, 1, -1):
        series = series * little + 1 / k
    rest = xp.where(near, little * little * series, -xp.log1p(-xp.where(near, 0.5, smaller)) - smaller)
    beyond = rest + wrong * (size - confidence)
    value = beyond + (1 + epsilon) * (smaller + wrong * confidence)
    bound = detached(_wrong(xp, input, target))
    limit = xp.where(infinite & (bound != 0), xp.abs(input), xp.zeros_like(input))
    return xp.where(infinite, bound * limit + epsilon * bound, value)


poly1_loss = define(
    name="poly1_loss",
    summary="Poly-1 loss: binary cross entropy of logits plus a multiple of the probability of error.",
    formula="-log(p) + epsilon (1 - p), with p = sigmoid(input) where target = 1, and p = 1 - sigmoid(input) where "
    "target = 0",
    operands=(LOGIT, LABEL),
    parameters=(Parameter("epsilon", 2.0, "Weight of 1 - p; 0 gives the cross entropy.", minimum=-1.0),),
    constants={"sum": "1 + epsilon"},
    value="poly1(input, target, epsilon, sum)",
    reference=_poly1_reference,
    heavy=2,
    tentative="true",
    kinks=lambda epsilon: perfect_logits(),
    convention="An infinite logit of the correct sign has loss 0 and gradient 0. At any infinite logit, the gradient "
    "with respect to `target` is 0.",
    cases=({}, {"epsilon": -1.0}),
    notes=(
        "The default is that of optax, whose loss is of softmax probabilities. For a target between 0 and 1, both "
        "terms are interpolated linearly between the two labels."
    ),
    source="Z. Leng, M. Tan, C. Liu, E. D. Cubuk, X. Shi, S. Cheng, D. Anguelov, PolyLoss: a polynomial expansion "
    "perspective of classification loss functions, ICLR 2022.",
)


def _generalized_reference(xp, input, target, q):
    if q == 0:
        return logistic_reference(xp, input, target, 1.0)

    def integral(s):  # of e^(-q x) over x from 0 to s
        z = q * s
        # torch computes the derivative of expm1 as expm1 + 1, which cancels for large z.
        small = xp.where(z < 1, z, xp.zeros_like(z))
        tiny = xp.where(z < 1e-20, z, xp.zeros_like(z))
        near = xp.where(z < 1e-20, s * (1 - 0.5 * tiny), -xp.expm1(-small) / q)
        return xp.where(z < 1, near, (1 - xp.exp(-z)) / q)

    excess = softplus_excess(xp, input)
    more = xp.exp(-q * excess) * integral(xp.where(input > 0, input, -input))
    return integral(excess) + _wrong(xp, input, target) * more


generalized_cross_entropy = define(
    name="generalized_cross_entropy",
    summary="Generalized binary cross entropy of logits, robust to label noise.",
    formula="(1 - p^q) / q, with p = sigmoid(input) where target = 1, and p = 1 - sigmoid(input) where target = 0",
    operands=(LOGIT, LABEL),
    parameters=(
        Parameter(
            "q",
            0.7,
            "Robustness: 0 gives the cross entropy, 1 the absolute error of the probability.",
            minimum=0.0,
            maximum=1.0,
        ),
    ),
    value="generalized_log_loss(input, target, q)",
    reference=_generalized_reference,
    heavy=2,
    tentative="q >= 0.001",
    cases=({}, {"q": 0.0}, {"q": 1e-6}, {"q": 1.0}),
    notes=(
        "For a target between 0 and 1, the loss is interpolated linearly between the two labels, as the cross entropy "
        "is; Keras, whose loss is of softmax probabilities, takes the power of the mean probability instead. An "
        "infinite logit of the wrong sign has loss 1 / q."
    ),
    source=(
        "Z. Zhang, M. R. Sabuncu, Generalized cross entropy loss for training deep neural networks with noisy labels, "
        "NeurIPS 2018."
    ),
)
