"""Connectionist temporal classification (CTC): losses and functions of sequences that are not aligned."""

from cupylosses.definition.base import Operand
from cupylosses.engines.sequence.alignment import define_alignment
from cupylosses.engines.sequence.definition import define_sequence
from cupylosses.engines.sequence.posteriors import define_posteriors

TARGETS = Operand(
    "targets",
    "Labels of any integer dtype: of shape (N, S), padded with anything; or all labels one after another, of shape "
    "(sum of `target_lengths`,); of shape (S,) or (1, S) for one sample. Labels are classes other than `blank`.",
    integer=True,
)
INPUT_LENGTHS = Operand(
    "input_lengths",
    "Number of frames of each sample, at most T: integers in a tensor or an array on any device, of shape (N,) or "
    "(N, 1), in a tuple or a list; one for one sample. Later frames are not read. None if all are T.",
    integer=True,
)
TARGET_LENGTHS = Operand(
    "target_lengths",
    "Number of labels of each sample, at most S, in the same form. None if all are S.",
    integer=True,
)
CONVENTION = (
    "A class of log-probability -inf has gradient 0. A target that has no alignment, because it is too long or every "
    "alignment has a log-probability of -inf, has loss inf, or 0 with `zero_infinity`, and a gradient of 0. Where the "
    "loss of a sample is NaN, so is its gradient in all frames that count. Frames after `input_lengths` have gradient "
    "0. Log-probabilities beyond 2^26 in size count as infinite, and alignments below -3.7e8 as impossible."
)
SOURCE = (
    "A. Graves, S. Fernández, F. Gomez, J. Schmidhuber, Connectionist temporal classification: labelling unsegmented "
    "sequence data with recurrent neural networks, ICML 2006"
)

ctc_loss = define_sequence(
    name="ctc_loss",
    module="CTC",
    summary="CTC loss of sequences of labels that are not aligned to the frames of the input.",
    formula="L_n = -log sum over alignments c of prod_t p(t, n, c_t)",
    operands=(
        Operand(
            "log_probs",
            "Log-probabilities of shape (T, N, C), (N, T, C) with `batch_first`, or (T, C) for one sample; floating, "
            "of any strides. They need not be normalized.",
        ),
        TARGETS,
        INPUT_LENGTHS,
        TARGET_LENGTHS,
    ),
    torch="ctc_loss",
    positional="log_probs targets input_lengths target_lengths blank reduction zero_infinity",
    convention="The gradient is that with respect to `log_probs`, minus the probability that the frame emits the class "
    "given the target, where torch's is that of the logits of a log-softmax; after ``log_softmax`` both lead to the "
    f"same. {CONVENTION}",
    source=SOURCE,
)

ctc_loss_with_logits = define_sequence(
    name="ctc_loss_with_logits",
    module="CTCWithLogits",
    logits=True,
    summary="CTC loss of logits, with the log-softmax fused.",
    formula="L_n = -log sum over alignments c of prod_t softmax(input)(t, n, c_t)",
    operands=(
        Operand(
            "input",
            "Logits of shape (T, N, C), (N, T, C) with `batch_first`, or (T, C) for one sample; floating, of any "
            "strides.",
        ),
        TARGETS,
        INPUT_LENGTHS,
        TARGET_LENGTHS,
    ),
    positional="input targets input_lengths target_lengths blank reduction zero_infinity",
    convention="The gradient is softmax(input) minus the probability that the frame emits the class given the target. "
    f"{CONVENTION}",
    source=SOURCE,
)

ctc_forced_alignment = define_alignment(
    name="ctc_forced_alignment",
    summary="The most probable alignment of sequences of labels to the frames of the input.",
    formula="score_n = max over alignments c of sum_t log_probs(t, n, c_t)",
    operands=(ctc_loss.operands[0], TARGETS),
    positional="log_probs targets input_lengths target_lengths blank",
    example=(
        ">>> import torch\n"
        ">>> import cupylosses.functional as F\n"
        ">>> log_probs = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]).log()\n"
        ">>> found = F.ctc_forced_alignment(log_probs, torch.tensor([1, 2]))\n"
        ">>> found.labels.tolist(), found.positions.tolist(), round(found.score.exp().item(), 3)\n"
        "([0, 1, 2], [-1, 0, 1], 0.125)"
    ),
    source="A. J. Viterbi, Error bounds for convolutional codes and an asymptotically optimum decoding algorithm, IEEE "
    "Transactions on Information Theory 13, 1967; " + SOURCE,
)

ctc_posteriors = define_posteriors(
    name="ctc_posteriors",
    summary="Probabilities that a frame belongs to each class, or to each label of its target, given the target.",
    formula="occ(t, n, c) = P(c_t = c | target of n)",
    operands=(ctc_loss.operands[0], TARGETS),
    positional="log_probs targets input_lengths target_lengths blank",
    convention="A class of log-probability -inf has gradient 0. Derivatives are those of the reference formula, "
    "which takes a step per frame.",
    notes="Posteriors of classes are the gradient of `ctc_loss` with the other sign.",
    example=(
        ">>> import torch\n"
        ">>> import cupylosses.functional as F\n"
        ">>> log_probs = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]).log()\n"
        ">>> occ = F.ctc_posteriors(log_probs, torch.tensor([1, 2]))\n"
        ">>> (17 * occ).round().int().tolist()\n"
        "[[8, 9, 0], [2, 12, 3], [1, 0, 16]]"
    ),
    source=SOURCE,
)
