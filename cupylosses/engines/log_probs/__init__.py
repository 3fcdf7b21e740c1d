"""Log-probabilities of labels, and entropies, of rows of logits, given or from a linear layer."""

from cupylosses.engines.log_probs.engine import LOG_PROBS
from cupylosses.engines.log_probs.linear import LINEAR_LOG_PROBS

__all__ = ["LINEAR_LOG_PROBS", "LOG_PROBS"]
