"""Triton kernels for GPUs. No backend calls them yet.

Importing this package is cheap; its modules but `pack` and `tiles` import torch, `launch` and `*_kernels`
Triton.
"""

import os

# One rounding rule for every version of Triton: multiplications and additions become one operation where the
# kernels say `tl.fma`, nowhere else. The default was the other until Triton 3.9.
os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"
