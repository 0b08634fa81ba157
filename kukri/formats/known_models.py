"""Well-known models under short names: each the repository of its authors, and what it needs.

One line a model. Parameters come from the model's card; what a model is good for is its makers' word.
"""

from __future__ import annotations

from math import ceil

from kukri.dataclass import dataclass

_BYTES_Q4 = 0.6  # bytes of a parameter in Q4_K, with the larger types of some tensors
_BASE_GB = 1.5  # the process, the KV cache of a few thousand tokens, and the system
_MACHINES = (2, 4, 8, 16, 32, 64)  # gigabytes that machines have


@dataclass(frozen=True)
class KnownModel:
    """A model by a short name."""

    name: str
    repo: str  # on the Hugging Face hub, in float weights unless said
    n_billion: float  # parameters, including images' and sound's
    licence: str  # as the hub has it
    good_for: str
    download_gb: float = 0.0  # if the weights are packed there

    @property
    def n_gb(self) -> float:
        """Gigabytes to download: two bytes a parameter, unless the weights are packed."""
        return self.download_gb or 2 * self.n_billion

    @property
    def memory_gb(self) -> int:
        """Gigabytes of memory of the smallest machine that runs it in Q4_K."""
        return machine_gb(self.download_gb or _BYTES_Q4 * self.n_billion)


def machine_gb(weights_gb: float) -> int:
    """Gigabytes of memory of the smallest usual machine that runs a model whose weights are that large."""
    least = weights_gb + _BASE_GB
    return next((size for size in _MACHINES if size >= least), ceil(least))


