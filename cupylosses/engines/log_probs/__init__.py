"""Log-probabilities of labels, and entropies, of rows of logits."""

from cupylosses.engines.log_probs.engine import LOG_PROBS

__all__ = ["LOG_PROBS"]
