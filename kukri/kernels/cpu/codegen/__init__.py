"""Kernels and the operations that they are made of, as Numba compiles them."""
