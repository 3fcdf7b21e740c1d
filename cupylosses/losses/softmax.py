"""Losses of rows of logits, or of log-probabilities, over classes."""

from cupylosses.definition.base import Flag, Operand, Parameter
from cupylosses.engines.softmax.definition import define_softmax
from cupylosses.losses.divergence import js_reference, kl_reference
from cupylosses.reference_math import log_relative_entropy, power, weighted

LOGITS = Operand("input", "The predicted logits.")
INDICES = "Class indices of any integer dtype, in the shape of `input` without its class dimension"
SMOOTHING = Parameter(
    "label_smoothing", 0.0, "Share of the target that is spread evenly over all classes.", minimum=0.0, maximum=1.0
)
Z_LOSS = Parameter("z_loss", 0.0, "Weight of the z-loss: the square of the log-partition function, lse^2.", minimum=0.0)
POLY = Parameter(
    "poly", 0.0, "Weight of 1 - p_y, by which PolyLoss adjusts the first term of the cross entropy.", minimum=-1.0
)


def _focused(xp, nll, rest, gamma):
    # At p = 0 the logarithm is infinite, and the derivative with respect to 1 - p is dropped.
    infinite = xp.isinf(nll)
    return xp.where(infinite, nll, power(xp, rest, gamma) * xp.where(infinite, xp.zeros_like(nll), nll))


def _cross_entropy_row(xp, nll, rest, smooth, weight, label_smoothing, z_loss, gamma, poly):
    cost = weighted(xp, (1 - label_smoothing) * weight, _focused(xp, nll, rest, gamma) + poly * rest)
    return cost + label_smoothing * smooth if label_smoothing else cost


def _cross_entropy_term(xp, log_p, target, weight, classes, label_smoothing, z_loss, gamma, poly):
    return weighted(xp, weight * ((1 - label_smoothing) * target + label_smoothing / classes), -log_p)


def _cross_entropy_penalty(xp, lse, label_smoothing, z_loss, gamma, poly):
    return z_loss * lse * lse if z_loss else xp.zeros_like(lse)


PLAIN_ROW = {"row": "weighted(hard * weight, nll) + weighted(label_smoothing, smooth)"}
ROW = {
    "constants": {"hard": "1 - label_smoothing"},
    "row": "weighted(hard * weight, focused(nll, rest, gamma) + poly * rest) + weighted(label_smoothing, smooth)",
    "penalty": "weighted(z_loss, square(lse))",
    "plain": PLAIN_ROW,
    "scale": "logit_scale",
    "specialize": {"smoothed": "label_smoothing"},
}
CONVENTION = (
    "A label of log-probability -inf has an infinite loss with a finite gradient. Ignored and masked rows have "
    "gradient 0."
)

cross_entropy = define_softmax(
    **(ROW | {"plain": PLAIN_ROW | {"term": "weighted(-(weight * target), log_p)"}}),
    name="cross_entropy",
    summary="Softmax cross entropy of logits, for class indices or class probabilities.",
    formula="(1 - label_smoothing) w_y (poly (1 - p_y) - (1 - p_y)^gamma log p_y) - label_smoothing / C "
    "sum_c w_c log p_c + z_loss lse^2 for a class index y; "
    "-sum_c w_c ((1 - label_smoothing) t_c + label_smoothing / C) log p_c + z_loss lse^2 for probabilities t",
    operands=(
        LOGITS,
        Operand("target", f"{INDICES}, or class probabilities, floating and in the shape of `input`.", integer=True),
    ),
    targets=("indices", "probabilities"),
    parameters=(
        SMOOTHING,
        Z_LOSS,
        Parameter(
            "gamma", 0.0, "Focusing exponent: a row of probability p_y is weighted by (1 - p_y)^gamma.", minimum=0.0
        ),
        POLY,
    ),
    term="weighted(weight * (-hard * target - label_smoothing / classes), log_p)",
    references={"row": _cross_entropy_row, "term": _cross_entropy_term, "penalty": _cross_entropy_penalty},
    affine=True,
    weights="weight",
    mean_of_weights=True,
    torch="cross_entropy",
    module="CrossEntropyLoss",
    positional="input target weight size_average ignore_index reduce reduction label_smoothing",
    convention=CONVENTION,
    cases=(
        {},
        {"label_smoothing": 0.1},
        {"z_loss": 1e-2},
        {"gamma": 2.0},
        {"gamma": 0.5, "poly": 1.0},
        {"label_smoothing": 0.2, "z_loss": 1e-3, "gamma": 1.5, "poly": -0.5},
    ),
    notes=(
        "The dtype of the target decides: floating ones hold probabilities, integer ones class indices. (In torch, the "
        "shape decides.) `gamma` and `poly` need class indices."
    ),
    source="I. J. Good, Rational decisions, Journal of the Royal Statistical Society B 14, 1952; label smoothing: C. "
    "Szegedy et al., Rethinking the Inception architecture for computer vision, CVPR 2016; gamma: T.-Y. Lin et al., "
    "Focal loss for dense object detection, ICCV 2017; poly: Z. Leng et al., PolyLoss, ICLR 2022.",
)

