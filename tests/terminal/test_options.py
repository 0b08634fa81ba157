"""Options of the command line: dataclasses as options of commands, and the model as an argument or -m."""

import re
import sys
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

import kukri
from kukri import SamplingParams
from kukri.bench.load import LoadOptions as LoadSettings
from kukri.cli import app
from kukri.config import EngineConfig
from kukri.errors import ConfigError, UnsupportedError
from kukri.opening.model_options import ModelKeywords, option_fields
from kukri.terminal.command import LightParams, command, given, option
from kukri.terminal.errors import HEADINGS
from kukri.terminal.options import (
    LoadOptions,
    LoadTestOptions,
    SamplingOptions,
    model_and,
    one_model,
)
from kukri.terminal.served_models import configured_models


@dataclass(frozen=True)
class Sizes:
    """Options for the tests."""

    n: int | None = option("How many.", "--count", "-c", metavar="N")
    names: list[str] | None = option("Names.")  # noqa: RUF009
    is_big: bool = option("Big.", "--big", default=False)
    rate: float = option("Rate.", default=1.5)


def commands() -> tuple[typer.Typer, list[object]]:
    made, calls = typer.Typer(rich_markup_mode=None), []

    @command(made)
    def measure(
        path: Annotated[str, typer.Argument(help="A path.")], *, sizes: Sizes, last: bool = False
    ) -> None:
        """Measure something."""
        calls.append((path, sizes, last))

    return made, calls


def test_a_dataclass_becomes_options():
    """Catches a default lost, a flag named by its field, or fields in the wrong group."""
    made, calls = commands()
    runner = CliRunner()
    assert runner.invoke(made, ["x"]).exit_code == 0
    assert (
        runner.invoke(made, ["x", "-c", "0", "--names", "a", "--names", "b", "--big", "--last"]).exit_code
        == 0
    )
    assert calls == [("x", Sizes(), False), ("x", Sizes(0, ["a", "b"], True, 1.5), True)]
    text = runner.invoke(made, ["--help"]).stdout
    for words in ("-c, --count N", "How many.", "default: 1.5", "Measure something."):
        assert words in text


def test_only_what_is_given_is_passed_on():
    """Catches a 0 taken for nothing, and None that overrides a model's default."""
    assert given(Sizes(0, [], False, 0.0)) == {"n": 0, "rate": 0.0}
    assert given(SamplingOptions()) == {}


@pytest.mark.parametrize(
    ("option", "arguments", "needs_model", "found"),
    [
        (None, ("m", "a", "b"), True, ["m", "a", "b"]),
        ("m", ("a", "b", None), True, ["m", "a", "b"]),
        ("m", ("a", "b", None), False, ["m", "a", "b"]),
        (None, ("a", "b", None), False, [None, "a", "b"]),
    ],
)
def test_the_model_comes_first_or_by_option(option, arguments, needs_model, found):
    """Catches a target that is read as the model, which would then be overwritten."""
    assert model_and(option, *arguments, names="MODEL A B", needs_model=needs_model) == found


@pytest.mark.parametrize(
    ("option", "arguments", "needs_model", "words"),
    [
        ("m", ("a", "b", "c"), True, "must be given once"),
        (None, ("a", "b", None), True, "B is required"),
        (None, (None, None, None), True, "MODEL is required"),
        ("m", ("a", None, None), True, "B is required"),
        (None, (None, None, None), False, "A is required"),
    ],
)
def test_wrong_numbers_of_arguments(option, arguments, needs_model, words):
    """Catches a model in the place of another argument."""
    with pytest.raises(ConfigError, match=words):
        model_and(option, *arguments, names="MODEL A B", needs_model=needs_model)


def test_one_model_is_given_once():
    """Catches one of two models dropped in silence."""
    assert (one_model("a", None), one_model(None, "b"), one_model(None, None)) == ("a", "b", None)
    with pytest.raises(ConfigError, match="must be given once"):
        one_model("a", "b")


def test_adapters_are_given_by_name():
    """Catches a path with = that is cut, and one of two adapters dropped in silence."""
    options = LoadOptions(adapters=["a=x=y", "b=/z"])
    assert given(options) == {"adapters": {"a": "x=y", "b": "/z"}}
    for values, words in (
        (["x"], r"--adapter must be NAME=PATH each, not \['x'\]"),
        (["=x"], "NAME=PATH"),
        (["a=x", "a=y"], "two are named"),
    ):
        with pytest.raises(ConfigError, match=words):
            given(LoadOptions(adapters=values))


def test_stages_are_given_in_three_ways(monkeypatch):
    """Catches addresses taken for a number, and Ray's stages that fail with an ImportError."""
    assert given(LoadOptions(stages="2")) == {"stages": 2}
    assert given(LoadOptions(stages="a:1,b:2")) == {"stages": ("a:1", "b:2")}
    assert given(LoadOptions(stages="ray:7310,b:2")) == {"stages": ("ray:7310", "b:2")}
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r"needs the package ray: run `pip install .*\[ray\]"):
        given(LoadOptions(stages="ray:2"))


