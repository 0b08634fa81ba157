"""llama.cpp's encoders of images, by libmtmd through llama-cpp-python's C interface."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.llama_cpp import import_llama_cpp
from kukri.errors import FormatError, UnsupportedError

_CONTEXT_TOKENS = 4096


class LibMtmd:
    """The encoder of an mmproj file before a text model, and both together, on the CPU."""

    def __init__(self, model: str | os.PathLike[str], mmproj: str | os.PathLike[str], n_threads: int) -> None:
        """Raises UnsupportedError without libmtmd, FormatError if it cannot load the files."""
        self._llama = llama = import_llama_cpp()
        try:
            from llama_cpp import mtmd_cpp
        except (ImportError, OSError, RuntimeError) as error:
            raise UnsupportedError(f"llama-cpp-python was built without libmtmd ({error})") from None
        self._api = mtmd_cpp
        self._silence = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._silence, ctypes.c_void_p(0))
        mtmd_cpp.mtmd_log_set(self._silence, ctypes.c_void_p(0))
        mtmd_cpp.mtmd_helper_log_set(self._silence, ctypes.c_void_p(0))
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers, params.use_extra_bufts = 0, False  # see LlamaCpp: AMX on virtual machines
        self._model = llama.llama_model_load_from_file(os.fsencode(model), params)
        if not self._model:
            raise FormatError("llama.cpp cannot load this file", path=model)
        self._width = llama.llama_model_n_embd_inp(self._model)
        own = mtmd_cpp.mtmd_context_params_default()
        own.use_gpu, own.n_threads, own.warmup, own.print_timings = False, n_threads, False, False
        self._context = mtmd_cpp.mtmd_init_from_file(os.fsencode(mmproj), self._model, own)
        if not self._context:
            raise FormatError("libmtmd cannot load this file", path=mmproj)
        made = llama.llama_context_default_params()
        made.n_ctx, made.n_threads, made.n_threads_batch = _CONTEXT_TOKENS, n_threads, n_threads
        made.no_perf = True
        self._text = llama.llama_init_from_model(self._model, made)
        if not self._text:
            raise FormatError("llama.cpp cannot make a context for this file", path=model)

    def rows(self, picture: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """The rows of embeddings [T, D] of a picture [height, width, 3], tile after tile."""
        with self._chunks(picture) as chunks:
            return np.concatenate([self._encoded(chunk) for chunk in chunks])

    def first_token(self, picture: npt.NDArray[np.uint8], before: Sequence[int], after: Sequence[int]) -> int:
        """The likeliest token after some tokens, a picture and further tokens, from an empty context."""
        api, llama = self._api, self._llama
        llama.llama_memory_clear(llama.llama_get_memory(self._text), True)
        position = ctypes.c_int32(len(before))
        self._decode(before, 0)
        with self._chunks(picture) as chunks:
            for chunk in chunks:
                place = (position, 0, llama.llama_n_batch(self._text), False, ctypes.byref(position))
                if api.mtmd_helper_eval_chunk_single(self._context, self._text, chunk, *place):
                    raise FormatError("libmtmd cannot read this picture")
        self._decode(after, position.value)
        n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        return int(np.ctypeslib.as_array(llama.llama_get_logits_ith(self._text, -1), (n_vocab,)).argmax())

    def _decode(self, ids: Sequence[int], position: int) -> None:
        """Reads tokens from a position on, the last for its logits."""
        batch = self._llama.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token_id in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token_id, position + i, i == len(ids) - 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        status = self._llama.llama_decode(self._text, batch)
        self._llama.llama_batch_free(batch)
        if status:
            raise UnsupportedError(f"llama_decode failed with status {status}")

    @contextmanager
    def _chunks(self, picture: npt.NDArray[np.uint8]) -> Iterator[list[Any]]:
        """The parts of a picture that become rows, valid within the block."""
        api, (height, width) = self._api, picture.shape[:2]
        data = (ctypes.c_uint8 * picture.size).from_buffer_copy(picture.tobytes())
        bitmap = api.mtmd_bitmap_init(width, height, data)
        marker = api.mtmd_default_marker()
        text = api.mtmd_input_text(marker, len(marker), False, True)
        chunks = api.mtmd_input_chunks_init()
        bitmaps = (api.mtmd_bitmap_p_ctypes * 1)(bitmap)
        if api.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1):
            raise FormatError("libmtmd cannot read this picture")
        found = [api.mtmd_input_chunks_get(chunks, i) for i in range(api.mtmd_input_chunks_size(chunks))]
        of_image = api.MTMD_INPUT_CHUNK_TYPE_IMAGE
        yield [chunk for chunk in found if api.mtmd_input_chunk_get_type(chunk) == of_image]
        api.mtmd_input_chunks_free(chunks)
        api.mtmd_bitmap_free(bitmap)

    def _encoded(self, chunk: Any) -> npt.NDArray[np.float32]:
        api = self._api
        if api.mtmd_encode_chunk(self._context, chunk):
            raise FormatError("libmtmd cannot encode this picture")
        n_rows = api.mtmd_input_chunk_get_n_tokens(chunk)
        found = api.mtmd_get_output_embd(self._context)
        return np.ctypeslib.as_array(found, (n_rows, self._width)).copy()

    def close(self) -> None:
        """Frees the models."""
        self._llama.llama_free(self._text)
        self._api.mtmd_free(self._context)
        self._llama.llama_model_free(self._model)
