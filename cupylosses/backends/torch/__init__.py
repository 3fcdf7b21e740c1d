"""PyTorch: autograd Functions, transforms, operators, and the replacements of `torch.nn.functional`."""
