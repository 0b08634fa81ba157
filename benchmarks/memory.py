"""The table of models and memory in docs/howto/sizing.md: `python -m benchmarks.memory`.

Weights are counted tensor by tensor as a file of the mix has them, and the rows of a tied embedding next to
its tiles; keys and values as the cache keeps them. Python and the kernels take some 150 MB next to.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness import Experiment, Table, run
from benchmarks.make_model import SHAPES, tensor_shapes
from kukri.formats.gguf.reader import n_bytes_of
from kukri.kernels.cache import KVLayer
from kukri.kernels.paged_kv import PAGE_TOKENS, page_bytes
from kukri.quant.mixes import mix_types
from kukri.quant.types import QUANT_TYPES

MIXES = ("Q4_K_M", "Q8_0")
MODELS = {
    "SmolLM2-135M": "smollm2-135m",
    "Gemma 3 270M": "gemma3-270m",
    "SmolLM2-360M": "smollm2-360m",
    "Gemma 3 1B": "gemma3-1b",
    "SmolLM2-1.7B": "smollm2-1.7b",
    "SmolLM3-3B": "smollm3-3b",
}


@dataclass(frozen=True)
class ModelMemory:
    """A model's memory in bytes."""

    model: str
    weight_bytes: dict[str, int]  # by mix
    kv_bytes: int  # for one request of `n_tokens`
    n_tokens: int


def memory_of(model: str, n_tokens: int) -> ModelMemory:
    """The memory of one of MODELS, with a request of `n_tokens`."""
    shape = SHAPES[MODELS[model]]
    tensors = tensor_shapes(shape)
    weights = {}
    for mix in MIXES:
        types = mix_types(mix, tensors, shape.n_heads // shape.n_kv_heads)
        sizes = {
            name: n_bytes_of(types.get(name, QUANT_TYPES["F32"]), dims) for name, dims in tensors.items()
        }
        weights[mix] = sum(sizes.values()) + sizes["token_embd.weight"]
    layout = [KVLayer(shape.n_kv_heads, shape.d_head)] * shape.n_layers
    return ModelMemory(model, weights, page_bytes(layout, "f16") * -(-n_tokens // PAGE_TOKENS), n_tokens)


def main() -> None:
    """Prints the table."""
    experiment = Experiment("memory", "Compute the memory of models of known shapes.", with_model=False)
    experiment.count("-n", "--tokens", 4096, "tokens of a request")
    given = experiment.parse()
    found = [memory_of(model, given.tokens) for model in MODELS]
    rows = [
        [one.model, *(f"{n / 1e9:.2f} GB" for n in one.weight_bytes.values()), f"{one.kv_bytes / 1e9:.2f} GB"]
        for one in found
    ]
    header = ["model", *MIXES, f"KV cache, {given.tokens:,} tokens"]
    experiment.show({"models": [vars(one) for one in found]}, Table("memory", header, rows))


if __name__ == "__main__":
    run(main)
