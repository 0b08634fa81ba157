"""`kukri serve --preset`: names for a model with a system message, parameters, messages and an adapter."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kukri.errors import ConfigError
from kukri.server.app import create_app
from kukri.server.asgi_client import post
from kukri.server.chat.request import ChatRequest
from kukri.server.preset import Preset
from kukri.server.settings import ServerSettings
from kukri.terminal.preset_files import preset_file
from kukri.terminal.serve_options import ServeOptions
from kukri.terminal.served_models import served_models
from tests.server.live_server import serving

MODELFILE = '''# a pirate
FROM smollm2-135m
PARAMETER temperature 0.25
PARAMETER stop "<end>"
parameter stop Arr
PARAMETER num_predict 7
PARAMETER num_ctx 64
PARAMETER num_thread 4
SYSTEM """You are a pirate.
Say little."""
MESSAGE user Hi
MESSAGE assistant "Ahoy!"
LICENSE "free"
'''
TOML = """model = "smollm2-135m"
system = "You are a pirate.\\nSay little."
max-context = 64
messages = [{role = "user", content = "Hi"}, {role = "assistant", content = "Ahoy!"}]

[parameters]
temperature = 0.25
stop = ["<end>", "Arr"]
max_tokens = 7
"""
PIRATE = Preset(
    "pirate",
    "You are a pirate.\nSay little.",
    {"temperature": 0.25, "stop": ["<end>", "Arr"], "max_tokens": 7},
    ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ahoy!"}),
    max_context=64,
)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_both_forms_say_the_same(tmp_path: Path) -> None:
    """Catches a quote that stays in a value, and a parameter of one form that the other has not."""
    modelfile = write(tmp_path / "Modelfile", MODELFILE)
    for text in (f"pirate={modelfile}", str(write(tmp_path / "pirate.toml", TOML))):
        found = preset_file(text)
        assert found.preset == PIRATE
        assert (found.model, found.template, found.adapter) == ("smollm2-135m", None, None)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("Modelfile", MODELFILE, "NAME="), ("a", "SYSTEM Hi", "must name a model"),
        ("a", "FROM x\nTEMPLATE {{ if .System }}a{{ end }}{{ .Prompt }}", "template must be Jinja, not Go"),
        ("a", 'FROM x\nSYSTEM """Hi', "must be closed"),
        ("a", "FROM x\nWHAT is it", "instruction WHAT is not supported"),
        ("a", "FROM x\nPARAMETER temperature hot", "temperature"),
        ("a", "FROM x\nMESSAGE pirate Hi", "MESSAGE"), ("a", "FROM x\n<<<", "must be an instruction"),
        ("a.toml", "model = 1", "must be a text"), ("a.toml", 'system = "a"', "must name a model"),
        ("a.toml", 'model = "x"\nsistem = "a"', "sistem"), ("a.toml", "model =", "TOML"),
        ("a.toml", 'model = "x"\n[parameters]\ntop_k = "a"', "top_k"),
        ("a.toml", 'model = "x"\n[parameters]\ntopk = 1', "topk"),
        ("a.toml", 'model = "x"\nmessages = ["a"]', "messages"),
        ("a.toml", 'model = "x"\nmax-context = 0', "max-context"),
        ("a.toml", 'model = "x"\ntemplate = "{{ .Prompt }}"', "Go"),
        ("b", "a" * (1 << 21), "must be at most 1048576 bytes"),
    ],
)  # fmt: skip
def test_wrong_files_are_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    """Catches a line that is passed over, and half of a file that is served."""
    with pytest.raises(ConfigError, match=message):
        preset_file(str(write(tmp_path / name, text)))
    with pytest.raises(ConfigError, match="cannot be read"):
        preset_file(str(tmp_path / "nothing"))


def test_what_a_request_says_comes_first() -> None:
    """Catches a preset that overrides a client, and two system messages."""
    asked = [{"role": "user", "content": "Who are you?"}]
    own = {"role": "system", "content": "You are a cook."}
    made = ChatRequest(messages=asked, sampling={"temperature": 1.0, "max_tokens": None}).with_preset(PIRATE)
    assert made.messages == [{"role": "system", "content": PIRATE.system}, *PIRATE.messages, *asked]
    assert made.sampling == {"temperature": 1.0, "max_tokens": 7, "stop": ["<end>", "Arr"]}
    assert made.max_context == 64
    made = ChatRequest(messages=[own, *asked], sampling={}, max_context=32).with_preset(PIRATE)
    assert made.messages == [own, *PIRATE.messages, *asked]
    assert made.max_context == 32


