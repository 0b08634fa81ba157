"""llama.cpp's encoders of images, by libmtmd through llama-cpp-python's C interface."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.llama_cpp import import_llama_cpp
from kukri.errors import FormatError, UnsupportedError


class LibMtmd:
    """The encoder of an mmproj file before a text model, on the CPU."""

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

    def rows(self, picture: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """The rows of embeddings [T, D] of a picture [height, width, 3], tile after tile."""
        api, (height, width) = self._api, picture.shape[:2]
        data = (ctypes.c_uint8 * picture.size).from_buffer_copy(picture.tobytes())
        bitmap = api.mtmd_bitmap_init(width, height, data)
        marker = api.mtmd_default_marker()
        text = api.mtmd_input_text(marker, len(marker), False, True)
        chunks = api.mtmd_input_chunks_init()
        bitmaps = (api.mtmd_bitmap_p_ctypes * 1)(bitmap)
        if api.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1):
            raise FormatError("libmtmd cannot read this picture")
        found = [
            self._encoded(api.mtmd_input_chunks_get(chunks, i))
            for i in range(api.mtmd_input_chunks_size(chunks))
        ]
        api.mtmd_input_chunks_free(chunks)
        api.mtmd_bitmap_free(bitmap)
        return np.concatenate(found)

    def _encoded(self, chunk: Any) -> npt.NDArray[np.float32]:
        api = self._api
        if api.mtmd_input_chunk_get_type(chunk) != api.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            return np.empty((0, self._width), np.float32)
        if api.mtmd_encode_chunk(self._context, chunk):
            raise FormatError("libmtmd cannot encode this picture")
        n_rows = api.mtmd_input_chunk_get_n_tokens(chunk)
        found = api.mtmd_get_output_embd(self._context)
        return np.ctypeslib.as_array(found, (n_rows, self._width)).copy()

    def close(self) -> None:
        """Frees the models."""
        self._api.mtmd_free(self._context)
        self._llama.llama_model_free(self._model)
