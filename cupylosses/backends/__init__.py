"""Backends, one per array library: memory, streams and autograd of NumPy, CuPy and torch."""
