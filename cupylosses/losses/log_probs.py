"""Log-probabilities of labels, for policy gradients, preference losses and distillation."""

from cupylosses.definition.base import Operand
from cupylosses.engines.log_probs.definition import LinearLogProbs, define_log_probs

INDEX = Operand(
    "index",
    "Labels of any integer dtype, one per row, in the shape of the first operand without its last dimension; or "
    "several per row, of shape (..., K), such as the K labels that a teacher keeps.",
    integer=True,
)
CONVENTION = "A label of log-probability -inf has a finite gradient. Entries that do not count have gradient 0."

token_log_probs = define_log_probs(
    name="token_log_probs",
    summary="Log-probabilities of labels under the softmax of logits and, from the same pass, the entropy.",
    formula="z_y - log sum_c exp(z_c), and H = -sum_c p_c log p_c",
    operands=(Operand("logits", "The logits, floating, of shape (..., C)."), INDEX),
    positional="logits index",
    convention=CONVENTION,
    notes=(
        "The logits are read once in forward and once in backward, in their own dtype; the only allocation of their "
        "size is their gradient."
    ),
    example=(
        ">>> import torch\n"
        ">>> import cupylosses.functional as F\n"
        ">>> logits = torch.tensor([[2.0, 0.5, -1.0], [0.0, 1.5, 0.5]], requires_grad=True)\n"
        ">>> index = torch.tensor([0, 2])\n"
        ">>> [round(x, 3) for x in F.token_log_probs(logits, index).tolist()]\n"
        "[-0.241, -1.464]\n"
        ">>> log_probs, entropy = F.token_log_probs(logits, index, temperature=0.5, return_entropy=True)\n"
        ">>> (log_probs.sum() + 0.01 * entropy.sum()).backward()  # logits.grad holds the gradient"
    ),
    source="R. J. Williams, Simple statistical gradient-following algorithms for connectionist reinforcement learning, "
    "Machine Learning 8, 1992; online softmax: M. Milakov, N. Gimelshein, Online normalizer calculation for softmax, "
    "arXiv 1805.02867, 2018.",
)

linear_token_log_probs = define_log_probs(
    LinearLogProbs,
    name="linear_token_log_probs",
    summary="Log-probabilities of labels under the output of a linear layer, without its logits as a whole.",
    formula="token_log_probs(input @ linear_weight.T + linear_bias, index)",
    operands=(
        Operand("input", "The features, floating, of shape (..., D)."),
        Operand("linear_weight", "The weight of the layer, of shape (C, D), in the dtype of `input`."),
        INDEX,
    ),
    positional="input linear_weight index",
    convention=CONVENTION,
    notes=(
        "The logits exist in chunks of rows, which `max_memory` bounds. Forward keeps four numbers per row; backward "
        "recomputes the logits of each chunk and writes their gradient over them, so that forward and backward "
        "together take four matrix products."
    ),
    example=(
        ">>> import torch\n"
        ">>> import cupylosses.functional as F\n"
        ">>> hidden = torch.tensor([[1.0, 0.5], [0.0, -1.0]], requires_grad=True)\n"
        ">>> weight = torch.tensor([[2.0, 0.0], [0.5, 1.0], [-1.0, 0.5]], requires_grad=True)\n"
        ">>> index = torch.tensor([0, 2])\n"
        ">>> [round(x, 3) for x in F.linear_token_log_probs(hidden, weight, index).tolist()]\n"
        "[-0.359, -1.18]\n"
        ">>> log_probs, entropy = F.linear_token_log_probs(hidden, weight, index, return_entropy=True)\n"
        ">>> (log_probs.sum() + 0.01 * entropy.sum()).backward()  # weight.grad holds the gradient"
    ),
    source="E. Wijmans et al., Cut your losses in large-vocabulary language models, ICLR 2025.",
)
