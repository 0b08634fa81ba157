"""The forms of answers of llama.cpp's API."""

from __future__ import annotations

from typing import Any

from kukri.server.answers.forms import FORMS as SHARED

_LIKELY = {"id": int, "token": str, "logprob": (float, None), "bytes": [int]}
_SCORES = {"completion_probabilities?": [_LIKELY | {"top_logprobs": [_LIKELY]}]}
_FACTS = {f"{name}?": form for name, form in SHARED["AnswerFacts"].items()}  # a body may ask for some of them

FORMS: dict[str, Any] = {
    "LlamaAnswer": _FACTS | _SCORES,
    "LlamaCompletion": ("LlamaAnswer", ["LlamaAnswer"]),
    "LlamaChunk": _FACTS | _SCORES | {"prompt_progress?": "Progress"},
    "LlamaVectors": [{"index": int, "embedding": [[float]]}],
    "Props": {
        "default_generation_settings": {"n_ctx": int, "params": dict}, "total_slots": int, "model_alias": str,
        "model_path": str, "modalities": {"vision": bool, "audio": bool}, "chat_template": str,
        "bos_token": (str, None), "eos_token": (str, None), "build_info": str, "is_sleeping": bool,
    },
    "Slots": [{"id": int, "n_ctx": int, "speculative": bool, "is_processing": bool}],
}  # fmt: skip
