"""`kukri run`, where it decides something by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kukri import LLM, Grammar
from kukri.calls.system_message import DEFAULT_SYSTEM, opening
from kukri.errors import ConfigError, RequestError, UnsupportedError
from kukri.formats.hub import DEFAULT_MODEL
from kukri.interp import ControlVector
from kukri.terminal.answer_form import answer_form, compiled_in_time
from kukri.terminal.chat import talk
from kukri.terminal.options import FormOptions, SteeringOptions
from kukri.terminal.run import answer_prompt, is_model
from tests.models.tiny_encoders import save
from tests.tiny_gguf import TEMPLATE, write_tiny

REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


def test_the_default_system_message_is_left_out_where_the_template_takes_none(tmp_path):
    """Catches `kukri run` failing on models whose template refuses a system message nobody asked for."""
    for template, n_messages in ((TEMPLATE, 1), (REFUSING + TEMPLATE, 0)):
        path = write_tiny(tmp_path / f"{n_messages}.gguf", tokenizer__chat_template=template)
        with LLM(path) as llm:
            assert len(opening(llm.chat_template, DEFAULT_SYSTEM)) == n_messages
            assert opening(llm.chat_template, "Be brief.") == [{"role": "system", "content": "Be brief."}]
            assert opening(llm.chat_template, "") == []


def test_a_control_vector_steers_the_answer(tmp_path, capsys):
    """Catches options that never reach the model."""
    path = write_tiny(tmp_path / "tiny.gguf")
    vector = np.random.default_rng(0).standard_normal(64).astype(np.float32) * 8
    ControlVector({1: vector}).save(tmp_path / "v.gguf")
    texts = []
    for strength in (None, 0, 3):
        options = SteeringOptions(None if strength is None else [f"{tmp_path / 'v.gguf'}:{strength}"])
        files, interventions = options.files_and_interventions()
        answer_prompt(
            "Hello",
            model=str(path),
            system="",
            raw=True,
            sampling={"temperature": 0.0, "max_tokens": 8, "ignore_eos": True},
            loading={"backend": "reference"} | files,
            interventions=interventions,
            as_json=True,
            with_stats=False,
        )
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1] != texts[2]


def answer(prompt: str, path: object, **changes: object) -> None:
    """Answers on the reference backend, greedily, in eight tokens."""
    options = {
        "model": str(path), "system": DEFAULT_SYSTEM, "raw": False, "as_json": True, "with_stats": False,
        "sampling": {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True},
        "loading": {"backend": "reference"},
    }  # fmt: skip
    answer_prompt(prompt, **{**options, **changes})  # type: ignore[arg-type]


def test_a_model_without_a_template_continues_the_text(tmp_path, capsys):
    """Catches an error that tells users of a base model to give the plain prompt that they gave."""
    path = write_tiny(tmp_path / "base.gguf", tokenizer__chat_template=None)
    answer("Hello", path, raw=True)
    wanted = json.loads(capsys.readouterr().out)["token_ids"]
    answer("Hello", path)
    said = capsys.readouterr()
    assert json.loads(said.out)["token_ids"] == wanted
    assert said.err.count("\n") == 1
    assert "--raw" in said.err
    with pytest.raises(RequestError, match="--system"):
        answer("Hello", path, system="Be brief.")
    with pytest.raises(RequestError, match=r"no chat template.*--raw"):
        talk(model=str(path), system="", sampling={}, loading={"backend": "reference"})


@pytest.mark.full
def test_a_model_for_embeddings_is_refused_for_what_it_is(tmp_path, capsys):
    """Catches the advice to continue a text with a model that generates nothing."""
    save(tmp_path / "vectors", "bert")
    for ask in (
        lambda: answer("Hello", tmp_path / "vectors"),
        lambda: answer("Hello", tmp_path / "vectors", system="Be brief."),
        lambda: talk(
            model=str(tmp_path / "vectors"), system="", sampling={}, loading={"backend": "reference"}
        ),
    ):
        with pytest.raises(UnsupportedError, match="does not support generation: use embed"):
            ask()
    assert "chat template" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (DEFAULT_MODEL, True), ("qwen3-0.6b", True), ("Qwen/Qwen3-0.6B-GGUF:Q8_0", True), ("hf:a/b", True),
        ("Hello", False), ("What is 1/2?", False), ("", False), ("a b/c", False), ("file.gguf", False),
        ("word " * 200, False), ("w" * 5000, False), ("a\0b", False),
    ],
)  # fmt: skip
def test_a_single_argument_that_names_a_model_is_one(text, is_one):
    """Catches `kukri run qwen3-0.6b` that asks the default model "qwen3-0.6b", or a prompt as a model."""
    assert is_model(text) == is_one


def test_a_single_file_or_directory_is_a_model(tmp_path):
    """Catches a path that is sent to the default model as a prompt."""
    assert is_model(str(write_tiny(tmp_path / "tiny.gguf")))
    assert not is_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert is_model(str(tmp_path))


@pytest.mark.parametrize(("closing", "code"), [(">&-", 2), ("2>&-", 0), ("<&-", 0)])
def test_closed_streams_are_no_traceback(tmp_path, closing, code):
    """Catches a shell's >&- that ends in a traceback, or an answer that is lost with exit code 0."""
    path = write_tiny(tmp_path / "tiny.gguf")
    line = f"{sys.executable} -m kukri run -m {path} Hello -n 2 --backend reference {closing}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: standard output is closed") == (code == 2)


