"""llama.cpp through llama-cpp-python's C interface, timed as its own llama-bench times it.

`llama_decode` and the wait for it are timed, on random token ids and without sampling or text, so no Python
of llama-cpp-python's own counts against it. Batches, flash attention and cache types are llama-bench's
defaults: 2048 and 512 tokens, chosen by llama.cpp, fp16.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.errors import FormatError, UnsupportedError

_BATCH_TOKENS, _MICRO_BATCH_TOKENS = 2048, 512
_KV_TYPES = {"f16": 1, "q8_0": 8, "q4": 2}  # ggml_type; its q4_0 for q4


def import_llama_cpp() -> Any:
    """The module. Raises UnsupportedError, which says how to install it."""
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"does not load ({error})"
        raise UnsupportedError(f"llama-cpp-python {why}: run `pip install --group bench`") from None
    return llama_cpp


class LlamaCpp:
    """A model loaded by llama.cpp: `n_streams` requests at a time of `context_tokens`."""

    name = "llama-cpp-python"

    def __init__(
        self,
        path: str | os.PathLike[str],
        n_threads: int,
        context_tokens: int,
        all_logits: bool = False,
        plain_weights: bool = False,
        n_streams: int = 1,
        kv_type: str = "f16",
        on_gpu: bool = False,
    ) -> None:
        """`all_logits` reserves the memory that `logits` needs.

        `plain_weights` leaves them as the file has them: slower, but llama.cpp's kernels for AMX end the
        process on virtual machines that announce AMX and do not have it.

        It runs on the CPU, or with `on_gpu` all layers on the GPU. Raises UnsupportedError without
        llama-cpp-python, or one that was built for a GPU, FormatError if it cannot load the file.
        """
        self._api = api = import_llama_cpp()
        # llama.cpp writes its log to stderr from the start; kept here, or ctypes would free the callback
        self._silence = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._silence, ctypes.c_void_p(0))
        api.llama_backend_init()
        model_params = api.llama_model_default_params()
        if on_gpu and not api.llama_supports_gpu_offload():
            raise UnsupportedError("llama-cpp-python was not built for a GPU")
        model_params.n_gpu_layers = -1 if on_gpu else 0
        if plain_weights:
            model_params.use_extra_bufts = False
        load = getattr(api, "llama_model_load_from_file", None) or api.llama_load_model_from_file
        self._model = load(os.fsencode(path), model_params)
        if not self._model:
            raise FormatError("llama.cpp cannot load this file", path=path)
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = context_tokens * n_streams, n_streams
        params.n_batch, params.n_ubatch = _BATCH_TOKENS, _MICRO_BATCH_TOKENS
        params.n_threads = params.n_threads_batch = n_threads
        params.no_perf = True
        params.type_k = params.type_v = _KV_TYPES[kv_type]
        if hasattr(params, "n_outputs_max") and (all_logits or n_streams > 1):
            params.n_outputs_max = _MICRO_BATCH_TOKENS if all_logits else n_streams
        init = getattr(api, "llama_init_from_model", None) or api.llama_new_context_with_model
        self._context = init(self._model, params)
        if not self._context:
            raise FormatError("llama.cpp cannot make a context for this file", path=path)
        self.n_vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))
        self._random = np.random.default_rng(0)

    def prefill_s(self, n_tokens: int) -> float:
        """Seconds for one prompt of random ids, with the logits of its last token."""
        ids = self._random.integers(0, self.n_vocab, n_tokens).tolist()
        self._clear()
        started = time.perf_counter()
        self._decode(ids)
        return time.perf_counter() - started

    def decode_s(self, n_tokens: int) -> float:
        """Seconds for `n_tokens` random ids one after the other, from an empty cache, logits of each."""
        ids = self._random.integers(0, self.n_vocab, n_tokens).tolist()
        self._clear()
        started = time.perf_counter()
        for token_id in ids:
            self._decode([token_id])
        return time.perf_counter() - started

    def batch_decode_s(self, n_streams: int, n_prompt: int, n_tokens: int) -> float:
        """Seconds of the steps in which all streams generate all but their first of `n_tokens`.

        A step decodes one random id of each stream, with its logits, as llama-batched-bench does.
        """
        self._clear()
        prompts = self._random.integers(0, self.n_vocab, (n_streams, n_prompt)).tolist()
        for stream, ids in enumerate(prompts):
            tokens = [(token_id, i, stream) for i, token_id in enumerate(ids)]
            for start in range(0, n_prompt, _BATCH_TOKENS):
                self._decode_streams(tokens[start : start + _BATCH_TOKENS], 1)
        ids = self._random.integers(0, self.n_vocab, (n_tokens - 1, n_streams)).tolist()
        started = time.perf_counter()
        for i, row in enumerate(ids):
            self._decode_streams([(token_id, n_prompt + i, s) for s, token_id in enumerate(row)], n_streams)
        return time.perf_counter() - started

    def logits(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        """float32 [T, V]: the logits after each token; made with `all_logits`."""
        self._clear()
        rows = np.empty((len(token_ids), self.n_vocab), np.float32)
        for start in range(0, len(token_ids), _MICRO_BATCH_TOKENS):
            ids = token_ids[start : start + _MICRO_BATCH_TOKENS]
            self._decode_for_logits(ids, start)
            for i in range(len(ids)):
                row = self._api.llama_get_logits_ith(self._context, i)
                rows[start + i] = np.ctypeslib.as_array(row, (self.n_vocab,))
        return rows

    def versions(self) -> dict[str, str]:
        """Name and version of the package."""
        return {"llama-cpp-python": str(self._api.__version__)}

    def close(self) -> None:
        """Frees the context and the model."""
        self._api.llama_free(self._context)
        free = getattr(self._api, "llama_model_free", None) or self._api.llama_free_model
        free(self._model)

    def _clear(self) -> None:
        if hasattr(self._api, "llama_get_memory"):
            self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        else:  # before 0.3.10
            self._api.llama_kv_self_clear(self._context)

    def _decode(self, ids: list[int]) -> None:
        for start in range(0, len(ids), _BATCH_TOKENS):
            part = ids[start : start + _BATCH_TOKENS]
            tokens = (self._api.llama_token * len(part))(*part)
            self._run(self._api.llama_batch_get_one(tokens, len(part)))

    def _decode_for_logits(self, ids: list[int], first_position: int) -> None:
        self._decode_streams([(token_id, first_position + i, 0) for i, token_id in enumerate(ids)], len(ids))

    def _decode_streams(self, tokens: list[tuple[int, int, int]], n_logits: int) -> None:
        """One batch of (token id, position, stream), with the logits of the last `n_logits`."""
        batch = self._api.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, (token_id, position, stream) in enumerate(tokens):
                batch.token[i], batch.pos[i] = token_id, position
                batch.logits[i] = i >= len(tokens) - n_logits
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
            self._run(batch)
        finally:
            self._api.llama_batch_free(batch)

    def _run(self, batch: Any) -> None:
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise UnsupportedError(f"llama_decode failed with status {status}: the context may be too small")
        self._api.llama_synchronize(self._context)
