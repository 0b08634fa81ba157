"""The gpu backend: Triton kernels, the op set on them, and CUDA graphs of decode steps.

`backend.py` is the torch backend on the ops of `ops.py`; `products.py`, `rows.py`, `attention.py`,
`experts.py` and `recurrent.py` launch kernels; `graphs.py` captures decode steps. Importing this package is
cheap; its modules but `pack` and `tiles` import torch, and most of them Triton.
"""

import os

# One rounding rule for every version of Triton: multiplications and additions become one operation where the
# kernels say `tl.fma`, nowhere else. The default was the other until Triton 3.9.
os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"
