"""The forms of answers of OpenAI's API, and of what vLLM, Cohere and others add to it."""

from __future__ import annotations

from typing import Any, Literal

from kukri.server.answers.forms import IMAGES, INTERP

_PROMPT_USAGE = {"prompt_tokens": int, "total_tokens": int}
_TASK_USAGE = _PROMPT_USAGE | {"completion_tokens": Literal[0]}
_PROMPT_LOGPROBS = [({str: {"logprob": (float, None), "rank": (int, None), "decoded_token": str}}, None)]
_HEAD = {
    "id": str, "created": int, "model": str, "system_fingerprint": str, "usage?": ("Usage", None),
    "timings?": "Timings", "prompt_progress?": "Progress", "__verbose?": "AnswerFacts",
}  # fmt: skip
_CHOICE = {
    "index": int, "logprobs": ("ChatLogprobs", None), "token_ids?": [int],
    "finish_reason": (Literal["stop", "length", "tool_calls"], None), **INTERP,
}  # fmt: skip
_CALL = {"id?": str, "type?": Literal["function"], "function": {"name?": str, "arguments": str}}
_PROMPT_FIELDS = {"prompt_token_ids?": [int], "prompt_logprobs?": _PROMPT_LOGPROBS}
_PLACE = {"output_index?": int, "item_id?": str, "content_index?": int}
_LIST = {"object": Literal["list"]}
_PAGE = _LIST | {"has_more": bool, "first_id?": str, "last_id?": str}
_TASK = _LIST | {"id": str, "created": int, "model": str, "usage": _TASK_USAGE}

