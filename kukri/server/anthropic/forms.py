"""The forms of answers of Anthropic's API."""

from __future__ import annotations

from typing import Any, Literal

from kukri.server.answers.forms import IMAGES, INTERP

_REASON = (
    Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"],
    None,
)
_USAGE = {
    "input_tokens": int, "cache_creation_input_tokens": int, "cache_read_input_tokens": int,
    "output_tokens": int, "output_tokens_details": {"thinking_tokens": int}, **IMAGES,
}  # fmt: skip
_ERROR = {"type": str, "message": str, "details?": {"error_code": str, "unsupported": [str]}}

FORMS: dict[str, Any] = {
    "MessageErrorBody": {"type": Literal["error"], "error": _ERROR, "request_id": (str, None)},
    "MessageTokens": {"input_tokens": int},
    "MessageBlock": {
        "type": Literal["text", "thinking", "tool_use"], "text?": str, "thinking?": str, "signature?": str,
        "id?": str, "name?": str, "input?": dict,
    },
    "MessageAnswer": {
        "id": str, "type": Literal["message"], "role": Literal["assistant"], "model": str,
        "content": ["MessageBlock"], "stop_reason": _REASON, "stop_sequence": (str, None),
        "usage": _USAGE | {"service_tier": str}, **INTERP,
    },
    "MessageEvent": {
        "type": Literal[
            "message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop",
            "message_delta", "message_stop", "error",
        ],
        "message?": "MessageAnswer", "index?": int, "content_block?": "MessageBlock",
        "delta?": {
            "type?": str, "text?": str, "thinking?": str, "partial_json?": str, "stop_reason?": _REASON,
            "stop_sequence?": (str, None),
        },
        "usage?": _USAGE, "error?": _ERROR, "request_id?": (str, None), **INTERP,
    },
}  # fmt: skip