def test_fields_have_the_names_of_what_they_are_passed_to():
    """Catches an option that fails with a TypeError when it is used."""
    assert {one.name for one in fields(SamplingOptions)} <= {one.name for one in fields(SamplingParams)}
    assert set(ModelKeywords.__annotations__) == option_fields().keys() - {"model"}
    assert {one.name for one in fields(LoadTestOptions)} >= {
        one.name for one in fields(LoadSettings) if one.name not in ("loads", "loop", "objective")
    }


@pytest.mark.full
def test_every_command_takes_the_model_both_ways():
    """Catches a command that wants its model in another way than the rest."""
    runner = CliRunner()
    lines = runner.invoke(app, ["--help"]).stdout.splitlines()
    names = [line.split()[0] for line in lines if re.match(r"  [a-z]", line)]
    assert sorted(names) == sorted(name for group in HEADINGS.values() for name in group)
    registered = [one.name or one.callback.__name__ for one in app.registered_commands]
    assert sorted(names) == sorted([*registered, *(one.name for one in app.registered_groups)])
    for name in names:
        if name in ("doctor", "list", "ps", "stage"):
            continue
        words = ["cluster", "serve"] if name == "cluster" else [name]
        text = runner.invoke(app, [*words, "--help"]).stdout
        assert "-m, --model" in text, name
        if name != "launch":  # whose first argument is the agent
            assert "[MODEL" in text or "[A]" in text, name


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("ru", "run"),
        ("inspect smollm3", "smollm3-3b"),
        ("run --min", "--min-p"),
        ("run -m smollm3", "smollm3-3b"),
        ("serve -m smollm3", "smollm3-3b"),
    ],
)
def test_the_shell_completes_commands_models_and_options(words, found):
    """Catches a completion script that the program does not answer."""
    line = f"kukri {words}"
    environment = {"_KUKRI_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = CliRunner().invoke(app, [], prog_name="kukri", env=environment)
    assert found in done.output.split()


def test_an_option_means_the_same_in_python_in_a_file_and_for_ray(tmp_path):
    """Catches a text that another way in takes apart letter by letter, or for a switch."""
    texts = {
        "stages": "2", "devices": "cuda:0,cuda:1", "prefix_bytes": "2MiB", "rope_factor": "4",
        "kv_type": "q8_0", "prefix_cache": "off", "adapters": "a=x", "max_context": "64",
        "speculation": "off",
    }  # fmt: skip
    values = {
        "stages": 2, "devices": ("cuda:0", "cuda:1"), "prefix_bytes": 2 << 20, "rope_factor": 4.0,
        "kv_type": "q8_0", "prefix_cache": False, "adapters": {"a": "x"}, "max_context": 64,
        "speculation": "off",
    }  # fmt: skip
    wanted = kukri.ModelOptions(**values)
    assert kukri.ModelOptions(**texts) == wanted
    assert kukri.ModelOptions(**{**texts, "speculation": False}) == wanted  # YAML's off
    file = tmp_path / "models.toml"
    lines = ["stages = 2", "devices = ['cuda:0', 'cuda:1']", "prefix-size = '2MiB'", "rope-factor = 4"]
    lines += ["kv-type = 'q8_0'", "prefix-cache = false", "adapter = {a = 'x'}", "max-context = 64"]
    file.write_text("\n".join(["[models.m]", "model = 'm'", "speculation = 'off'", *lines]))
    (made,) = configured_models(file)
    assert made.options == replace(wanted, model="m")


def test_every_option_of_the_engine_can_be_set():
    """Catches a field of EngineConfig that no keyword, flag or file reaches."""
    others = {"caches_prefixes": "prefix_cache"}
    own = {"max_draft_tokens", "max_in_flight"}  # follow from the model and from `stages`
    names = {others.get(one.name, one.name) for one in fields(EngineConfig)} - own
    assert names <= option_fields().keys()


@pytest.mark.parametrize("name", sorted(option_fields()))
def test_wrong_values_name_the_option(name):
    """Catches an option that takes anything, and an error that does not say which option is wrong."""
    with pytest.raises(ConfigError, match=rf"^'{name}'.* must be "):
        kukri.ModelOptions(**{name: object()})


class _NewerParam:
    """A parameter as typer 0.29 makes it, whose own reader answers "typer's"."""

    def __init__(self, kind: type, least: float | None = None, *, multiple: bool = False) -> None:
        info = SimpleNamespace(parser=None, min=least, max=None)
        self.type_descriptor = SimpleNamespace(annotation=kind, parameter_info=info)
        self.multiple, self.nargs, self._runtime_param = multiple, 1, None

    def get_runtime_param(self):
        assert self._runtime_param is None
        return SimpleNamespace(coerce=lambda *_: "typer's")


def test_newer_typer_needs_no_pydantic_for_simple_values():
    """Catches 80 ms of every start with typer 0.29, and a wrong value that typer would have refused."""

    class Params:
        def get_params(self, ctx):
            return ctx

    class Light(LightParams, Params):
        pass

    def read(value, *arguments, **settings):
        param = _NewerParam(*arguments, **settings)
        assert Light().get_params([param]) == [param]
        return param._runtime_param.coerce(value, param, None)

    assert (read("8", int), read(8, int), read("x", str), read("1e-3", float)) == (8, 8, "x", 0.001)
    assert (read(None, str), read(None, list, multiple=True)) == (None, ())
    assert [read(*one) for one in (("x", int), ("0", int, 1), (["a"], list))] == ["typer's"] * 3
