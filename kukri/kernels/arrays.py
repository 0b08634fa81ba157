"""Names of the NumPy arrays that steps and weights are made of."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
ByteArray = npt.NDArray[np.uint8]
DoubleArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
