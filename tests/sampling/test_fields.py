"""Fields of SamplingParams, declared once: every face has each of them, with its range."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError

from kukri import SamplingParams
from kukri.cli import app
from kukri.errors import RequestError
from kukri.sampling.fields import MAX_FACTOR, FieldFacts, facts_of
from kukri.server.answers.answer_facts import settings_of
from kukri.server.anthropic.schema import MessagesBody
from kukri.server.llama_cpp.schema import LlamaCompletionBody
from kukri.server.ollama.schema import Options
from kukri.server.openai.responses_schema import ResponseBody
from kukri.server.page.endpoints import _CONTROLS, PageBody
from kukri.server.schema import ChatBody, CompletionBody
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import llm

    from kukri.llm_plugin import Kukri

ROOT = Path(__file__).parents[2]
FACTS = dict(facts_of(SamplingParams))
NUMBERS = {name: facts for name, facts in FACTS.items() if facts.kind in ("number", "integer")}
TABLE = "| field | default | values | effect |\n| --- | --- | --- | --- |\n"
# fields that some bodies have in another form, or not at all: the number of answers and tokens, stop strings
OF_AN_ENDPOINT = {"max_tokens", "logprobs", "prompt_logprobs", "n", "best_of", "stop"}


def values(facts: FieldFacts) -> str:
    """The values of a field, for people."""
    if facts.kind in ("number", "integer"):
        low, high = (f"{x:,.12g}" if abs(x) <= MAX_FACTOR else power(int(x)) for x in (facts.low, facts.high))
        return f"{facts.kind}, {low} to {high}"
    texts = {
        "switch": "true, false",
        "choice": ", ".join(facts.choices),
        "names": "names",
        "texts": f"at most {facts.most} texts of 1,000 characters",
        "phrases": f"at most {facts.most} texts of 1,000 characters",
        "ids": f"at most {facts.most:,} token ids",
        "bias": f"at most {facts.most:,} numbers, {facts.low:g} to {facts.high:g}",
        "object": "Python only",
    }
    return texts[facts.kind]


def power(x: int) -> str:
    """A limit near a power of two."""
    found = next(n for n in range(64, 0, -1) if abs(abs(x) - 2**n) <= 1)
    sign, rest = ("-", 2**found + x) if x < 0 else ("", x - 2**found)
    return f"{sign}2^{found}" + ("" if rest == 0 else f" {'+' if rest > 0 else '-'} 1")


def row(name: str, facts: FieldFacts) -> str:
    default = getattr(SamplingParams, name)
    shown = {"samplers": "all", "dry_sequence_breakers": 'newline, `:`, `"`, `*`'}.get(name)
    shown = shown or ("" if default in (None, ()) else f"{default}".lower())
    return f"| `{name}` | {shown} | {values(facts)} | {facts.help} |\n"


def test_the_docs_have_the_table_of_fields() -> None:
    """Catches a field or a range that the page does not tell, or tells wrongly."""
    page = (ROOT / "docs" / "sampling.md").read_text()
    written = re.search(r"(?s)\| field .*?\n(?=\n)", page)
    table = TABLE + "".join(row(name, facts) for name, facts in FACTS.items())
    assert written is not None
    assert written[0] == table, f"docs/sampling.md should have this table:\n{table}"


@pytest.mark.parametrize(
    "body", [ChatBody, CompletionBody, LlamaCompletionBody, MessagesBody, ResponseBody, PageBody]
)
def test_every_api_has_every_field(body: type) -> None:
    """Catches a field that one API lacks, so that its clients cannot turn a model's default off."""
    wanted = {name for name, facts in FACTS.items() if facts.kind != "object"} - OF_AN_ENDPOINT
    assert wanted <= body.model_fields.keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_bounds(name: str) -> None:
    """Catches a number that one face lets through and another refuses, or that overflows in the engine."""
    facts, is_whole = NUMBERS[name], NUMBERS[name].kind == "integer"
    step = 1 if is_whole else 0.001
    right = [facts.low, facts.high]
    wrong = [facts.low - step, facts.high + max(step, facts.high / 100), -(2**65), 2**65, 1e308]
    partner = {"max_tokens": None} if name == "min_tokens" else {}
    for value in (*right, *wrong):
        number = int(value) if is_whole and abs(value) < 1e300 else value
        with nullcontext() if value in right else pytest.raises(RequestError, match=f"'{name}' must be"):
            SamplingParams(**partner | {name: number})  # type: ignore[arg-type]
        if name not in OF_AN_ENDPOINT:
            with nullcontext() if value in right else pytest.raises(ValidationError, match=name):
                ChatBody.model_validate({"messages": [{"role": "user"}], name: number})