FORMS: dict[str, Any] = {
    "Usage": {
        **_PROMPT_USAGE, "completion_tokens": int,
        "prompt_tokens_details": {"cached_tokens": int, "audio_tokens": int, **IMAGES},
        "completion_tokens_details": {
            "reasoning_tokens": int, "audio_tokens": int, "accepted_prediction_tokens": int,
            "rejected_prediction_tokens": int,
        },
    },
    "ChatLogprobs": {"content": ["TokenLogprob"], "refusal": None},
    "ToolCall": _CALL | {"index?": int},
    "ChatAnswer": {
        "role": Literal["assistant"], "content": (str, None), "refusal": None, "reasoning_content?": str,
        "tool_calls?": ["ToolCall"],
    },
    "ChatDelta": {
        "role?": Literal["assistant"], "content?": (str, None), "refusal?": None, "reasoning_content?": str,
        "tool_calls?": ["ToolCall"],
    },
    "ChatChoice": _CHOICE | {"message": "ChatAnswer"},
    "ChatChunkChoice": _CHOICE | {"delta": "ChatDelta"},
    "ChatCompletion": {
        **_HEAD, **_PROMPT_FIELDS, "object": Literal["chat.completion"], "choices": ["ChatChoice"],
        "metadata?": {str: str},
    },
    "ChatCompletionChunk": {
        **_HEAD, **_PROMPT_FIELDS, "object": Literal["chat.completion.chunk"], "choices": ["ChatChunkChoice"],
    },
    "TextLogprobs": {
        "text_offset": [int], "token_logprobs": [(float, None)], "tokens": [str],
        "top_logprobs": [({str: float}, None)],
    },
    "TextChoice": {
        **_CHOICE, "text": str, "logprobs": ("TextLogprobs", None), "prompt_token_ids?": ([int], None),
        "prompt_logprobs?": _PROMPT_LOGPROBS,
    },
    "Completion": _HEAD | {"object": Literal["text_completion"], "choices": ["TextChoice"]},
    "ResponsePart": {
        "type": Literal["output_text", "reasoning_text"], "text": str, "annotations?": [dict],
        "logprobs?": ["TokenLogprob"],
    },
    "ResponseItem": {
        "id": str, "type": Literal["message", "reasoning", "function_call", "custom_tool_call"],
        "status?": Literal["in_progress", "completed", "incomplete"], "role?": Literal["assistant"],
        "content?": ["ResponsePart"], "summary?": [dict], "call_id?": str, "name?": str,
        "namespace?": (str, None), "arguments?": str, "input?": str,
    },
    "Response": {
        "id": str, "object": Literal["response"], "created_at": int, "background": bool, "model": str,
        "status": Literal["in_progress", "completed", "incomplete", "failed"],
        "error": ({"code": str, "message": str}, None), "incomplete_details": ({"reason": str}, None),
        "instructions": (str, None), "max_output_tokens": (int, None), "max_tool_calls": (int, None),
        "metadata": {str: str}, "output": ["ResponseItem"], "parallel_tool_calls": bool,
        "previous_response_id": (str, None), "prompt_cache_key": (str, None),
        "safety_identifier": (str, None),
        "reasoning": {"effort": (str, None), "summary": (str, None)}, "service_tier": str,
        "store": bool, "temperature": float,
        "text": {"format": dict, "verbosity": str}, "tool_choice": (str, dict), "tools": [dict],
        "top_logprobs": int, "top_p": float, "truncation": str, "usage": ("ResponseUsage", None),
        "user": (str, None), "timings?": "Timings", **INTERP,
    },
    "ResponseUsage": {
        "input_tokens": int, "output_tokens": int,
        "input_tokens_details": {"cached_tokens": int, "cache_write_tokens": int, **IMAGES},
        "output_tokens_details": {"reasoning_tokens": int}, "total_tokens": int,
    },
    "ResponseEvent": {
        "type": str, "sequence_number": int, "response?": "Response", "item?": "ResponseItem",
        "part?": "ResponsePart", "delta?": str, "text?": str, "logprobs?": ["TokenLogprob"], "name?": str,
        "arguments?": str, "input?": str, "prompt_progress?": "Progress", "timings?": "Timings", **_PLACE,
    },
    "ItemList": _PAGE | {"data": [dict]},
    "Deleted": {"id": str, "object": str, "deleted": Literal[True]},
    "InputTokens": {"object": str, "input_tokens": int},
    "Decision": {
        "id": str, "object": Literal["decision"], "model": str, "choice": str,
        "choices": [{"text": str, "probability": float, "logprob": float}], "expected": (float, None),
        "mass": (float, None), "usage": _PROMPT_USAGE,
    },
    "EmbeddingAnswer": ("EmbeddingList", "LlamaVectors"),  # the second for a body with `content`
    "EmbeddingList": {
        **_LIST, "id": str, "model": str, "usage": _PROMPT_USAGE, "truncated?": [int],
        "data": [{"object": Literal["embedding"], "index": int, "embedding": ([float], str, [[float]])}],
    },
    "Ranking": {
        "id": str, "model": str, "usage": _PROMPT_USAGE, "truncated?": [int],
        "results": [{"index": int, "relevance_score": float, "document?": dict}],
        "meta": {"billed_units": {"search_units": int}, "tokens": {"input_tokens": int},
                 "api_version?": {"version": str}},
    },
    "ScoreList": _TASK | {"data": [{"index": int, "object": Literal["score"], "score": float}]},
    "ClassificationList": _TASK | {
        "data": [{"index": int, "label": str, "probs": [float], "num_classes": int}],
    },
    "PoolingList": _TASK | {
        "data": [{"index": int, "object": Literal["pooling"], "data": ([float], [[float]], str)}],
    },
    "AnswerList": _TASK | {
        "data": [{"index": int, "object": Literal["answer"], "text": str, "start": int, "stop": int,
                  "score": float}],
    },
    "AudioUsage": {
        "type": Literal["tokens", "duration"], "seconds?": int, "input_tokens?": int, "output_tokens?": int,
        "total_tokens?": int, "input_token_details?": {"text_tokens": int, "audio_tokens": int},
    },
    "AudioLogprob": {"token": str, "logprob": float, "bytes": [int]},
    "Transcription": {
        "text": str, "usage": "AudioUsage", "logprobs?": ["AudioLogprob"], "task?": str, "language?": str,
        "duration?": float,
        "segments?": [{
            "id": int, "seek": int, "start": float, "end": float, "text": str, "tokens": [int],
            "temperature": float, "avg_logprob": float, "compression_ratio": float, "no_speech_prob": float,
        }],
    },
    "TranscriptEvent": {
        "type": Literal["transcript.text.delta", "transcript.text.done"], "delta?": str, "text?": str,
        "logprobs?": ["AudioLogprob"], "usage?": "AudioUsage",
    },
    "Model": {
        "id": str, "object": Literal["model"], "created": int, "owned_by": str, "root": str, "parent?": str,
        "capabilities": ([str], None), "max_model_len": (int, None), "state": str,
        "memory_bytes?": (int, None), "running_requests?": int, "expires_in_s?": (float, None),
    },
    "ModelList": _LIST | {"data": ["Model"]},
    "File": {
        "id": str, "object": Literal["file"], "bytes": int, "created_at": int, "expires_at": (int, None),
        "filename": str, "purpose": str, "status": str,
    },
    "FileList": _PAGE | {"data": ["File"]},
    "Batch": {
        "id": str, "object": Literal["batch"], "endpoint": str, "input_file_id": str,
        "completion_window": str, "created_at": int, "expires_at": int, "metadata": ({str: str}, None),
        "status": str, "output_file_id": (str, None), "error_file_id": (str, None),
        "errors": (dict, None),
        **dict.fromkeys(
            ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "cancelling_at", "cancelled_at",
             "expired_at"), (int, None),
        ),
        "request_counts": {"total": int, "completed": int, "failed": int},
    },
    "BatchList": _PAGE | {"data": ["Batch"]},
    "Message": {"message": str},
    "TokenList": {
        "count": int, "max_model_len": int, "tokens": [(int, {"id": int, "piece": (str, [int])})],
        "token_strs": ([str], None),
    },
    "TokenizerInfo": {
        "tokenizer_class": str, "bos_token": (str, None), "eos_token": (str, None), "pad_token": (str, None),
        "add_bos_token": bool, "add_eos_token": bool, "chat_template": (str, None), "model_max_length": int,
    },
    "Detokenized": {"prompt": str, "content": str},
    "Prompt": {"prompt": str},
}  # fmt: skip
