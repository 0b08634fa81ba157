"""Models of `kukri serve`, from the command line and a configuration file; and `kukri ps`."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kukri.cli import app
from kukri.errors import ConfigError
from kukri.terminal.command import command, given
from kukri.terminal.files import read_text
from kukri.terminal.options import ManyOptions, ReaderOptions, SteeringOptions
from kukri.terminal.serve import server_settings
from kukri.terminal.serve_options import ServeOptions
from kukri.terminal.served_models import configured_models, served_models

CONFIG = """
port = 9000
idle-unload = "10m"
max_body = "1MiB"
no-page = true
alias = ["a", "b"]
deadline = 2.5

[models]
embed = "smollm2-135m"

[models.chat]
model = "org/repo:Q4_K_M"
aliases = ["gpt"]
pinned = true
keep-alive = "1h"
kv-memory = "1GiB"
threads = 1
"""


def parsed(*arguments: str) -> tuple[ServeOptions, ManyOptions]:
    """The options of a command line."""
    made, found = typer.Typer(rich_markup_mode=None), []

    @command(made)
    def serve(*, serving: ServeOptions, loading: ManyOptions) -> None:
        found.append((serving, loading))

    result = CliRunner().invoke(made, list(arguments))
    if result.exception is not None:
        raise result.exception
    return found[0]


def served(models: list[str], *arguments: str):
    serving, loading = parsed(*arguments)
    return served_models(models, serving, given(loading))


def test_a_configuration_file_sets_options_and_models(tmp_path):
    """Catches a key that is ignored, a unit lost, and a command line that the file overrides."""
    file = tmp_path / "kukri.toml"
    file.write_text(CONFIG)
    serving, _ = parsed("--config", str(file), "--port", "1234")
    assert (serving.port, serving.alias) == (1234, ["a", "b"])
    settings = server_settings(serving, None)
    assert (settings.idle_unload_s, settings.max_body_bytes) == (600, 1 << 20)
    assert (settings.has_page, settings.deadline_s) == (False, 2.5)
    embed, chat = configured_models(file)
    assert (embed.names, embed.options.model, embed.is_pinned) == (("embed",), "smollm2-135m", False)
    assert (chat.names, chat.is_pinned, chat.keep_alive_s) == (("chat", "gpt"), True, 3600)
    assert (chat.options.kv_bytes, chat.options.n_threads) == (1 << 30, 1)
    both = served(["x=y.gguf"], "--config", str(file), "--pin", "x")
    assert [(one.names, one.is_pinned) for one in both] == [
        (("a", "b", "x"), True),
        (("embed",), False),
        (("chat", "gpt"), True),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "'prot' is not supported"),
        ("alias = 'a'", "'alias' must be a list"),
        ("no-page = 'yes'", "'no-page' must be true or false"),
        ("port = true", "'port' must not be true or false"),
        ("model = 'a'", "models have a table"),
        ("port = = 1", "must be TOML"),
    ],
)
def test_wrong_options_of_a_file_are_named(tmp_path, text, words):
    """Catches a misspelled option that is silently left out."""
    file = tmp_path / "kukri.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        parsed("--config", str(file))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models = 1", "'models' must be a table"),
        ("[models.a]\npinned = true", "models.a.model is required"),
        ("[models.a]\nmodel = 'm'\nspeed = 1", "models.a.speed is not supported"),
        ("[models.a]\nmodel = 'm'\nkeep-alive = 'x'", "models.a.keep-alive must be a time"),
        ("[models.a]\nmodel = 'm'\nmax-context = 'x'", "models.a.max-context must be a whole number"),
        ("[models.a]\nmodel = 'm'\naliases = 'x'", "models.a.aliases must be a list"),
    ],
)
def test_wrong_models_of_a_file_are_named(tmp_path, text, words):
    """Catches an option of a model that is silently left out."""
    file = tmp_path / "kukri.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        configured_models(file)


def test_models_are_named_on_the_command_line(tmp_path, monkeypatch):
    """Catches a path with = that is cut in two, two models of one name, and a KV budget for each model."""
    monkeypatch.chdir(tmp_path)
    Path("a=b.gguf").touch()
    names = [one.names for one in served(["a=b.gguf", "c=d.gguf", "org/repo:Q4_0"])]
    assert names == [("a=b",), ("c",), ("org/repo:Q4_0",)]
    assert served([])[0].names == ("smollm2-135m",)
    assert served(["x=y"], "--kv-memory", "1MiB")[0].options.kv_bytes == 1 << 20
    assert served(["x=y", "z=y"], "--kv-memory", "1MiB")[0].options.kv_bytes is None
    for models, words in ((["x=y", "x=z"], "two models cannot have the name 'x'"), (["=y"], "NAME=MODEL")):
        with pytest.raises(ConfigError, match=words):
            served(models)
    with pytest.raises(ConfigError, match="the model 'w' of --pin was not found: use x"):
        served(["x=y"], "--pin", "w")


class Models(BaseHTTPRequestHandler):
    """Lists two models, if asked with the key."""

    def do_GET(self):
        has_key = self.headers.get("authorization") == "Bearer k"
        loaded = {"state": "loaded", "memory_bytes": 3 << 20, "running_requests": 2, "expires_in_s": 61.0}
        models = [{"id": "chat", **loaded}, {"id": "embed\x1b[2J", "state": "unloaded"}]
        self.send_response(200 if has_key else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"data": models if has_key else []}).encode())

    def log_message(self, *_):
        pass


@pytest.mark.full
def test_ps_shows_the_models_of_a_server():
    """Catches a name that steers the terminal, and a traceback where there is no server."""
    server = HTTPServer(("127.0.0.1", 0), Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    shown = CliRunner().invoke(app, ["ps", "--url", url, "--api-key", "k"])
    assert shown.exit_code == 0
    assert "\x1b" not in shown.stdout
    for words in ("chat", "loaded", "3.1 MB", "61 s", "unloaded"):
        assert words in shown.stdout
    assert (
        len(
            json.loads(CliRunner().invoke(app, ["ps", "--url", url, "--api-key", "k", "--json"]).stdout)[
                "models"
            ]
        )
        == 2
    )
    assert "give --api-key" in CliRunner().invoke(app, ["ps", "--url", url]).stderr
    server.shutdown()
    server.server_close()
    assert "no server answers" in CliRunner().invoke(app, ["ps", "--url", url]).stderr


def test_files_that_steer_are_of_the_first_model(tmp_path):
    """Catches a vector that is given to a model of another width, a path that is taken as it stands."""
    readers = given(ReaderOptions(["happy=a.gguf"], None, ["l8=dir"]))
    assert readers == {"control_vectors": {"happy": "a.gguf"}, "saes": {"l8": "dir"}}
    first, second = served_models(["a=x.gguf", "b=y.gguf"], parsed()[0], readers)
    assert first.options.control_vectors == {"happy": "a.gguf"}
    assert second.options.control_vectors is second.options.saes is None
    with pytest.raises(ConfigError, match="NAME=PATH"):
        given(ReaderOptions(["a.gguf"]))
    file = tmp_path / "kukri.toml"
    file.write_text('[models.a]\nmodel = "x.gguf"\ncontrol-vector = {happy = "a.gguf"}\n')
    (model,) = configured_models(file)
    assert model.options.control_vectors == {"happy": str(tmp_path / "a.gguf")}
    file.write_text('[models.a]\nmodel = "x.gguf"\nprobe = "a.gguf"\n')
    with pytest.raises(ConfigError, match="must be a table of files"):
        configured_models(file)


def test_control_vectors_of_run_and_chat():
    """Catches a strength that becomes a part of the path, layers that are ignored."""
    files, interventions = SteeringOptions(
        ["a.gguf:-1.5", "C:b.gguf", "c.gguf"], "3-9"
    ).files_and_interventions()
    assert files == {"control_vectors": {"0": "a.gguf", "1": "C:b.gguf", "2": "c.gguf"}}
    assert [one["strength"] for one in interventions] == [-1.5, 1.0, 1.0]
    assert [one["layers"] for one in interventions] == [[3, 9]] * 3
    assert SteeringOptions().files_and_interventions() == ({}, [])
    for wrong in (SteeringOptions(None, "1-2"), SteeringOptions(["a.gguf"], "1")):
        with pytest.raises(ConfigError):
            wrong.files_and_interventions()


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Catches the first line of a configuration or of keys refused because an editor of Windows saved it."""
    path = tmp_path / "kukri.toml"
    path.write_bytes(b"\xef\xbb\xbfmax-tokens = 5\r\n")
    assert read_text(path) == "max-tokens = 5\n"