def test_presets_share_the_model_that_they_are_of(tmp_path: Path, tiny_path: Path) -> None:
    """Catches weights that are loaded for each preset, and a template that others get too."""
    one = write(tmp_path / "one", f"FROM {tiny_path}\nADAPTER ./lora\nSYSTEM a")
    two = write(tmp_path / "two", "FROM tiny")
    three = write(tmp_path / "three", "FROM tiny\nTEMPLATE {{ messages }}")
    options = ServeOptions(preset=[str(one), str(two), f"third={three}"])
    specs = served_models([str(tiny_path)], options, {})
    assert [spec.names for spec in specs] == [("tiny", "one", "two"), ("third",)]
    assert specs[0].options.adapters == {"one-adapter": str(tmp_path / "lora")}
    assert [preset.adapter for preset in specs[0].presets] == ["one-adapter", None]
    assert specs[1].options.chat_template == "{{ messages }}"
    assert specs[0].options.chat_template is None
    with pytest.raises(ConfigError, match="two models cannot have the name"):
        served_models([str(tiny_path)], ServeOptions(preset=[f"tiny={two}"]), {})


def test_presets_over_http(tmp_path: Path, tiny_path: Path) -> None:
    """Catches a preset that some API does not know, parameters that are lost, and facts of another model."""
    text = f"FROM {tiny_path}\nPARAMETER num_predict 3\nPARAMETER temperature 0\nSYSTEM Be brief."
    options = ServeOptions(preset=[f"brief={write(tmp_path / 'Modelfile', text)}"])
    specs = served_models([str(tiny_path)], options, {"backend": "reference"})
    chat = [{"role": "user", "content": "Hi"}]
    with_system = [{"role": "system", "content": "Be brief."}, *chat]

    async def main() -> None:
        app = create_app(None, ServerSettings(), specs)
        async with app.router.lifespan_context(app):

            async def ask(path: str, **body: Any) -> Any:
                answer = await post(app, path, {"model": "brief", **body})
                assert answer.status == 200, answer.body
                return json.loads(answer.body) if isinstance(answer.body, bytes | str) else answer.body

            found = await ask("/v1/chat/completions", messages=chat, ignore_eos=True)
            assert found["model"] == "brief"
            assert found["usage"]["completion_tokens"] == 3
            plain = await ask("/v1/chat/completions", model="tiny", messages=with_system, max_tokens=1)
            assert plain["model"] == "tiny"
            assert plain["usage"]["prompt_tokens"] == found["usage"]["prompt_tokens"]
            more = await ask("/v1/chat/completions", messages=chat, ignore_eos=True, max_tokens=5)
            assert more["usage"]["completion_tokens"] == 5
            native = await ask("/api/chat", messages=chat, stream=False)
            assert native["prompt_eval_count"] == found["usage"]["prompt_tokens"]
            counted = await ask("/v1/messages/count_tokens", messages=chat)
            assert counted["input_tokens"] == found["usage"]["prompt_tokens"]
            shown = await ask("/api/show", model="brief")
            assert shown["system"] == "Be brief."
            assert sorted(shown["parameters"].split()) == ["0.0", "3", "num_predict", "temperature"]
            assert 'SYSTEM """Be brief."""' in shown["modelfile"]
            assert "system" not in await ask("/api/show", model="tiny")

    asyncio.run(main())


def test_presets_are_on_the_page(tmp_path: Path, tiny_path: Path) -> None:
    """Catches a preset that cannot be chosen there, and one whose system message the page's own replaces."""
    text = f"FROM {tiny_path}\nPARAMETER num_predict 3\nSYSTEM Be brief."
    options = ServeOptions(preset=[f"brief={write(tmp_path / 'Modelfile', text)}"])
    specs = served_models([str(tiny_path)], options, {"backend": "reference"})
    with serving(None, specs) as server, server.http() as http:
        page = http.get("/ui/model", params={"name": "brief"}).text
        assert 'data-model="brief"' in page
        assert page.count("<option") == 2
        body = {"model": "brief", "messages": [{"role": "user", "content": "Hi"}]}
        stream = http.post("/ui/answers", json=body).text.split('sse-connect="')[1].split('"')[0]
        shown = http.get(f"/{stream}").text
        chat = http.post("/v1/chat/completions", json=body).json()
        assert f'"n_prompt":{chat["usage"]["prompt_tokens"]}' in shown.replace(" ", "")
