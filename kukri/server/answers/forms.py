"""The forms of answers, for the OpenAPI document and tests alone: nothing else imports a module of this name.

A form is a type, a `Literal`, the name of another form, `[items]`, `{str: values}`, `(one, or, another)`, or
an object's fields, of which those with `?` may be missing. Each API's folder has the forms of its answers.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

SCHEMAS = "#/components/schemas/"
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", None: "null", dict: "object"}


def schema_of(form: Any) -> dict[str, Any]:
    """Return the JSON schema of a form."""
    if isinstance(form, str):
        return {"$ref": f"{SCHEMAS}{form}"}
    if isinstance(form, list):
        return {"type": "array", "items": schema_of(form[0])}
    if isinstance(form, tuple):
        return {"anyOf": [schema_of(one) for one in form]}
    if isinstance(form, dict) and str in form:
        return {"type": "object", "additionalProperties": schema_of(form[str])}
    if isinstance(form, dict):
        fields = {name.removesuffix("?"): schema_of(one) for name, one in form.items()}
        required = [name for name in form if not name.endswith("?")]
        return {"type": "object", "properties": fields} | ({"required": required} if required else {})
    if allowed := get_args(form):
        return {"type": _TYPES[type(allowed[0])], "enum": [*allowed]}
    return {"type": _TYPES[form]}


IMAGES = {"image_tokens?": int, "tokens_per_image?": [int]}
INTERP = {  # requests with interventions or captures
    "readouts?": [{"position": int, "token_id": int, "values": {str: {str: (float, None)}}}],
    "activations?": {"format": Literal["safetensors"], "names": [str], "data": str},
}
_LIKELY = {"token": str, "logprob": (float, None), "bytes": [int]}
FORMS: dict[str, Any] = {
    "ErrorBody": {
        "error": {"message": str, "type": str, "param": (str, None), "code": (str, None),
                  "n_prompt_tokens?": int, "n_ctx?": int},
    },
    "Version": {"version": str},
    "State": {"status": Literal["ok", "ready", "degraded", "draining"]},
    "Timings": {
        "cache_n": int, "prompt_n": int, "prompt_ms": float, "prompt_per_token_ms": float,
        "prompt_per_second": float, "predicted_n": int, "predicted_ms": float,
        "predicted_per_token_ms": float, "predicted_per_second": float,
        "draft_n?": int, "draft_n_accepted?": int,
    },
    "Progress": {"total": int, "cache": int, "processed": int, "time_ms": int},
    "TokenLogprob": _LIKELY | {"top_logprobs": [_LIKELY]},
    "AnswerFacts": {
        "index": int, "content": str, "tokens": [int], "id_slot": int, "stop": bool, "model": str,
        "tokens_predicted": int, "tokens_evaluated": int, "generation_settings": dict, "prompt": str,
        "has_new_line": bool, "truncated": bool, "stop_type": Literal["word", "limit", "eos"],
        "stopping_word": str, "tokens_cached": int, "timings": "Timings",
    },
}  # fmt: skip