def test_commands_have_the_fields_with_flags() -> None:
    """Catches a flag that is declared and not there, and one with another sentence."""
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    options = {option.name: option for option in run.params}
    for name, facts in FACTS.items():
        if facts.flags:
            assert tuple(options[name].opts) == facts.flags
            assert options[name].help.startswith(facts.help)
    plugin = Kukri.Options.model_fields
    assert issubclass(Kukri.Options, llm.Options)
    assert {name for name, facts in FACTS.items() if facts.flags} - {"stop"} == set(plugin) - {"model"}
    assert plugin["max_tokens"].default == 512


def test_other_apis_have_their_names() -> None:
    """Catches a name of Ollama or llama.cpp that means nothing here."""
    ollama = {facts.ollama for facts in FACTS.values()} - {None}
    assert ollama | {"num_ctx"} == set(Options.model_fields)
    given = {
        "temperature": 0.5,
        "repeat_penalty": 1.5,
        "seed": -7,
        "num_predict": -1,
        "stop": ["", "a"],
        "top_k": -1,
    }
    assert Options.model_validate(given).sampling() == {
        "max_tokens": None, "temperature": 0.5, "repetition_penalty": 1.5, "stop": ["a"], "top_k": -1
    }  # fmt: skip
    settings = settings_of(SamplingParams(repetition_penalty=1.5, seed=3, stop="a", logprobs=2))
    assert {facts.llama_cpp for facts in FACTS.values()} - {None} <= settings.keys()
    assert (settings["repeat_penalty"], settings["n_probs"], settings["stop"]) == (1.5, 2, ["a"])
    body = LlamaCompletionBody.model_validate({"prompt": "a", "repetition_penalty": 1.25})
    assert body.sampling()["repetition_penalty"] == 1.25, "kukri's own name counts too"
    json.dumps(settings)


def test_the_page_has_controls_with_ranges_of_javascript() -> None:
    """Catches a range that a browser reads as another number."""
    assert {control.name for control in _CONTROLS} == {name for name, facts in FACTS.items() if facts.on_page}
    assert all(abs(limit) < 2**53 for control in _CONTROLS for limit in (control.low, control.high))


@pytest.mark.representative(2)
def test_a_field_is_declared_in_few_files() -> None:
    """Catches a face that lists the fields by itself again: each new field would have to be added there."""
    stage = {"kernels", "bench"}  # what a field does, and a check of that on devices
    known = {
        "sampling/params.py",  # its declaration
        # the stage itself
        "sampling/__init__.py", "sampling/defaults.py", "sampling/sampler.py", "sampling/history.py",
        "formats/sampling_advice.py",  # only of fields that files of models have
    }  # fmt: skip
    package = ROOT / "kukri"
    for name in ("min_p", "dynatemp_exponent", "xtc_threshold", "dry_base", "mirostat_eta", "top_n_sigma"):
        naming = {
            path.relative_to(package).as_posix()
            for path in package.rglob("*.py")
            if re.search(rf"\b{name}\b", path.read_text(encoding="utf-8"))
        }
        assert {path for path in naming if path.split("/")[0] not in stage} <= known, name
