"""Options of the command line: dataclasses as options of commands, and the model as an argument or -m."""

import sys
from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kukri import LLM, SamplingParams
from kukri.bench.load import LoadOptions as LoadSettings
from kukri.cli import app
from kukri.errors import ConfigError, UnsupportedError
from kukri.terminal.options import (
    LoadOptions,
    LoadTestOptions,
    ManyOptions,
    SamplingOptions,
    command,
    given,
    model_and,
    one_model,
    option,
)


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
        ("m", ("a", "b", "c"), True, "given twice"),
        (None, ("a", "b", None), True, "missing argument B"),
        (None, (None, None, None), True, "missing argument MODEL"),
        ("m", ("a", None, None), True, "missing argument B"),
        (None, (None, None, None), False, "missing argument A"),
    ],
)
def test_wrong_numbers_of_arguments(option, arguments, needs_model, words):
    """Catches a model in the place of another argument."""
    with pytest.raises(ConfigError, match=words):
        model_and(option, *arguments, names="MODEL A B", needs_model=needs_model)


def test_one_model_is_given_once():
    """Catches one of two models dropped in silence."""
    assert (one_model("a", None), one_model(None, "b"), one_model(None, None)) == ("a", "b", None)
    with pytest.raises(ConfigError, match="given twice"):
        one_model("a", "b")


def test_adapters_are_given_by_name():
    """Catches a path with = that is cut, and one of two adapters dropped in silence."""
    options = LoadOptions(adapters=["a=x=y", "b=/z"])
    assert given(options) == {"adapters": {"a": "x=y", "b": "/z"}}
    for values, words in (
        (["x"], "NAME=PATH, not 'x'"),
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
    with pytest.raises(UnsupportedError, match=r"kukri\[ray\]"):
        given(LoadOptions(stages="ray:2"))


def test_fields_have_the_names_of_what_they_are_passed_to():
    """Catches an option that fails with a TypeError when it is used."""
    assert {one.name for one in fields(SamplingOptions)} <= {one.name for one in fields(SamplingParams)}
    assert {one.name for one in fields(ManyOptions)} <= set(LLM.__init__.__kwdefaults__)
    assert {one.name for one in fields(LoadTestOptions)} >= {
        one.name for one in fields(LoadSettings) if one.name not in ("loads", "loop", "objective")
    }


def test_every_command_takes_the_model_both_ways():
    """Catches a command that wants its model in another way than the rest."""
    runner = CliRunner()
    lines = runner.invoke(app, ["--help"]).stdout.partition("Commands:")[2].splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    assert len(names) > 12
    for name in names:
        if name in ("doctor", "list", "ps", "stage"):
            continue
        words = ["cluster", "serve"] if name == "cluster" else [name]
        text = runner.invoke(app, [*words, "--help"]).stdout
        assert "-m, --model" in text, name
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
