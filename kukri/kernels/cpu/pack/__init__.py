"""Weights in the layout that the kernels read, and their quantization."""
