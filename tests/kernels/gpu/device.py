"""Where the tests of the Triton kernels run: under Triton's interpreter on the CPU, or on a device.

KUKRI_TEST_DEVICE=cuda pytest -m "" tests/kernels/gpu
"""

from __future__ import annotations

import os

DEVICE = os.environ.get("KUKRI_TEST_DEVICE", "cpu")
IS_INTERPRETED = DEVICE == "cpu"
