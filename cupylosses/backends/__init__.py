"""Array libraries: memory, streams and autograd of NumPy, CuPy and torch."""
