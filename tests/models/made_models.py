"""Tiny random models of transformers, and the configuration and weights of the same here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from kukri.config import (
    LatentConfig,
    LayerConfig,
    ModelConfig,
    RecurrentConfig,
    RopeConfig,
)
from kukri.models import ARCHITECTURES
from kukri.quant.types import QUANT_TYPES
from tests.lazy_imports import lazy_imports
from tests.models.tiny_llama import TorchSource
from tests.models.tiny_models import (
    CONTEXT,
    D_HEAD,
    HEADS,
    N_LAYERS,
    ORIGINAL,
    TINY,
    D,
    F,
    V,
    rope,
)

with lazy_imports():
    import torch
    import transformers


def make(
    name: str, seed: int = 0, weight_type: str = "F32", context: int = CONTEXT
) -> tuple[Any, ModelConfig, TorchSource]:
    """transformers' model, our config and the same weights, each matrix rounded to `weight_type`.

    `context` other than CONTEXT is for models whose scaling does not follow from it, or is longrope.

    A model is made once a process, so a test copies transformers' model before it changes it. The arrays are
    read-only.
    """
    hf, config, made, random_state = _made(name, repr(TINY[name]), seed, weight_type, context)
    torch.set_rng_state(random_state)  # what a test draws next does not depend on the tests before it
    source = TorchSource({})
    source.arrays = {**made}
    return hf, config, source


@cache
def _made(
    name: str, made_of: str, seed: int, weight_type: str, context: int
) -> tuple[Any, ModelConfig, dict[str, np.ndarray], torch.Tensor]:
    """transformers' model, our config, the arrays of the same weights and the random state.

    `made_of` says what stands in `TINY`, which a test may replace.
    """
    tiny = TINY[name]
    scaling = tiny.scaling
    if scaling is not None and scaling.kind == "longrope":
        scaling = replace(scaling, factor=context / ORIGINAL)
    torch.manual_seed(seed)
    common = {
        "hidden_size": D, "intermediate_size": F, "num_attention_heads": HEADS, "head_dim": D_HEAD,
        "num_key_value_heads": tiny.n_kv_heads, "num_hidden_layers": N_LAYERS, "vocab_size": V,
        "max_position_embeddings": context, "tie_word_embeddings": tiny.tied,
        "initializer_range": 0.15,  # attention is far from uniform; steeper, float32 itself nears 1e-4
        "pad_token_id": 0, "attn_implementation": "eager",
        "rope_parameters": rope("default"),
    }  # fmt: skip
    config_class = _hf_class(f"{tiny.hf_type}Config")
    epsilons = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
    epsilon = {key: 1e-5 for key in epsilons if hasattr(config_class(), key)}
    hf_config = config_class(**{**common, **epsilon, **tiny.hf})
    class_name = f"{tiny.hf_type.removesuffix('Text')}ForCausalLM"  # InternLM3 is Llama's
    make_hf = _hf_class(class_name)
    hf = make_hf(hf_config).eval()
    kind = QUANT_TYPES[weight_type]
    with torch.no_grad():
        for key, parameter in hf.named_parameters():
            if "sinks" in key:
                parameter.copy_(torch.randn_like(parameter))
            elif (
                "norm" in key or "bias" in key or key.endswith("scale")
            ):  # else all ones or zeros, and a mistake would not show
                middle = 0.0 if "bias" in key else 1.0 - tiny.norm_offset * ("linear_attn" not in key)
                parameter.copy_(middle + 0.3 * torch.randn_like(parameter))
            elif "act_fn.alpha" in key:
                parameter.copy_(torch.randn_like(parameter))
            elif is_convolution(key) or key.endswith(".D"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif kind.name == "BF16":
                parameter.copy_(parameter.bfloat16().float())
        for key, buffer in hf.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(1))
            elif key.endswith("bias"):  # routers' biases
                buffer.copy_(0.3 * torch.randn_like(buffer))
    sizes = {"d_head": D_HEAD, "d_ffn": F, "n_heads": HEADS, **tiny.facts}
    config = ModelConfig(
        architecture=name.split("-")[0],
        activation=ARCHITECTURES[name.split("-")[0]].activation_op,
        n_layers=N_LAYERS,
        d_model=D,
        n_kv_heads=tiny.n_kv_heads,
        n_vocab=V,
        norm_eps=1e-5,
        max_context=context,
        tie_embeddings=tiny.tied,
        rope=RopeConfig(10000.0, tiny.rotary_dim, scaling),
        layers=tuple(tiny.layers),
        mixture=tiny.mixture,
        recurrent=tiny.recurrent,
        **sizes,
    )
    state = {key: t for key, t in hf.state_dict().items() if not (tiny.tied and key == "lm_head.weight")}
    state = _stacked(dict(_named(key, tensor) for key, tensor in state.items()))
    state = {_canonical(key, name.split("-")[0], tiny.layers): tensor for key, tensor in state.items()}
    if name == "olmo_hybrid":
        state = _of_olmo_hybrid(state, config)
    if name.startswith("granitemoe"):
        shared = "mlp.shared_experts" if tiny.mixture and tiny.mixture.d_shared else "shared_mlp"
        state = _of_granite(state, shared if tiny.mixture else "mlp")
    if name == "gemma4_moe_text":
        state = {key.replace(".router.proj", ".mlp.gate").replace(".experts", ".mlp.experts"): tensor
                 for key, tensor in state.items()}  # fmt: skip
    made = TorchSource(_with_experts_apart(state))
    for key in made.arrays:
        is_norm = key.endswith("norm.weight") and "linear_attn" not in key
        made.arrays[key] = made.arrays[key] + np.float32(tiny.norm_offset if is_norm else 0.0)
    if config.has_gates:  # rows of a head's query and gate apart
        for key in [key for key in made.arrays if "q_proj" in key]:
            made.arrays[key] = np.concatenate([part.reshape(-1, D) for part in _gates(made.arrays[key])])
    if name == "gpt_neox":  # a head's query, key and value next to each other
        for key in [key for key in made.arrays if "qkv_proj" in key]:
            rows = made.arrays[key].reshape(HEADS, 3, D_HEAD, -1).swapaxes(0, 1)
            made.arrays[key] = rows.reshape(made.arrays[key].shape)
    if config.latent is not None:
        made.arrays = _with_heads_apart(made.arrays, config, tiny.is_paired)
    elif tiny.is_paired:
        rotated = [key for key in made.arrays if "q_proj" in key or "k_proj" in key]
        made.arrays |= {key: _half_split(made.arrays[key]) for key in rotated}
    # copies, because some arrays are transformers' own memory, which `.numpy()` shares
    arrays = {key: np.array(array, order="C") for key, array in made.arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return hf, config, arrays, torch.get_rng_state()


def is_convolution(key: str) -> bool:
    """True for the taps of a convolution."""
    return key.endswith((".conv.weight", "conv1d.weight"))


def _hf_class(name: str) -> Any:
    """A class of transformers, or one of those that stand for classes on the hub."""
    from tests.models import (
        bailing_class,
        exaone_class,
        minicpm_class,
        smallthinker_class,
        token_by_token,  # noqa: F401
    )

    modules = bailing_class, exaone_class, minicpm_class, smallthinker_class
    own = next((vars(module)[name] for module in modules if name in vars(module)), None)
    return own or getattr(transformers, name, transformers.LlamaForCausalLM)


def _stacked(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices of single experts as a stack of all."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for key, tensor in state.items():
        stacks.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", key), []).append(tensor)
    return {
        key: torch.stack(each) if ".experts." in key and len(each) > 1 else each[0]
        for key, each in stacks.items()
    }


def _with_heads_apart(
    arrays: Mapping[str, np.ndarray], config: ModelConfig, is_paired: bool
) -> dict[str, np.ndarray]:
    """Tensors of latent attention as models have them: of each head a matrix of keys, transposed, and one of
    values; rows that rotate in halves.
    """
    latent, apart = config.latent, dict[str, np.ndarray]()
    assert latent is not None
    for key, array in arrays.items():
        if "kv_b_proj" in key:
            rows = array.reshape(HEADS, -1, latent.rank)
            apart[key.replace("kv_b", "k_b")] = rows[:, : latent.d_nope].swapaxes(1, 2)
            apart[key.replace("kv_b", "v_b")] = rows[:, latent.d_nope :]
        else:
            apart[key] = turned_tail(key, array, latent, _half_split) if is_paired else array
    return apart


def turned_tail(key: str, array: np.ndarray, latent: LatentConfig, turn: Any) -> np.ndarray:
    """An array whose rows that rotate, the last of each query's head or of all keys, are turned."""
    if re.search(r"\.(?:q_proj|q_b_proj|kv_a_proj_with_mqa)\.", key) is None:
        return array
    n_before = latent.rank if "kv_a" in key else latent.d_nope
    heads = array.reshape(-1, n_before + D_HEAD, *array.shape[1:]).copy()
    for head in heads:
        head[n_before:] = turn(head[n_before:])
    return heads.reshape(array.shape)


