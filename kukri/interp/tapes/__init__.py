"""Op sets that run a model with gradients of every tap, in NumPy and on PyTorch."""
