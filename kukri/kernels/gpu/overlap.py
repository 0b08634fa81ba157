"""Kernels that start while the kernel before them still runs: programmatic dependent launch, from sm_90 on.

A launch takes about a microsecond until its first instruction. With the option `launch_pdl` a kernel is
launched as soon as all programs of the one before have started, and `await_inputs` holds it there until that
one has ended and what it wrote can be read. Every kernel launched so begins with it, so that the kernels
before the last have ended too. Other kernels, such as PyTorch's, start after all that came before, as ever.
"""

import triton
import triton.language as tl
from triton.language import target_info
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def await_inputs():
    """Lets the next kernel start, and waits until what the kernel before has written can be read."""
    if _IS_COMPILED and target_info.cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()
