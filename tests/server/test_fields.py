"""Each field of the five APIs, alone and in pairs, fares as docs/reference/fields.md says."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from kukri import LLM
from kukri.server.body import Body, refusal_of
from kukri.server.ollama.schema import Options
from kukri.server.sampling_fields import FACTS
from kukri.server.schema import SAME_FORM
from tests.server.live_server import MODEL, Served, serving

REFERENCE = runpy.run_path(str(Path(__file__).parents[2] / "packaging" / "field_reference.py"))
BODIES: Mapping[str, type[Body]] = REFERENCE["BODIES"]
QUESTION = [{"role": "user", "content": "Hi"}]
LEAST: dict[str, dict[str, Any]] = {  # a body with no field more than it needs
    "chat": {"messages": QUESTION},
    "compl.": {"prompt": "Hi"},
    "resp.": {"input": "Hi"},
    "mess.": {"messages": QUESTION, "max_tokens": 2},
    "Ollama chat": {"model": MODEL, "messages": QUESTION},
    "generate": {"model": MODEL, "prompt": "Hi"},
    "llama.cpp": {},
    "embed.": {"input": "Hi"},
}
PATHS = {
    "chat": "/v1/chat/completions",
    "compl.": "/v1/completions",
    "resp.": "/v1/responses",
    "mess.": "/v1/messages",
    "Ollama chat": "/api/chat",
    "generate": "/api/generate",
    "llama.cpp": "/completion",
    "embed.": "/v1/embeddings",
}
SHORT: dict[str, dict[str, Any]] = {
    "resp.": {"max_output_tokens": 2},
    "llama.cpp": {"prompt": "Hi", "n_predict": 2},
}
SHORT |= {where: {"max_tokens": 2} for where in ("chat", "compl.", "mess.")}
SHORT |= {where: {"options": {"num_predict": 2}, "stream": False} for where in ("Ollama chat", "generate")}
ODD = {"odd": 1}  # a value that no field takes for nothing


@pytest.mark.parametrize("where", BODIES)
def test_each_field_fares_as_the_page_says(where: str) -> None:
    """Catches a field that is ignored though the page says refused, and the other way round."""
    body, least = BODIES[where], LEAST[where]
    whole = body.model_validate(least)
    for name, fate in REFERENCE["fates"](body).items():
        if "." in name and name.startswith("options."):
            continue
        assert body.model_validate({name: None, **least}) == whole, f"{name}: null"
        if fate == "ignored":
            assert body.model_validate({**least, name: ODD}) == whole, name
        elif fate == "refused":
            with pytest.raises(ValidationError) as caught:
                body.model_validate({**least, name: ODD})
            refused = refusal_of(caught.value.errors())
            assert refused is not None
            assert name in str(refused)
            assert (refused.param, refused.code) == (name, "unsupported_parameter")
            for value in body.refused[name][0]:
                assert body.model_validate({**least, name: value}) == whole, f"{name}: {value}"
        elif fate != "applied":
            one = body.model_validate({**least, name: 1})
            assert getattr(one, fate.removeprefix("as ").strip("`")) == 1, f"{name} {fate}"
    if (
        body.model_config["extra"] == "forbid" and where != "mess."
    ):  # whose unknown fields its handler refuses
        with pytest.raises(ValidationError, match="nosuch"):
            body.model_validate({**least, "nosuch": 1})


def made(schema: Mapping[str, Any], known: Mapping[str, Any], rng: random.Random, depth: int = 0) -> Any:
    """A value that a JSON schema allows, or nearly: small numbers, short texts, few items."""
    if reference := schema.get("$ref"):
        return made(known[reference.rpartition("/")[2]], known, rng, depth)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return made(rng.choice(schema[key]), known, rng, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        wanted = [n for n in schema.get("properties", {}) if n in schema.get("required", ()) or depth < 2]
        chosen = [n for n in wanted if n in schema.get("required", ()) or rng.random() < 0.3]
        return {name: made(schema["properties"][name], known, rng, depth + 1) for name in chosen}
    if kind == "array":
        n = rng.randint(schema.get("minItems", 0), max(schema.get("minItems", 0), 2))
        return [made(schema.get("items", {}), known, rng, depth + 1) for _ in range(n)]
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", -2))
        high = min(schema.get("maximum", low + 8), low + 8)
        return rng.randint(int(low), int(high)) if kind == "integer" else rng.uniform(low, high)
    if kind == "boolean":
        return rng.random() < 0.5
    return None if kind == "null" else rng.choice(["Hi", "a", "", "json"])


@pytest.mark.parametrize("where", [name for name in BODIES if name != "embed."])
def test_each_sampling_field_reaches_the_engine(where: str) -> None:
    """Catches a field of sampling that is taken and that nothing obeys."""
    body, least = BODIES[where], LEAST[where]
    has_options = "options" in body.model_fields
    schema = (Options if has_options else body).model_json_schema()
    names = {facts.ollama for facts in FACTS.values()} if has_options else SAME_FORM
    names = names & schema["properties"].keys() - {"n", "best_of"}  # which endpoints count by themselves
    names -= {"logit_bias"} if where == "llama.cpp" else set()  # whose texts need a tokenizer
    assert len(names) > 12

    def sampling(**given: Any) -> Any:
        fields = {"options": given} if has_options else given
        return body.model_validate(least | fields).sampling()  # type: ignore[attr-defined]

    rng, usual = random.Random(0), sampling()
    for name in names:
        values = (made(schema["properties"][name], schema.get("$defs", {}), rng) for _ in range(200))
        tried = (PLAIN[name],) if name in PLAIN else values
        assert any(_differs(sampling, name, value, usual) for value in tried), name


PLAIN = {"logit_bias": {"5": 1.0}, "seed": 3}  # where values of the schema seldom change anything


def _differs(sampling: Callable[..., Any], name: str, value: Any, usual: Any) -> bool:
    try:
        return bool(sampling(**{name: value}) != usual)
    except ValidationError:
        return False


@pytest.fixture(scope="module")
def little(tiny_path: Path) -> Iterator[Served]:
    """A server of a tiny model, with a context so short that every answer ends soon."""
    with LLM(tiny_path, max_context=96, max_requests=4) as llm, serving(llm, has_interp=True) as server:
        yield server


def pairs(n: int, rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies of random endpoints with two fields of each, whatever becomes of them."""
    for _ in range(n):
        where = rng.choice(list(PATHS))
        body = BODIES[where]
        schema = body.model_json_schema()
        fields: dict[str, Any] = {name: {} for name in REFERENCE["fates"](body)} | schema["properties"]
        names = [name for name in fields if name != "model" and not name.startswith("options.")]
        two = {
            name: made(fields[name], schema.get("$defs", {}), rng) for name in rng.sample(sorted(names), 2)
        }
        yield where, {"model": MODEL, **LEAST[where], **SHORT.get(where, {}), **two}


@pytest.mark.full
@pytest.mark.parametrize("n_pairs", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_pairs_of_fields(little: Served, n_pairs: int) -> None:
    """Catches two fields that end in a 5xx, a hang or an error without a name."""
    faults, statuses = [], dict.fromkeys((200, 400), 0)
    with httpx.Client(base_url=little.url, timeout=30) as http:
        for where, body in pairs(n_pairs, random.Random(n_pairs)):
            answer = http.post(PATHS[where], json=body)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            if answer.status_code not in (200, 400) or not answer.text:
                faults.append(f"{PATHS[where]} {body}: {answer.status_code} {answer.text[:200]}")
    assert not faults, "\n".join(faults[:20])
    assert min(statuses.values()) > n_pairs / 10
    little.wait_until(lambda: little.pages_used() == 0)
