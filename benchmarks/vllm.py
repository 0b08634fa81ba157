"""vLLM as a peer on a GPU, timed on random token ids without text, as kukri is."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from kukri.errors import UnsupportedError

_MAX_ID = 1000  # the largest random id, below every vocabulary
_MEMORY_SHARE = 0.5  # share of the device's memory, as kukri's own process is there too


def import_vllm() -> Any:
    """The module. Raises UnsupportedError, which says how to install it."""
    try:
        import vllm
    except (ImportError, OSError, RuntimeError) as error:
        why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"does not load ({error})"
        raise UnsupportedError(f"vLLM {why}: run `pip install vllm`") from None
    return vllm


class Vllm:
    """A model that vLLM loads, a directory or a repository: `n_streams` requests of `context_tokens`.

    Raises UnsupportedError without vLLM.
    """

    name = "vLLM"

    def __init__(self, model: str, context_tokens: int, n_streams: int) -> None:
        self._api = import_vllm()
        self._llm = self._api.LLM(
            model=model,
            max_model_len=context_tokens,
            max_num_seqs=n_streams,
            gpu_memory_utilization=_MEMORY_SHARE,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        self._random = np.random.default_rng(0)

    def prefill_s(self, n_tokens: int) -> float:
        """Seconds from a prompt of random ids to its first token."""
        return self._generate_s(1, n_tokens, 1)

    def batch_decode_s(self, n_streams: int, n_prompt: int, n_tokens: int) -> float:
        """Seconds in which all streams generate all but their first of `n_tokens`: a run less one of one."""
        return self._generate_s(n_streams, n_prompt, n_tokens) - self._generate_s(n_streams, n_prompt, 1)

    def close(self) -> None:
        """Gives the model back."""
        del self._llm

    def _generate_s(self, n_streams: int, n_prompt: int, n_tokens: int) -> float:
        prompts = self._random.integers(0, _MAX_ID, (n_streams, n_prompt)).tolist()
        params = self._api.SamplingParams(
            temperature=0, max_tokens=n_tokens, ignore_eos=True, detokenize=False
        )
        started = perf_counter()
        self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return perf_counter() - started
