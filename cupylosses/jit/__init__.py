"""Kernels from source, for any loss and engine: assembly of translation units, NVRTC, launchers, GPU limits."""
