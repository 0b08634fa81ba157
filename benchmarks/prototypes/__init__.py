"""Triton kernels that are compiled, tested and measured, and not part of the engine (docs/gpu/design.md)."""
