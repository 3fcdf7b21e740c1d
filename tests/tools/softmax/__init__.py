"""Tools for losses of rows of logits."""
