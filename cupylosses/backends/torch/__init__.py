"""PyTorch backend: autograd Functions, transforms, operators, and replacements of `torch.nn.functional` losses."""
