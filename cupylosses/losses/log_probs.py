"""Log-probabilities of labels, for policy gradients, preference losses and distillation."""

from cupylosses.definition.base import Operand
from cupylosses.engines.log_probs.definition import define_log_probs

INDEX = Operand(
    "index",
    "Labels of any integer dtype, one per row, in the shape of the logits without their last dimension; or several per "
    "row, of shape (..., K), as the K labels that a teacher keeps.",
    integer=True,
)
CONVENTION = "A label of log-probability -inf has a finite gradient. What does not count has gradient 0."

token_log_probs = define_log_probs(
    name="token_log_probs",
    summary="Log-probabilities of labels under the softmax of logits and, from the same pass, the entropy.",
    formula="z_y - log sum_c exp(z_c), and H = -sum_c p_c log p_c",
    operands=(Operand("logits", "The logits, floating, of shape (..., C)."), INDEX),
    positional="logits index",
    convention=CONVENTION,
    notes=(
        "The logits are read once in forward and once in backward, in their own dtype; nothing of their size is "
        "allocated but their gradient."
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
