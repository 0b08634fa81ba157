"""Multi-head latent attention (DeepSeek-AI 2024): one narrow row holds the keys and values of all heads.

A head's keys and values are products of the latent with matrices of the head. The cache holds the normed
latent and one rotated key that all heads share. The matrices are absorbed: a query is multiplied by the
matrix of its keys, and a head's result, a mixture of latents, by the matrix of its values. So attention
has H heads over one key head, whose values are its keys; for one token as for many, whatever the
chunk.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

from kukri.config import LatentConfig, ModelConfig, RopeConfig
from kukri.errors import UnsupportedError
from kukri.kernels.cache import KVLayer
from kukri.kernels.op_set import Ops, Tensor
from kukri.kernels.specs import AttentionSpec
from kukri.models.keys import Keys
from kukri.models.layers import Linear, RMSNorm
from kukri.models.lenses import Format, Lens
from kukri.models.rope import rope_frequencies, yarn_mscale
from kukri.models.weights import WeightSource

MAX_WIDTH = 1 << 14
_EPSILON = 1e-6  # the epsilon of narrow rows' norms, whatever the other norms have
HF_KEYS = {"rank": "kv_lora_rank", "d_nope": "qk_nope_head_dim", "d_value": "v_head_dim"}
Q_RANK, ROTARY = "q_lora_rank", "qk_rope_head_dim"
GGUF_RANK, GGUF_Q_RANK = "attention.kv_lora_rank", "attention.q_lora_rank"
GGUF_KEY, GGUF_VALUE = "attention.key_length_mla", "attention.value_length_mla"
TENSOR_NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}
BIASES: dict[str, str | bool] = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"), False),
    **{"self_attn": "attention_bias", "mlp": "mlp_bias"},
}


class LatentAttention:
    """Attention over latents.

    Taps: `hook_q` [T, H * (d_nope + rotary)] are queries as the checkpoint has them, `hook_latent` [T, rank]
    is what keys and values are made of. `hook_rot_q` [T, H * d_head] and `hook_rot_k` [T, d_head] are what
    scores are products of, `hook_latent_z` [T, H * d_head] is what patterns mix of the latter, and `hook_z`
    [T, H * d_value] is what heads made of that.
    """

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        this, latent = config.attention(layer), config.latent
        assert latent is not None, "the configuration's readers see to that"
        assert this.rope is not None, "such heads have a part that rotates"
        self.layer, self.latent, self.n_heads = layer, latent, config.n_heads
        self.n_rotary = this.rope.rotary_dim
        self.rope = rope_frequencies(this.rope, config.max_context)
        self.spec = AttentionSpec(layer, config.n_heads, 1, this.d_head, this.scale)
        self.rotary = replace(self.spec, d_head=self.n_rotary)  # the part of heads that rotates
        self.cache_layer = KVLayer(1, this.d_head)
        n_q = config.n_heads * (latent.d_nope + self.n_rotary)
        first = latent.q_rank or n_q
        names = [f"{name}.{'q_a_proj' if latent.q_rank else 'q_proj'}", f"{name}.kv_a_proj_with_mqa"]
        self.down = Linear(source, names, (first, latent.rank + self.n_rotary), config.d_model)
        self.q_norm = self.q_up = None
        if latent.q_rank:
            self.q_norm = RMSNorm(source, f"{name}.q_a_layernorm", latent.q_rank, _EPSILON)
            self.q_up = Linear(source, [f"{name}.q_b_proj"], (n_q,), latent.q_rank)
        self.norm = RMSNorm(source, f"{name}.kv_a_layernorm", latent.rank, _EPSILON)
        keys, values = (
            (config.n_heads, latent.rank, latent.d_nope),
            (config.n_heads, latent.d_value, latent.rank),
        )
        self.k_up = source.experts(f"{name}.k_b_proj.weight", keys)
        self.v_up = source.experts(f"{name}.v_b_proj.weight", values)
        n_values = config.n_heads * latent.d_value
        self.out: Any = Linear(source, [f"{name}.o_proj"], (config.d_model,), n_values)

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor, batch: Any) -> Tensor:
        """residual + attention(x), both [T, D]. Writes the layer's latents to the cache."""
        q, kv = self.down.parts(ops, x)
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(ops, self.q_norm(ops, q))
        q = ops.tap("attn.hook_q", self.layer, q)
        row, k = ops.split(kv, (self.latent.rank, self.n_rotary))
        row = ops.tap("attn.hook_latent", self.layer, self.norm(ops, row))
        d_nope, n_heads = self.latent.d_nope, self.n_heads
        absorbed = ops.head_linear(ops.head_columns(q, n_heads, 0, d_nope), self.k_up)
        rotated = ops.head_columns(q, n_heads, d_nope, d_nope + self.n_rotary)
        rotated, k = (ops.rotate(x, self.rope, self.rotary, batch) for x in (rotated, k))
        q = ops.join_heads((absorbed, rotated), n_heads)
        k = ops.join_heads((row, k), 1)
        q = ops.tap("attn.hook_rot_q", self.layer, q)
        k = ops.tap("attn.hook_rot_k", self.layer, k)
        found = ops.tap("attn.hook_latent_z", self.layer, ops.attention(q, k, k, self.spec, batch))
        found = ops.head_columns(found, n_heads, 0, self.latent.rank)
        z = ops.tap("attn.hook_z", self.layer, ops.head_linear(found, self.v_up))
        return self.out(ops, z, residual, ("hook_attn_out", self.layer))


