"""How files hold a module's tensor, if not as models have it: rows of `Architecture.tensor_names`.

`kukri.formats.tensor_forms` applies them in both directions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kukri.config import RecurrentConfig
from kukri.dataclass import dataclass
from kukri.kernels.arrays import FloatArray

Order = npt.NDArray[np.int64] | None  # the place in a file of each row or column of the model; None: the same
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """What a format does to a tensor's shape, and to its numbers, with what undoes that, if they change."""

    store_shape: Callable[[Shape, RecurrentConfig | None], Shape] = lambda shape, own: shape
    load: Callable[[FloatArray], FloatArray] | None = None
    store: Callable[[FloatArray], FloatArray] | None = None


def added(offset: float) -> Transform:
    """The model has `offset` more than the file."""
    n = np.float32(offset)
    return Transform(load=lambda values: values + n, store=lambda values: values - n)


def _rows_of_groups(shape: Shape, own: RecurrentConfig | None) -> Shape:
    return shape if own is None or own.n_groups == 1 else (own.n_groups, shape[0] // own.n_groups)


SAME = Transform()
ONE_ROW = Transform(lambda shape, own: (1, *shape))
ONE_NUMBER = Transform(lambda shape, own: ())
COLUMN = Transform(lambda shape, own: (*shape, 1))
GROUPED = Transform(_rows_of_groups)  # a row for each group of heads
# a convolution of each channel alone: (channels, 1, taps)
CHANNELS = Transform(lambda shape, own: (shape[0], 1, *shape[1:]))
LOG_OF_NEGATIVE = Transform(load=lambda values: -np.exp(values), store=lambda values: np.log(-values))

# how names end here, and in safetensors
PARAMETER = (".weight", "")  # no module of its own
BIAS_PARAMETER = (".bias", "_bias")
STEP_BIAS = ("_proj.bias", "_bias")


@dataclass(frozen=True)
class Stored:
    """A module's name in GGUF ("": none), and what each format does to its tensor."""

    gguf: str
    ending: tuple[str, str] | None = None  # how its name ends here, and in safetensors
    hf: Transform = SAME
    in_gguf: Transform = SAME
    is_bare: bool = False  # GGUF's name is whole, without ".weight"
    is_small: bool = False  # a matrix that stays float32 in GGUF, as llama.cpp has convolutions and routers
    gguf_key: str = ""  # the key of a list with one number for each layer, in place of tensors
    # rows and columns in the order of GGUF's heads, if that is not the order of safetensors
    tiles: Callable[[RecurrentConfig], tuple[Order, Order]] | None = None
