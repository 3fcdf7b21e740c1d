"""Tools for softmax losses of a linear layer."""
