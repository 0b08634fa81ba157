"""Triton kernels that are compiled, tested and measured, and not part of the engine: see docs/gpu.md."""
