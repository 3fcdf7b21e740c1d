"""The tools that know softmax losses of a linear layer."""