softmax_focal_loss = define_softmax(
    **ROW,
    name="softmax_focal_loss",
    summary="Softmax focal loss: cross entropy of logits that down-weights well-classified rows.",
    formula="(1 - label_smoothing) alpha_y (poly (1 - p_y) - (1 - p_y)^gamma log p_y) - label_smoothing / C "
    "sum_c alpha_c log p_c + z_loss lse^2",
    operands=(LOGITS, Operand("target", f"{INDICES}.", integer=True)),
    targets=("indices",),
    parameters=(
        SMOOTHING,
        Z_LOSS,
        Parameter(
            "gamma",
            2.0,
            "Focusing exponent: a row of probability p_y is weighted by (1 - p_y)^gamma. 0 gives the cross entropy.",
            minimum=0.0,
        ),
        POLY,
    ),
    references={"row": _cross_entropy_row, "penalty": _cross_entropy_penalty},
    weights="alpha",
    positional="input target alpha gamma ignore_index reduction",
    convention=CONVENTION,
    cases=({}, {"gamma": 0.0}, {"gamma": 0.5}, {"gamma": 3.0, "label_smoothing": 0.1}),
    notes="Unlike that of `cross_entropy`, a mean does not divide by the sum of the weights.",
    source="T.-Y. Lin, P. Goyal, R. Girshick, K. He, P. Dollár, Focal loss for dense object detection, ICCV 2017.",
)


def _nll_row(xp, nll, weight):
    return weighted(xp, weight, nll)


nll_loss = define_softmax(
    name="nll_loss",
    summary="Negative log-likelihood of class indices, given log-probabilities.",
    formula="-w_y input_y",
    operands=(
        Operand("input", "The predicted log-probabilities.", domain="log_probability"),
        Operand("target", f"{INDICES}.", integer=True),
    ),
    targets=("indices",),
    row="weighted(weight, nll)",
    references={"row": _nll_row},
    softmax=False,
    affine=True,
    weights="weight",
    mean_of_weights=True,
    torch="nll_loss",
    module="NLLLoss",
    positional="input target weight size_average ignore_index reduce reduction",
    convention="Only the log-probability of the label has a nonzero gradient.",
    notes="`cross_entropy` of the logits is faster, since it reads them once, and more accurate for confident "
    "predictions.",
    source="R. A. Fisher, On the mathematical foundations of theoretical statistics, Philosophical Transactions of the "
    "Royal Society A 222, 1922.",
)


def _kl_term(xp, log_p, target, weight, classes, log_target):
    return kl_reference(xp, log_p, target, log_target, True)


kl_div_with_logits = define_softmax(
    name="kl_div_with_logits",
    module="KLDivWithLogitsLoss",
    summary="Kullback-Leibler divergence KL(target || softmax(input)), in one pass over the logits.",
    formula="sum_c t_c (log t_c - log p_c)",
    operands=(
        LOGITS,
        Operand(
            "target",
            "The true distribution as probabilities, or as log-probabilities with `log_target=True`; floating, in the "
            "shape of `input`.",
            domain=("log_target", {True: "log_probability", False: "probability"}),
        ),
    ),
    targets=("probabilities",),
    flags=(Flag("log_target", False, "If True, `target` holds log-probabilities; otherwise it holds probabilities."),),
    term="where(log_target, kl_term_of_log(target, log_p), kl_term(target, log_p))",
    references={"term": _kl_term},
    affine=True,
    scale="temperature",
    reduction="batchmean",
    class_dim=-1,
    positional="input target reduction log_target",
    convention="Where a target probability is 0, its term and gradients are 0, even if the predicted one is 0 too.",
    cases=({}, {"log_target": True}),
    notes=(
        "Equals `kl_div` of the log-softmax, summed over the classes. It is not multiplied by the square of the "
        "temperature."
    ),
    source="S. Kullback, R. A. Leibler, On information and sufficiency, Annals of Mathematical Statistics 22, 1951.",
)


def _distillation_term(xp, log_p, log_q, classes, beta):
    if beta in (0, 1):
        return log_relative_entropy(xp, *((log_p, log_q) if beta else (log_q, log_p)))
    return js_reference(xp, log_p, log_q, beta, True, True)


distillation_loss = define_softmax(
    name="distillation_loss",
    summary="Distillation loss: generalized Jensen-Shannon divergence between the logits of student and teacher.",
    formula="beta KL(q || m) + (1 - beta) KL(p || m), with m = beta q + (1 - beta) p; KL(q || p) if beta = 0, and "
    "KL(p || q) if beta = 1",
    operands=(
        Operand("student_logits", "The logits of the student."),
        Operand(
            "teacher_logits",
            "The logits of the teacher, floating, in the shape of `student_logits`; differentiable too.",
        ),
    ),
    targets=("logits",),
    parameters=(
        Parameter(
            "beta",
            0.0,
            "Weight of the teacher in the mixture m; 0 gives the forward, 1 the reverse divergence.",
            minimum=0.0,
            maximum=1.0,
        ),
    ),
    constants={"remainder": "1 - beta"},
    term="mixed_divergence(log_q, log_p, beta, remainder)",
    plain={"term": "log_relative_entropy(log_q, log_p)"},
    limits={("beta", 1.0): "log_relative_entropy(log_p, log_q)"},
    balanced=True,
    references={"term": _distillation_term},
    scale="temperature",
    reduction="batchmean",
    class_dim=-1,
    positional="student_logits teacher_logits temperature beta reduction",
    convention="Where p_c or q_c is 0, the gradient with respect to its logit is 0.",
    cases=({}, {"beta": 0.5}, {"beta": 1.0}, {"beta": 0.1}),
    notes=(
        "No row is negative, and the loss is accurate for a student close to its teacher. As in Liger Kernel, beta = 0 "
        "and beta = 1 give the Kullback-Leibler divergences instead of the limits, which are 0. The gradient decreases "
        "with the square of the temperature; multiply the loss by that square to compensate, as G. Hinton et al. do "
        "(Distilling the knowledge in a neural network, 2015)."
    ),
    source="R. Agarwal et al., On-policy distillation of language models: learning from self-generated mistakes, ICLR "
    "2024.",
)