_APACHE, _GEMMA, _LFM, _LLAMA = "apache-2.0", "gemma", "lfm1.0", "llama3.2"
_FALCON = "falcon-llm-license"
KNOWN_MODELS = (
    KnownModel("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", 0.36, _APACHE, "trying things out"),
    KnownModel("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", 1.7, _APACHE, "chat, rewriting"),
    KnownModel("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", 3.1, _APACHE, "chat, tools, reasoning on demand"),
    KnownModel("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", 0.5, _APACHE, "short answers"),
    KnownModel("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", 1.5, _APACHE, "chat, structured output"),
    KnownModel("qwen3-0.6b", "Qwen/Qwen3-0.6B", 0.6, _APACHE, "short answers, reasoning on demand"),
    KnownModel("qwen3-1.7b", "Qwen/Qwen3-1.7B", 1.7, _APACHE, "chat, tools, reasoning on demand"),
    KnownModel("qwen3-4b", "Qwen/Qwen3-4B", 4.0, _APACHE, "chat, tools and agents, code"),
    KnownModel("qwen3-8b", "Qwen/Qwen3-8B", 8.2, _APACHE, "chat, tools and agents, code"),
    KnownModel("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 30.5, _APACHE, "agents, code; 3B active"),
    KnownModel("qwen3.5-0.8b", "Qwen/Qwen3.5-0.8B", 0.8, _APACHE, "short answers, many languages"),
    KnownModel("qwen3.5-2b", "Qwen/Qwen3.5-2B", 2.0, _APACHE, "chat, tools, long texts"),
    KnownModel("qwen3.5-4b", "Qwen/Qwen3.5-4B", 4.0, _APACHE, "chat, tools and agents, long texts"),
    KnownModel("qwen3.5-9b", "Qwen/Qwen3.5-9B", 9.0, _APACHE, "agents, code, long texts"),
    KnownModel("qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B", 35.0, _APACHE, "agents, long texts; 3B active"),
    KnownModel("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", 1.2, _LLAMA, "chat, summaries"),
    KnownModel("llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", 3.2, _LLAMA, "chat, summaries, tools"),
    KnownModel("phi-2", "microsoft/phi-2", 2.8, "mit", "research: no chat template"),
    KnownModel("phi-3.5-mini", "microsoft/Phi-3.5-mini-instruct", 3.8, "mit", "chat, reasoning in English"),
    KnownModel("phi-4-mini", "microsoft/Phi-4-mini-instruct", 3.8, "mit", "chat, tools, reasoning"),
    KnownModel("gemma-2-2b", "google/gemma-2-2b-it", 2.6, _GEMMA, "chat; research: open autoencoders"),
    KnownModel("gemma-3-270m", "google/gemma-3-270m-it", 0.27, _GEMMA, "extraction after fine-tuning"),
    KnownModel("gemma-3-1b", "google/gemma-3-1b-it", 1.0, _GEMMA, "chat, summaries, rewriting"),
    KnownModel("gemma-3-4b", "google/gemma-3-4b-it", 4.3, _GEMMA, "chat in many languages"),
    KnownModel("gemma4-e2b", "google/gemma-4-E2B-it", 5.1, _APACHE, "chat, tools, many languages"),
    KnownModel("gemma4-e4b", "google/gemma-4-E4B-it", 8.0, _APACHE, "chat, tools and agents, many languages"),
    KnownModel("gemma4-12b", "google/gemma-4-12B-it", 12.0, _APACHE, "agents, code, many languages"),
    KnownModel("gemma4-26b-a4b", "google/gemma-4-26B-A4B-it", 25.2, _APACHE, "agents, code; 4B active"),
    KnownModel("lfm2.5-1.2b", "LiquidAI/LFM2.5-1.2B-Instruct", 1.2, _LFM, "chat, extraction, fast on CPUs"),
    KnownModel("lfm2-8b-a1b", "LiquidAI/LFM2-8B-A1B", 8.3, _LFM, "chat, tools; 1.5B active: fast on CPUs"),
    KnownModel("granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", 2.5, _APACHE, "RAG, tools"),
    KnownModel("granite-4-tiny", "ibm-granite/granite-4.0-h-tiny", 7.0, _APACHE, "RAG, tools; 1B active"),
    KnownModel(
        "falcon-h1-0.5b", "tiiuae/Falcon-H1-0.5B-Instruct", 0.52, _FALCON, "long texts, short answers"
    ),
    KnownModel("ernie-21b-a3b", "baidu/ERNIE-4.5-21B-A3B-PT", 21.8, _APACHE, "chat in Chinese; 3B active"),
    KnownModel("gpt-oss-20b", "openai/gpt-oss-20b", 20.9, _APACHE, "reasoning, tools; 3.6B active", 13.8),
    KnownModel("olmo-2-1b", "allenai/OLMo-2-0425-1B-Instruct", 1.5, _APACHE, "research: open data"),
    KnownModel("olmo-3-7b", "allenai/Olmo-3-7B-Instruct", 7.3, _APACHE, "chat, tools; open data"),
    KnownModel("tinyllama", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1.1, _APACHE, "trying things out"),
    KnownModel("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", 7.2, _APACHE, "chat, tools"),
    KnownModel("qwen3-embedding-0.6b", "Qwen/Qwen3-Embedding-0.6B", 0.6, _APACHE, "embeddings"),
    KnownModel("qwen3-reranker-0.6b", "Qwen/Qwen3-Reranker-0.6B", 0.6, _APACHE, "ranking documents"),
    KnownModel("embeddinggemma", "google/embeddinggemma-300m", 0.3, _GEMMA, "embeddings, many languages"),
    KnownModel("bge-m3", "BAAI/bge-m3", 0.57, "mit", "embeddings, many languages"),
)


def table() -> list[list[str]]:
    """The list as rows of texts, under `COLUMNS`: by memory, then as listed."""
    ordered = sorted(KNOWN_MODELS, key=lambda model: model.memory_gb)
    return [
        [f"{m.memory_gb} GB", m.name, f"{m.n_billion:g}B", f"{m.n_gb:.1f} GB", m.licence, m.good_for]
        for m in ordered
    ]


COLUMNS = ("memory, Q4_K", "name", "parameters", "download", "licence", "good for")
