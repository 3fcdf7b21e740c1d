"""The softmax engine: losses of rows of logits, against class indices or dense targets."""