@pytest.mark.full
def test_bytes_that_are_not_utf8_end_no_chat(tmp_path):
    """Catches a terminal of another encoding whose bytes end the conversation with a traceback."""
    path = write_tiny(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "kukri", "chat", "-m", str(path), "-n", "2", "--backend", "reference"]
    for encoding in ("utf-8", "ascii:surrogateescape"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding, "XDG_STATE_HOME": str(tmp_path)}
        done = subprocess.run(command, input=b"Hello \xff\nHello\n", capture_output=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert b"not UTF-8" in done.stdout
        assert b"Traceback" not in done.stderr


PEOPLE = {"type": "object", "properties": {"age": {"type": "integer", "enum": [34]}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({"schema": json.dumps(PEOPLE)}, {'{"age":34}'}),
        ({"regex": "[ab]{3}"}, {a + b + c for a in "ab" for b in "ab" for c in "ab"}),
        ({"choice": ["yes, no", "maybe"]}, {"yes", "no", "maybe"}),
        ({"grammar": 'start: "up" | "down"'}, {"up", "down"}),
        ({"grammar": 'root ::= "up" | "down"'}, {"up", "down"}),
    ],
)
def test_an_answer_has_the_form_that_an_option_asks_for(tmp_path, capsys, form, wanted):
    """Catches a form that is read and not enforced, and choices that keep their commas."""
    path = write_tiny(tmp_path / "tiny.gguf")
    options = FormOptions(**form)
    for name in ("schema", "grammar"):
        if text := form.get(name):
            (tmp_path / "form").write_text(text)
            setattr(options, name, tmp_path / "form")
    grammar = answer_form(options)
    answer("Hello", path, grammar=grammar, as_json=True, sampling={"max_tokens": 64, "seed": 1})
    text = json.loads(capsys.readouterr().out)["text"]
    assert "".join(text.split()) in wanted  # JSON may have white space


def test_a_form_of_a_file_that_is_wrong_is_one_line(tmp_path):
    """Catches a hostile file that is read without end, or ends in a traceback."""
    with pytest.raises(ConfigError, match="--schema and --choice"):
        answer_form(FormOptions(tmp_path, choice=["a"]))
    file = tmp_path / "form"
    for data, message in (
        (b"[" * 100_000, "nested too deeply"),
        (b"{", "must be JSON"),
        (b"[1]", "must be an object"),
        (b"\xff", "must be UTF-8"),
        (b'"' + b"a" * 300_000 + b'"', "must have at most"),
        ("ä".encode() * 600_000 + b"\xff", "must have at most"),
    ):
        file.write_bytes(data)
        with pytest.raises(RequestError, match=message):
            answer_form(FormOptions(schema=file))
    with pytest.raises(RequestError, match="must have at most"):
        answer_form(FormOptions(grammar=Path("/dev/zero")))
    with pytest.raises(OSError, match="nothing"):
        answer_form(FormOptions(grammar=tmp_path / "nothing"))


def test_a_grammar_that_does_not_compile_in_time_is_refused(tmp_path):
    """Catches a schema of 1 kB that keeps the command line busy for minutes, deaf to Ctrl-C."""
    patterns = [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrst"]
    with LLM(write_tiny(tmp_path / "tiny.gguf"), backend="reference") as llm:
        assert compiled_in_time(Grammar.choice(["a"]), llm.tokenizer).notes == ()
        with pytest.raises(RequestError, match=r"more than 0\.2 s to compile"):
            compiled_in_time(Grammar.json({"allOf": patterns}), llm.tokenizer, 0.2)


def test_an_answer_cut_off_says_so(tmp_path, capsys):
    """Catches half of a JSON object that passes for an answer of its schema."""
    path = write_tiny(tmp_path / "tiny.gguf")
    answer("Hello", path, grammar=Grammar.regex("[a-z]{64}"), sampling={"max_tokens": 3, "seed": 1})
    assert "cut off after 3 tokens" in capsys.readouterr().err