def _gates(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of queries and gates, head by head, both [heads, D_HEAD, D]."""
    heads = rows.reshape(HEADS, 2, D_HEAD, -1)
    return heads[:, 0], heads[:, 1]


def _named(key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A parameter of transformers' as kukri names it and has it."""
    if key.endswith(".A_log"):
        return f"{key}.weight", -torch.exp(tensor)
    if key.endswith(("shared_expert_gate.weight", "e_score_correction_bias", "expert_bias")):
        return key.replace("_bias", ".bias"), tensor.reshape(-1)
    key = (
        f"{key}.weight"
        if key.endswith((".D", ".layer_scalar", "_scale", ".scale")) or ".act_fn." in key
        else key.replace(".dt_bias", ".dt_proj.bias")
    )
    return key, tensor[:, 0] if is_convolution(key) else tensor.reshape(-1) if ".act_fn." in key else tensor


def _of_nemotron_h(key: str, layers: Sequence[LayerConfig]) -> str:
    """A tensor of a layer's only part, by what the part is."""
    key = key.replace("backbone.", "model.")
    match = re.fullmatch(r"(model\.layers\.(\d+))\.(.+)", key)
    if match is None:
        return key
    layer = layers[int(match[2])]
    part = "mamba" if layer.is_recurrent else "mlp" if layer.is_mlp else "self_attn"
    name = match[3].replace("mixer.", f"{part}.")
    return f"{match[1]}.{'input_layernorm.weight' if name == 'norm.weight' else name}"


def _canonical(key: str, architecture: str, layers: Sequence[LayerConfig]) -> str:
    """A tensor's name as kukri has it, if it is the only one of its row in `Architecture.joined`."""
    if architecture == "gpt_neox":  # as files have it
        key = key.replace("gpt_neox.", "model.").replace("lm_head", "embed_out")
    key = key.replace("feed_forward.experts.", "mlp.experts.")  # which are one tensor in transformers
    key = key.replace(".gate.moe_statics.", ".moe_statics.")  # as files have it
    key = key.replace("mlp.router.", "mlp.gate.") if architecture == "phimoe" else key
    if architecture in ("nemotron_h", "nemotron_h_moe", "mamba2"):  # several of its modules have one name
        return _of_nemotron_h(key, layers)
    for stored, modules in ARCHITECTURES[architecture].joined.items():
        if len(modules) == 1:
            key = re.sub(rf"(\.\d+\.){re.escape(stored)}(?=\.\w+$)", rf"\1{modules[0]}", key)
    return key


def _of_olmo_hybrid(state: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """OLMo Hybrid's tensors as files have them: the rule's layers with norms under other names."""
    own, made = config.recurrent, dict[str, torch.Tensor]()
    assert own is not None
    n_keys = own.n_groups * own.d_state
    for key, tensor in state.items():
        if "conv1d" in key:
            for part, rows in zip("qkv", tensor.split([n_keys, n_keys, own.n_heads * own.d_head])):
                made[key.replace("conv1d", f"{part}_conv1d")] = rows
        elif "layers.3" in key or "layers" not in key:
            made[key] = tensor
        else:
            key = key.replace("input_layernorm", "attention_layer_norm")
            made[key.replace("post_attention_layernorm", "feedforward_layer_norm")] = tensor
    return made


def _of_granite(state: Mapping[str, torch.Tensor], mlp: str) -> dict[str, torch.Tensor]:
    """Granite 4's tensors as kukri names them, the gate and up of the MLP for all tokens apart."""
    made: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        key = key.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe", "mlp")
        if "shared_mlp.input_linear" in key:
            for part, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2)):
                made[key.replace("shared_mlp.input_linear", f"{mlp}.{part}")] = rows
        else:
            made[key.replace("shared_mlp.output_linear", f"{mlp}.down_proj")] = tensor
    return made


