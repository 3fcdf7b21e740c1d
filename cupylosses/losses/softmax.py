"""Losses of rows of logits over classes, and of log-probabilities."""

from cupylosses.definition.base import Flag, Operand, Parameter
from cupylosses.engines.softmax.definition import define_row
from cupylosses.losses.divergence import js_reference, kl_reference
from cupylosses.reference_math import log_relative_entropy, power, weighted

LOGITS = Operand("input", "The logits.")
INDICES = "Class indices of any integer dtype, of the shape of `input` without its class dimension"
SMOOTHING = Parameter(
    "label_smoothing", 0.0, "The share of the target that all classes have alike.", minimum=0.0, maximum=1.0
)
Z_LOSS = Parameter("z_loss", 0.0, "The weight of the square of the log-partition function, lse^2.", minimum=0.0)
POLY = Parameter(
    "poly", 0.0, "The weight of 1 - p, the first term of the polynomial that the cross entropy is.", minimum=-1.0
)


def _focused(xp, nll, rest, gamma):
    # An infinite logarithm has no derivative with respect to 1 - p, which p = 0 stands against.
    infinite = xp.isinf(nll)
    return xp.where(infinite, nll, power(xp, rest, gamma) * xp.where(infinite, xp.zeros_like(nll), nll))


def _cross_entropy_row(xp, nll, rest, smooth, weight, label_smoothing, z_loss, gamma, poly):
    cost = weighted(xp, (1 - label_smoothing) * weight, _focused(xp, nll, rest, gamma) + poly * rest)
    return cost + label_smoothing * smooth if label_smoothing else cost


def _cross_entropy_term(xp, log_p, target, weight, classes, label_smoothing, z_loss, gamma, poly):
    return weighted(xp, weight * ((1 - label_smoothing) * target + label_smoothing / classes), -log_p)


def _cross_entropy_penalty(xp, lse, label_smoothing, z_loss, gamma, poly):
    return z_loss * lse * lse if z_loss else xp.zeros_like(lse)


ROW = {
    "constants": {"hard": "1 - label_smoothing"},
    "row": "weighted(hard * weight, focused(nll, rest, gamma) + poly * rest) + weighted(label_smoothing, smooth)",
    "penalty": "weighted(z_loss, square(lse))",
    "scale": "logit_scale",
}
CONVENTION = (
    "A label of log-probability -inf costs inf, with a finite gradient. Rows that are ignored or masked have gradient "
    "0."
)

cross_entropy = define_row(
    **ROW,
    name="cross_entropy",
    summary="Cross entropy of logits against class indices, or against a probability per class.",
    formula="(1 - label_smoothing) w_y (rest^gamma nll + poly rest) + label_smoothing smooth + z_loss lse^2, or "
    "sum_c -w_c ((1 - label_smoothing) t_c + label_smoothing / C) log p_c + z_loss lse^2",
    operands=(
        LOGITS,
        Operand(
            "target", f"{INDICES}; or a probability per class, floating and of the shape of `input`.", integer=True
        ),
    ),
    targets=("indices", "probabilities"),
    parameters=(
        SMOOTHING,
        Z_LOSS,
        Parameter("gamma", 0.0, "How much less a row counts that is decided well.", minimum=0.0),
        POLY,
    ),
    term="weighted(weight * (hard * target + label_smoothing / classes), -log_p)",
    references={"row": _cross_entropy_row, "term": _cross_entropy_term, "penalty": _cross_entropy_penalty},
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
        "A floating target holds probabilities, an integer one class indices; shapes do not decide, as they do in "
        "torch. Class weights multiply the terms of their classes; the weight of the label alone multiplies the rest."
    ),
    source="I. J. Good, Rational decisions, Journal of the Royal Statistical Society B 14, 1952; label smoothing: C. "
    "Szegedy et al., Rethinking the Inception architecture for computer vision, CVPR 2016; gamma: T.-Y. Lin et al., "
    "Focal loss for dense object detection, ICCV 2017; poly: Z. Leng et al., PolyLoss, ICLR 2022.",
)

softmax_focal_loss = define_row(
    **ROW,
    name="softmax_focal_loss",
    summary="Cross entropy of logits against class indices in which rows that are decided well count less.",
    formula="(1 - label_smoothing) alpha_y (rest^gamma nll + poly rest) + label_smoothing smooth + z_loss lse^2",
    operands=(LOGITS, Operand("target", f"{INDICES}.", integer=True)),
    targets=("indices",),
    parameters=(
        SMOOTHING,
        Z_LOSS,
        Parameter("gamma", 2.0, "How much less; 0 gives the cross entropy.", minimum=0.0),
        POLY,
    ),
    references={"row": _cross_entropy_row, "penalty": _cross_entropy_penalty},
    weights="alpha",
    positional="input target alpha gamma ignore_index reduction",
    convention=CONVENTION,
    cases=({}, {"gamma": 0.0}, {"gamma": 0.5}, {"gamma": 3.0, "label_smoothing": 0.1}),
    notes="`mean` divides by the number of rows that count, as that of `sigmoid_focal_loss` does by the elements.",
    source="T.-Y. Lin, P. Goyal, R. Girshick, K. He, P. Dollár, Focal loss for dense object detection, ICCV 2017.",
)


