"""Log-probabilities of labels, and entropies, for rows of logits: given ones, or the output of a linear layer."""

from cupylosses.engines.log_probs.engine import LOG_PROBS
from cupylosses.engines.log_probs.linear import LINEAR_LOG_PROBS

__all__ = ["LINEAR_LOG_PROBS", "LOG_PROBS"]
