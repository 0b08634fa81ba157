"""The forms of answers of Neuronpedia's servers."""

from __future__ import annotations

from typing import Any, Literal

_ACTIVATION = {"values": [float], "max_value": float, "max_value_index": int}
_TOKEN = {"token": str, "logprob": (float, None)}
_LOGPROBS = {"logprobs?": [_TOKEN | {"top_logprobs": [_TOKEN]}]}
_KIND = Literal["DEFAULT", "STEERED"]
_ROWS = [{"token": str, "top_logits": [{"token": str, "prob": float}]}]
_SOURCE = {"source": str, "index": int}

FORMS: dict[str, Any] = {
    "FeatureActivations": {"activation": _ACTIVATION, "tokens": [str]},
    "ActiveFeatures": {"activations": [_SOURCE | {"sum_values": float} | _ACTIVATION], "tokens": [str]},
    "FeaturesByToken": {
        "results": [
            {"token_position": int, "token": str,
             "top_features": [{"feature_index": int, "activation_value": float}]},
        ],
        "tokens": [str],
    },
    "AlikeFeatures": {
        "feature?": (dict, None), "vector?": ([float], None), "topk_decoder_cossim_features": [dict],
    },
    "SteeredTexts": {"outputs": [{"type": _KIND, "output": str, **_LOGPROBS}]},
    "SteeredChats": {
        "outputs": [{"type": _KIND, "raw": str, "chat_template": ["SteeredTurn"], **_LOGPROBS}],
        "input": {"raw": str, "chat_template": ["SteeredTurn"]},
    },
    "SteeredTurn": {"role": str, "content": str},
    "AttributionGraph": {
        "metadata": dict, "qParams": dict, "nodes": [dict],
        "links": [{"source": str, "target": str, "weight": float}],
    },
    "GraphSteering": {
        f"{kind}_{what}": form
        for kind in ("DEFAULT", "STEERED")
        for what, form in (("GENERATION", str), ("LOGITS_BY_TOKEN", _ROWS))
    },
    "SalientLogits": {
        "prompt": str, "input_tokens": [str],
        "salient_logits": [{"token": str, "token_id": int, "probability": float}],
        "total_salient_tokens": int, "cumulative_probability": float,
    },
    "Busy": {"busy": bool, "progress?": {"done": int, "total": int}},
}  # fmt: skip
