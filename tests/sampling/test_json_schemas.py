"""Made-up JSON schemas and the real model at temperature 1: every answer that ends is valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from kukri import LLM, Grammar

N_TOKENS = 160
N_TOGETHER = 8

names = st.text("abcdefghij_é", min_size=1, max_size=8)
small = st.integers(-20, 20)
leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)}, small, small),
    st.builds(lambda a: {"type": "number", "minimum": a, "exclusiveMaximum": a + 5}, small),
    st.builds(
        lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b},
        st.integers(0, 3),
        st.integers(0, 9),
    ),
    st.sampled_from(["[a-z]{2,6}", "[0-9]{3}-[0-9]{4}", "(on|off)", "x+y?z*"]).map(
        lambda p: {"type": "string", "pattern": f"^{p}$", "maxLength": 12}
    ),
    st.sampled_from(["date", "time", "date-time", "uuid", "ipv4"]).map(
        lambda f: {"type": "string", "format": f}
    ),
    st.lists(st.one_of(names, small, st.none(), st.booleans()), min_size=1, max_size=4).map(
        lambda v: {"enum": v}
    ),
    st.one_of(names, small).map(lambda v: {"const": v}),
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects, some of whose properties are required."""
    return st.dictionaries(names, inner, min_size=1, max_size=4).flatmap(
        lambda properties: st.builds(
            lambda required, others: {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": others,
            },
            st.lists(st.sampled_from(list(properties)), unique=True),
            st.sampled_from([False, False, {"type": "boolean"}]),
        )
    )


def arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, a, b: {"type": "array", "items": items, "minItems": a, "maxItems": a + b},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def either(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(inner, min_size=2, max_size=3).map(lambda schemas: {"anyOf": schemas})


nested = st.recursive(
    leaves, lambda inner: st.one_of(objects(inner), arrays(inner), either(inner)), max_leaves=8
)
schemas = st.one_of(objects(nested), arrays(nested))


@pytest.fixture(scope="module")
def llm(smollm2_path) -> Iterator[LLM]:
    with LLM(smollm2_path, max_context=512, max_requests=N_TOGETHER) as opened:
        yield opened


def check_schemas(llm: LLM, n_schemas: int) -> None:
    """Each schema's answers, eight to a prompt and side by side, are valid where they ended; most did."""
    n_ended = n_answers = 0
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER

    @seed(7)
    @settings(max_examples=n_schemas, database=None, suppress_health_check=list(HealthCheck))
    @given(schema=schemas, first=st.integers(0, 1000))
    def check(schema: dict[str, Any], first: int) -> None:
        nonlocal n_ended, n_answers
        grammar = Grammar.json(schema)
        prompts = [f"Record {first + i} as JSON:\n" for i in range(N_TOGETHER)]
        for result in llm.generate(
            prompts, temperature=1.0, seed=first, max_tokens=N_TOKENS, grammar=grammar
        ):
            n_answers += 1
            if result.finish_reason == "stop":
                n_ended += 1
                # RFC 3339 has a year 0000; Python's calendar, which jsonschema asks, has not
                value = json.loads(result.text.replace('"0000-', '"2000-'))
                jsonschema.validate(value, schema, format_checker=checker)

    check()
    assert n_answers >= n_schemas * N_TOGETHER
    assert n_ended > 0.7 * n_answers, (n_ended, n_answers)


@pytest.mark.full
def test_a_few_schemas(llm):
    """Catches a mask of another row or step, and keywords that are not enforced."""
    check_schemas(llm, 3)


@pytest.mark.slow
def test_two_hundred_schemas(llm):
    """The same for longer."""
    check_schemas(llm, 200)