def _read_hf(keys: Keys, facts: dict[str, Any]) -> None:
    """The latent's widths of config.json. Raises FormatError naming a key that is missing or too large."""
    widths = {field: keys.whole(key, most=MAX_WIDTH) for field, key in HF_KEYS.items()}
    q_rank = 0 if keys.value(Q_RANK) is None else keys.whole(Q_RANK, most=MAX_WIDTH)
    set_latent(facts, LatentConfig(**widths, q_rank=q_rank))


def set_latent(facts: dict[str, Any], latent: LatentConfig) -> None:
    """Set the keyword arguments for `ModelConfig` that follow from the latent's widths.

    The factor of scores follows from the width of the checkpoint's heads, and from the square of YaRN's
    factor for `mscale_all_dim`.
    """
    rope: RopeConfig = facts["rope"]
    scale = (latent.d_nope + rope.rotary_dim) ** -0.5
    if rope.scaling is not None and rope.scaling.kind == "yarn" and rope.scaling.mscale_all_dim:
        scale *= yarn_mscale(rope.scaling.factor, rope.scaling.mscale_all_dim) ** 2
    facts |= {
        "latent": latent,
        "n_kv_heads": 1,
        "d_head": latent.rank + rope.rotary_dim,
        "attention_scale": scale,
    }


def _write_hf(config: ModelConfig, keys: dict[str, Any]) -> None:
    """The keys of config.json that say what the latent's widths are."""
    latent = config.latent
    assert latent is not None, "the model has one"
    keys |= {key: getattr(latent, field) for field, key in HF_KEYS.items()}
    keys |= {
        Q_RANK: latent.q_rank or None,
        ROTARY: config.rope.rotary_dim,
        "num_key_value_heads": config.n_heads,
    }


def _read_gguf(keys: Keys, facts: dict[str, Any]) -> None:
    """Read the latent's widths from a GGUF file, whose heads are the heads that attend or the checkpoint's.

    Raises FormatError unless they go together.
    """
    rank = keys.whole(GGUF_RANK, most=MAX_WIDTH)
    q_rank = keys.whole(GGUF_Q_RANK, 0, least=0, most=MAX_WIDTH)
    n_rotary, d_head = facts["rope"].rotary_dim, facts["d_head"]
    if keys.has(GGUF_KEY):
        if d_head != rank + n_rotary:
            raise keys.error(
                "attention.key_length",
                f"is {d_head}, not the sum of a latent of {rank} and {n_rotary} that rotate",
            )
        d_head, d_value = keys.whole(GGUF_KEY, most=MAX_WIDTH), keys.whole(GGUF_VALUE, most=MAX_WIDTH)
    else:
        d_value = keys.whole("attention.value_length", most=MAX_WIDTH)
    if d_head <= n_rotary:
        raise keys.error(GGUF_KEY, f"is {d_head}, of which {n_rotary} rotate: nothing is left")
    multiplier = keys.value("rope.scaling.yarn_log_multiplier")
    scaling = facts["rope"].scaling
    if scaling is not None and scaling.kind == "yarn" and multiplier:
        mscale = round(10 * keys.positive("rope.scaling.yarn_log_multiplier", most=1e3), 6)
        scaling = replace(scaling, attention_factor=None, mscale=mscale, mscale_all_dim=mscale)
        facts["rope"] = replace(facts["rope"], scaling=scaling)
    set_latent(facts, LatentConfig(rank, d_head - n_rotary, d_value, q_rank))


def _write_gguf(config: ModelConfig, keys: dict[str, Any]) -> None:
    """The keys of a GGUF file: llama.cpp's deepseek2, whose heads attend.

    Raises UnsupportedError for a YaRN that no key says.
    """
    latent, scaling = config.latent, config.rope.scaling
    assert latent is not None, "the model has one"
    keys |= {
        "attention.value_length": latent.rank,
        GGUF_RANK: latent.rank,
        GGUF_KEY: latent.d_nope + config.rope.rotary_dim,
        GGUF_VALUE: latent.d_value,
        **({GGUF_Q_RANK: latent.q_rank} if latent.q_rank else {}),
    }
    if scaling is not None and scaling.kind == "yarn" and (scaling.mscale or scaling.mscale_all_dim):
        if scaling.mscale != scaling.mscale_all_dim:
            raise UnsupportedError(
                f"YaRN's mscale of {scaling.mscale:g} with an 'mscale_all_dim' of "
                f"{scaling.mscale_all_dim:g} is not supported in GGUF"
            )
        keys.pop("rope.scaling.attn_factor", None)
        keys["rope.scaling.yarn_log_multiplier"] = scaling.mscale_all_dim / 10


class Latent(Lens):
    """The latent's widths, and the heads that follow from them."""

    def keys(self, form: Format) -> Set[str]:
        if form == "hf":
            return {*HF_KEYS.values(), Q_RANK, ROTARY}
        widths = {GGUF_RANK, GGUF_Q_RANK, GGUF_KEY, GGUF_VALUE, "attention.value_length"}
        return widths | {"rope.scaling.yarn_log_multiplier"}

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        (_read_hf if form == "hf" else _read_gguf)(keys, facts)

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        (_write_hf if form == "hf" else _write_gguf)(config, keys)
