"""An encoder of images as the engine runs it (`VisionModel`), and a kind of models that has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

from kukri.dataclass import dataclass, field, replace
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.cache import KVLayer
from kukri.kernels.op_set import Tensor
from kukri.kernels.weight_handles import Weight
from kukri.models.keys import Keys
from kukri.models.weights import Parameter, TakenWeights, WeightSource
from kukri.vision.config import VisionConfig
from kukri.vision.image import ImageInput


class ImagePart(NamedTuple):
    """A part of an image that is encoded at once, such as a tile: its patches attend only to each other."""

    patches: FloatArray  # float32 [T, values], row by row
    grid: tuple[int, int]  # (height, width) in patches
    positions: IntArray | None = None  # [axes, T], by which the encoder's heads rotate
    windows: tuple[int, ...] = ()  # patches in each, one after another, for layers of windows


class VisionModel(Protocol):
    """An encoder and its projector: two programs for the backends, and the NumPy between them.

    Layers keep keys and values in one entry of a cache, `cache_layer`: each needs them no longer than it
    runs. Taps have the names of a text model's.
    """

    config: VisionConfig
    parameters: Sequence[Parameter]
    cache_layer: KVLayer

    def encode(self, ops: Any, batch: Any) -> Tensor:
        """A part's patches, the batch's activations [T, values], -> hidden states [T, D]."""

    def merged(self, hidden: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """Hidden states [T, D] of a part of this grid, the last or of a deep layer -> [R, width]."""

    def unmerged(self, grad: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """Return the gradient [T, D] by the input of `merged`, of the gradient [R, width] by its result."""

    def project(self, ops: Any, batch: Any) -> Tensor:
        """Project the batch's activations [R, (1 + n deep) * width], which are the merged last states and
        deep states, to rows [R, (1 + n deep) * d_text]: embeddings, and the rows that the text's first layers
        add.
        """

    def check(self, image: ImageInput) -> None:
        """Raises RequestError on an image that was made for another encoder."""

    def parts(self, image: ImageInput) -> Iterator[ImagePart]:
        """The parts of an image, in the order of its rows of embeddings."""


@dataclass(frozen=True)
class VisionFamily:
    """The encoder of a kind of models of images and text, as the object next to its class states it.

    `read_hf` reads the configuration from the keys of config.json and of its `vision_config`, given the width
    of the text. `names` maps the beginnings of tensor names here to Hugging Face's, with every spelling that
    checkpoints have.
    """

    name: str
    model: Callable[[VisionConfig, WeightSource], VisionModel]
    hf_types: tuple[str, ...]  # config.json's model_type
    read_hf: Callable[[Keys, Keys, int], VisionConfig]
    names: Mapping[str, tuple[str, ...]]
    unused: str = ""  # pattern of names: tensors of images that files carry and the encoder may leave
    transposed: Set[str] = frozenset()  # matrices that are (in, out) in the files
    lacks_one: Set[str] = frozenset()  # norm weights that Hugging Face's files store as (w - 1)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults of config.json's keys
    vision_defaults: Mapping[str, Any] = field(default_factory=dict)  # the same for keys of `vision_config`


class _VisionWeights(TakenWeights):
    """The weights, with 16-bit matrices multiplied as int16, since arithmetic takes an encoder's time."""

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        return replace(super().matrix(name, shape), as_int16=True)


def load_vision(source: WeightSource, family: VisionFamily, config: VisionConfig) -> VisionModel:
    """Return the encoder with the weights of `source`. Raises the errors of the source."""
    taken = _VisionWeights(source)
    model = family.model(config, taken)
    source.done()
    model.parameters = tuple(taken.parameters.values())
    return model
