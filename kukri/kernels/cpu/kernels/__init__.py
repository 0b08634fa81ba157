"""The kernels, as Numba compiles them."""
