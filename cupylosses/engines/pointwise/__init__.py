"""The pointwise engine: losses of elements, their reductions and the gradients of broadcast operands."""
