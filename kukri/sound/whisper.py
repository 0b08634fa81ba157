"""Whisper's encoder (Radford et al. 2022): two convolutions over a log-mel spectrogram, then a transformer.

The first convolution is a program of its own, because the second reads every other frame of its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kukri.config import LayerConfig, ModelConfig, RopeConfig
from kukri.dataclass import dataclass
from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.op_set import Tensor
from kukri.models.keys import Keys
from kukri.models.layers import Embedding, LayerNorm, Linear
from kukri.models.weights import Parameter, WeightSource
from kukri.models.whisper import MAX_SOUND, sound_places
from kukri.vision.config import VisionConfig
from kukri.vision.encoder import ImagePart, VisionFamily
from kukri.vision.encoders.siglip import SiglipBlock

TAPS = 3  # frames that a convolution reads for one


@dataclass(frozen=True)
class SoundConfig(VisionConfig):
    """An encoder of sound, whose frames stand where an image's patches do."""

    n_bands: int = 80  # bands of the spectrogram

    @property
    def n_patches(self) -> int:
        """Frames that are encoded at once, after the second convolution."""
        return self.encoder.n_positions


class WhisperBlock(SiglipBlock):
    """One layer, in Llama's order."""

    mlp_name = ""
    attention_norm_name, mlp_norm_name = "self_attn_layer_norm", "final_layer_norm"


class WhisperEncoder:
    """The encoder: see `VisionModel`. `stem` makes what `parts` takes."""

    parameters: Sequence[Parameter] = ()

    def __init__(self, config: Any, source: WeightSource) -> None:
        self.config: VisionConfig = config
        self.n_bands: int = config.n_bands
        encoder = self.config.encoder
        d_model = encoder.d_model
        self.first = Linear(source, ["model.conv1"], (d_model,), TAPS * self.n_bands)
        self.second = Linear(source, ["model.conv2"], (d_model,), TAPS * d_model)
        self.positions = Embedding(source, "model.embed_positions", encoder.n_positions, d_model).weight
        self.blocks = [WhisperBlock(source, encoder, layer) for layer in range(encoder.n_layers)]
        self.norm = LayerNorm(source, "model.layer_norm", d_model, encoder.norm_eps)
        self.cache_layer = self.blocks[0].attention.cache_layer

    def stem(self, ops: Any, batch: Any) -> Tensor:
        """The first convolution: neighbouring frames, the activations [N, 3 * bands], -> [N, D]."""
        x = ops.activations(batch, TAPS * self.n_bands)
        return ops.map("gelu_exact", self.first(ops, x))

    def encode(self, ops: Any, batch: Any) -> Tensor:
        """See VisionModel.encode: what `parts` makes [T, 3 * D] -> hidden states [T, D]."""
        x = self.second(ops, ops.activations(batch, TAPS * self.config.encoder.d_model))
        x = ops.embed(self.positions, batch, "positions", ops.map("gelu_exact", x))
        x = ops.tap("hook_embed", None, x)
        for block in self.blocks:
            x = block(ops, x, batch)
        return x

    def merged(self, hidden: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """See VisionModel.merged: each state is a row."""
        return hidden

    def unmerged(self, grad: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """See VisionModel.unmerged."""
        return grad

    def project(self, ops: Any, batch: Any) -> Tensor:
        """The last norm of each state [R, D]."""
        x = ops.activations(batch, self.config.encoder.d_model)
        return ops.tap("ln_final.hook_normalized", None, self.norm(ops, x))

    def check(self, sound: Any) -> None:
        """Raises RequestError on a sound that was made for another encoder."""
        config = self.config
        shape = (2 * config.n_patches, self.n_bands)
        if sound.features.shape != shape or sound.n_tokens != config.most_run_rows:
            raise RequestError.of(
                "sounds",
                f"must have features {list(shape)} and {config.most_run_rows} tokens, not "
                f"{list(sound.features.shape)} and {sound.n_tokens}",
            )

    def parts(self, frames: Any) -> Iterator[ImagePart]:
        """The only part, of what `stem` made [N, D]."""
        yield ImagePart(neighbours(frames, 2), (1, len(frames) // 2))


def neighbours(frames: FloatArray, step: int = 1) -> FloatArray:
    """Each `step`th frame of [N, C] with the one before and the one after, silence beyond the ends.

    Numbers of one channel are side by side, as in the weights of a convolution: [N / step, C * 3].
    """
    padded = np.pad(frames, ((1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, TAPS, axis=0)[::step]
    return np.ascontiguousarray(windows).reshape(len(windows), -1)


def _config(keys: Keys, same: Keys, d_text: int) -> SoundConfig:
    """The encoder by the keys of config.json, which has no part for it."""
    n_layers, n_heads = (
        keys.whole(f"encoder_{name}", most=1 << 12) for name in ("layers", "attention_heads")
    )
    n_rows = keys.whole("max_source_positions", most=MAX_SOUND)
    if d_text % n_heads:
        raise keys.error("encoder_attention_heads", f"must divide {d_text}, not be {n_heads}")
    encoder = ModelConfig(
        architecture="whisper",
        n_layers=n_layers,
        d_model=d_text,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_text // n_heads,
        d_ffn=keys.whole("encoder_ffn_dim", most=1 << 18),
        n_vocab=1,
        norm_eps=keys.positive("layer_norm_eps"),
        max_context=n_rows,
        tie_embeddings=False,
        rope=RopeConfig(),
        layers=(LayerConfig(use_rope=False),) * n_layers,
        is_causal=False,
        n_positions=n_rows,
        activation=keys.activation("activation_function", "gelu"),
    )
    return SoundConfig(
        family="whisper",
        encoder=encoder,
        image_size=1,
        patch_size=1,
        merge=1,
        d_text=d_text,
        image_token_id=0,
        attends_both_ways="cross",
        whole_tokens=sound_places(n_rows),
        n_bands=keys.whole("num_mel_bins", most=1 << 10),
    )


FAMILY = VisionFamily("whisper", WhisperEncoder, ("whisper",), _config, {"model": ("encoder",)})