def tiled(key: str, array: np.ndarray, recurrent: RecurrentConfig) -> np.ndarray:
    """An array as llama.cpp's converter has it: value head j of key head k at place j * n_groups + k."""
    if "linear_attn." not in key or "linear_attn.norm" in key:
        return array
    n, g, n_keys = recurrent.n_heads, recurrent.n_groups, 2 * recurrent.n_groups * recurrent.d_state
    order = np.arange(n).reshape(g, n // g).T.reshape(-1)
    wide = (order[:, None] * recurrent.d_head + np.arange(recurrent.d_head)).reshape(-1)
    if "out_proj" in key:
        return array[:, wide]
    if "in_proj_qkv" in key or "conv1d" in key:
        return np.concatenate([array[:n_keys], array[n_keys:][wide]])
    return array[wide if "in_proj_z" in key else order]


def _half_split(rows: np.ndarray) -> np.ndarray:
    """Rows of q or k in pairs as kukri has them: the inverse of `_interleaved`."""
    return rows.reshape(-1, D_HEAD // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _with_experts_apart(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gate and up of experts, which transformers holds as one, as a stack of matrices each."""
    apart: dict[str, torch.Tensor] = {}
    is_interleaved = any(key.endswith("gate_up_proj_bias") for key in state)  # gpt-oss, and (in, out)
    for key, tensor in state.items():
        stem, _, part = key.rpartition(".")
        if part == "sinks":
            apart[f"{key}.weight"] = tensor
        elif not stem.endswith(".experts"):
            apart[key] = tensor
        else:
            kind = "bias" if part.endswith("_bias") else "weight"
            if is_interleaved and kind == "weight":
                tensor = tensor.transpose(1, 2)
            if not part.startswith("gate_up"):
                apart[f"{stem}.{part.partition('_bias')[0]}.{kind}"] = tensor
                continue
            gate_up = (tensor[:, ::2], tensor[:, 1::2]) if is_interleaved else tensor.chunk(2, dim=1)
            apart |= zip((f"{stem}.gate_proj.{kind}", f"{stem}.up_proj.{kind}"), gate_up)
    return apart


# whose converter puts rows of q and k in pairs
