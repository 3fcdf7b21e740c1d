"""Kernels from source: assembly of a translation unit, NVRTC, launchers, facts of GPUs. No loss, no engine."""
