"""Tiny random Llamas of transformers, the same models here, and a driver that needs no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kukri.config import LayerConfig, ModelConfig, RopeConfig
from kukri.errors import FormatError, UnusedTensorError
from kukri.kernels.backend import Backend
from kukri.kernels.cache import KVType
from kukri.kernels.paged_kv import PAGE_TOKENS
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.taps import Hooks
from kukri.kernels.weight_handles import Experts, Weight
from kukri.models import Model
from kukri.models.weights import expert_name
from kukri.quant.types import QUANT_TYPES
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM


class TorchSource:
    """A WeightSource over a state dict, in float32. Names and row order are transformers' own."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.arrays = {name: tensor.detach().float().numpy() for name, tensor in state.items()}
        self.taken: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.arrays

    def _take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self.arrays or self.arrays[name].shape != shape:
            raise FormatError(f"no tensor of shape {shape}", tensor=name)
        self.taken.add(name)
        return np.ascontiguousarray(self.arrays[name])

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        return Weight(self._take(name, shape).view(np.uint8), QUANT_TYPES["F32"], shape, name)

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        rows = self._take(name, shape).view(np.uint8)
        parts = (
            Weight(data, QUANT_TYPES["F32"], shape[1:], expert_name(name, i)) for i, data in enumerate(rows)
        )
        return Experts(tuple(parts), name)

    def expert_vectors(self, name: str, shape: tuple[int, int]) -> np.ndarray:
        return self._take(name, shape)

    def vector(self, name: str, size: int) -> np.ndarray:
        return self._take(name, (size,))

    def done(self) -> None:
        unused = sorted(set(self.arrays) - self.taken)
        if unused:
            raise UnusedTensorError(f"nobody took {unused}")


def make_pair(
    n_heads: int = 4,
    n_kv_heads: int = 2,
    d_head: int = 16,
    n_layers: int = 2,
    tied: bool = True,
    d_model: int = 48,
    d_ffn: int = 96,
    n_vocab: int = 80,
    theta: float = 10000.0,
    max_context: int = 256,
    layers: Sequence[LayerConfig] | None = None,
    bias: bool = False,
    seed: int = 0,
) -> tuple[LlamaForCausalLM, ModelConfig, TorchSource]:
    """A random transformers model, and the config and weights that make the same model here."""
    torch.manual_seed(seed)
    hf_config = LlamaConfig(
        hidden_size=d_model,
        intermediate_size=d_ffn,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        head_dim=d_head,
        num_hidden_layers=n_layers,
        vocab_size=n_vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=max_context,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        attention_bias=bias,
        mlp_bias=bias,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
        initializer_range=0.2,  # large enough that attention is far from uniform
    )
    hf = LlamaForCausalLM(hf_config).eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if "norm" in name or "bias" in name:  # else all ones or zeros, and a mistake would not show
                parameter.copy_(1.0 + 0.3 * torch.randn_like(parameter))
    config = ModelConfig(
        architecture="llama",
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_ffn=d_ffn,
        n_vocab=n_vocab,
        norm_eps=1e-5,
        max_context=max_context,
        tie_embeddings=tied,
        rope=RopeConfig(theta, d_head),
        layers=tuple(layers or [LayerConfig()] * n_layers),
    )
    state = {name: t for name, t in hf.state_dict().items() if not (tied and name == "lm_head.weight")}
    return hf, config, TorchSource(state)


def hf_forward(hf: LlamaForCausalLM, ids: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """transformers' logits [T, V], and the residual stream [T, D] before each block."""
    with torch.no_grad():
        tokens = torch.tensor([list(ids)])
        out = hf(tokens, output_hidden_states=True)
        # the last hidden state is after the final norm: it is not the residual stream
        states = out.hidden_states[:-1]
        if hf.config.model_type == "mamba2":  # which gives the stream after each block
            states = (hf.get_input_embeddings()(tokens), *states[:-1])
    return out.logits[0].numpy(), [h[0].numpy() for h in states]


class Driver:
    """Feeds one text to a model on a backend, chunk by chunk, through pages in a shuffled order."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        hooks: Mapping[str, list] | None = None,
        kv_type: KVType = "f32",
        n_pages: int = 32,
        max_tokens: int = 256,
    ) -> None:
        self.model = model
        self.cache = backend.new_cache(model.cache_layout, n_pages, 1, kv_type)
        self.pages = np.random.default_rng(7).permutation(n_pages).astype(np.int32)
        limits = StepLimits(max_tokens, 1, max_tokens, n_pages)
        self.hooks = Hooks()
        for name, listeners in (hooks or {}).items():
            for hook in listeners:
                self.hooks.add({name: hook})
        self.program = backend.compile(model, self.cache, limits, self.hooks.names)
        self.n_cached = 0

    def step(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of all the new tokens."""
        start, stop = self.n_cached, self.n_cached + len(ids)
        positions = np.arange(start, stop, dtype=np.int32)
        slots = self.pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        table = np.zeros((1, len(self.pages)), np.int32)
        n_used = -(-stop // PAGE_TOKENS)
        table[0, :n_used] = self.pages[:n_used]
        batch = ForwardBatch(
            np.array(ids, np.int32),
            positions,
            slots.astype(np.int32),
            np.array([0, len(ids)], np.int32),
            np.array([stop], np.int32),
            table,
            np.arange(len(ids), dtype=np.int32),
        )
        self.n_cached = stop
        return self.program(batch, self.hooks).numpy().copy()

    def run(self, ids: Sequence[int], chunks: Iterable[int]) -> np.ndarray:
        """Logits of all tokens, fed in chunks of these sizes; the last size repeats."""
        sizes, logits, start, size = iter(chunks), [], 0, 0
        while start < len(ids):
            size = next(sizes, size)
            logits.append(self.step(ids[start : start + size]))
            start += size
        return np.concatenate(logits)


def run_together(model: Model, backend: Backend, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Logits of all tokens of several texts in one step, one text after the other."""
    lengths = [len(ids) for ids in texts]
    n_pages = [-(-n // PAGE_TOKENS) for n in lengths]
    table = np.zeros((len(texts), max(n_pages)), np.int32)
    for row, (n, first) in enumerate(zip(n_pages, np.cumsum([0, *n_pages]))):
        table[row, :n] = np.arange(first, first + n)[::-1]
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    owner = np.repeat(np.arange(len(texts)), lengths)
    slots = table[owner, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    n_tokens = sum(lengths)
    cache = backend.new_cache(model.cache_layout, sum(n_pages), len(texts), "f16")
    program = backend.compile(model, cache, StepLimits(n_tokens, len(texts), n_tokens, max(n_pages)))
    batch = ForwardBatch(
        np.concatenate(texts).astype(np.int32),
        positions,
        slots.astype(np.int32),
        np.cumsum([0, *lengths], dtype=np.int32),
        np.array(lengths, np.int32),
        table,
        np.arange(n_tokens, dtype=np.int32),
    )
    return program(batch).numpy().copy()


def random_ids(n: int, n_vocab: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, n_vocab, n).tolist()
