"""The forms of answers of Ollama's API."""

from __future__ import annotations

from typing import Any, Literal

from kukri.server.answers.forms import INTERP

_ANSWER = {
    "model": str, "created_at": str, "done": bool,
    "done_reason?": Literal["stop", "length", "load", "unload"],
    "total_duration?": int, "load_duration?": int, "prompt_eval_count?": int, "prompt_eval_duration?": int,
    "eval_count?": int, "eval_duration?": int, "logprobs?": ["TokenLogprob"], **INTERP,
}  # fmt: skip
_MODEL = {
    "name": str, "model": str, "modified_at": str, "size": int, "digest": str, "details": "OllamaDetails",
}  # fmt: skip

FORMS: dict[str, Any] = {
    "OllamaErrorBody": {"error": str},
    "OllamaChat": _ANSWER | {
        "message": {
            "role": Literal["assistant"], "content": str, "thinking?": str,
            "tool_calls?": [{"function": {"name": str, "arguments": dict}}],
        },
    },
    "OllamaGeneration": _ANSWER | {"response": str, "thinking?": str},
    "OllamaVectors": {
        "model": str, "embeddings": [[float]], "total_duration": int, "load_duration": int,
        "prompt_eval_count": int,
    },
    "OllamaVector": {"embedding": [float]},
    "OllamaDetails": {
        "parent_model": str, "format": str, "family": str, "families": [str], "parameter_size": str,
        "quantization_level": str,
    },
    "OllamaModels": {"models": [_MODEL]},
    "OllamaLoadedModels": {
        "models": [_MODEL | {"size_vram": int, "expires_at": str, "context_length": int}],
    },
    "OllamaModelFacts": {
        "modelfile": str, "parameters": str, "system?": str, "messages?": [dict], "template": str,
        "license": str, "details": "OllamaDetails", "model_info": dict, "capabilities": [str],
        "modified_at": str,
    },
    "OllamaStatus": {
        "status?": str, "digest?": str, "completed?": int, "total?": int, "error?": str,
    },
    "OllamaVersion": {"version": str, "kukri": str},
}  # fmt: skip