def _nll_row(xp, nll, weight):
    return weighted(xp, weight, nll)


nll_loss = define_row(
    name="nll_loss",
    summary="Negative log-likelihood of class indices under log-probabilities.",
    formula="-w_y input_y",
    operands=(
        Operand("input", "The log-probabilities.", domain="log_probability"),
        Operand("target", f"{INDICES}.", integer=True),
    ),
    targets=("indices",),
    row="weighted(weight, nll)",
    references={"row": _nll_row},
    softmax=False,
    weights="weight",
    mean_of_weights=True,
    torch="nll_loss",
    module="NLLLoss",
    positional="input target weight size_average ignore_index reduce reduction",
    convention="Only the log-probability of the label has a gradient that is not 0.",
    notes="`cross_entropy` of the logits reads them once, and keeps the digits of sure predictions.",
    source="R. A. Fisher, On the mathematical foundations of theoretical statistics, Philosophical Transactions of the "
    "Royal Society A 222, 1922.",
)


def _kl_term(xp, log_p, target, weight, classes, log_target):
    return kl_reference(xp, log_p, target, log_target, True)


kl_div_with_logits = define_row(
    name="kl_div_with_logits",
    module="KLDivWithLogitsLoss",
    summary="Kullback-Leibler divergence of the distribution that logits are of from the target.",
    formula="sum_c t_c (log t_c - log p_c)",
    operands=(
        LOGITS,
        Operand(
            "target",
            "The true distribution as probabilities, or as log-probabilities with `log_target=True`; of the shape of "
            "`input`.",
            domain=("log_target", {True: "log_probability", False: "probability"}),
        ),
    ),
    targets=("probabilities",),
    flags=(Flag("log_target", False, "Whether `target` holds log-probabilities."),),
    term="where(where(log_target, exp(target), target) == 0, zero_unless_nan(log_p), "
    "where(log_target, exp(target) * (target - log_p), times_log(target, log_p)))",
    references={"term": _kl_term},
    scale="temperature",
    reduction="batchmean",
    class_dim=-1,
    positional="input target reduction log_target",
    convention="Where the target has no mass, the term and its gradients are 0, also against an impossible prediction.",
    cases=({}, {"log_target": True}),
    notes=(
        "It is `kl_div` of the log-softmax, in one pass. `mean` divides by the number of rows, `batchmean` by the size "
        "of the first dimension. Not multiplied by the square of the temperature."
    ),
    source="S. Kullback, R. A. Leibler, On information and sufficiency, Annals of Mathematical Statistics 22, 1951.",
)


def _distillation_term(xp, log_p, log_q, classes, beta):
    if beta in (0, 1):
        return log_relative_entropy(xp, *((log_p, log_q) if beta else (log_q, log_p)))
    return js_reference(xp, log_p, log_q, beta, True, True)


distillation_loss = define_row(
    name="distillation_loss",
    summary="Divergence between the distributions of a student's and a teacher's logits.",
    formula="beta KL(q || m) + (1 - beta) KL(p || m), where m = beta q + (1 - beta) p; with beta = 0 KL(q || p), with "
    "beta = 1 KL(p || q)",
    operands=(
        Operand("student_logits", "The logits that are trained."),
        Operand("teacher_logits", "The logits to come near to, of the same shape; differentiable too."),
    ),
    targets=("logits",),
    parameters=(
        Parameter(
            "beta",
            0.0,
            "The weight of the teacher in the mixture m; 0 is the forward, 1 the reverse divergence.",
            minimum=0.0,
            maximum=1.0,
        ),
    ),
    constants={"remainder": "1 - beta"},
    term="mixed_divergence(log_q, log_p, beta, remainder)",
    references={"term": _distillation_term},
    scale="temperature",
    reduction="batchmean",
    class_dim=-1,
    positional="student_logits teacher_logits temperature beta reduction",
    convention="A class without mass on one side has gradient 0 there.",
    cases=({}, {"beta": 0.5}, {"beta": 1.0}, {"beta": 0.1}),
    notes=(
        "No row is below 0, and students that are near their teacher keep their digits. As Liger has it, beta = 0 and "
        "1 are the Kullback-Leibler divergences, and not the limits, which are 0. The gradient falls with the square "
        "of the temperature; multiply the loss by it, as G. Hinton et al. do (Distilling the knowledge in a neural "
        "network, 2015), to keep its size. `mean` divides by the number of rows, `batchmean` by the size of the first "
        "dimension."
    ),
    source="R. Agarwal et al., On-policy distillation of language models: learning from self-generated mistakes, ICLR "
    "2024.",
)
