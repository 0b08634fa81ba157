"""Errors as objects: what they keep on their way to another process."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import kukri
from kukri import errors
from kukri.errors import ContextLengthError, FormatError, KukriError, RequestError
from kukri.formats.json_files import read_json
from tests.test_architecture import PACKAGE, module_files

VALUES = {"int": 7, "float": 0.5, "bool": True, "str": "a text", "Sequence[str]": ["a", "b"]}


def classes() -> list[type[KukriError]]:
    """Every class of errors in the package, those of modules that nothing has imported yet among them."""
    for file in module_files():
        source = file.read_text(encoding="utf-8")
        if any(f"({kind.__name__})" in source for kind in _tree(KukriError)):
            parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    return [kind for kind in _tree(KukriError) if kind.__module__.startswith("kukri")]


def _tree(kind: type[Any]) -> list[type[Any]]:
    return [kind, *(one for child in kind.__subclasses__() for one in _tree(child))]


def made(kind: type[KukriError]) -> KukriError:
    """An error with a value for each of its constructor's parameters."""
    if not inspect.isfunction(kind.__init__):
        return kind("a text")
    parameters = [*inspect.signature(kind.__init__).parameters.values()][1:]
    plain = [one for one in parameters if one.kind is not one.KEYWORD_ONLY]
    values = [VALUES[str(one.annotation)] for one in plain] or ["a text"]
    named = {one.name: VALUES.get(str(one.annotation).split(" |")[0], "a text") for one in parameters}
    return kind(*values, **{one.name: named[one.name] for one in parameters if one.kind is one.KEYWORD_ONLY})


def differences(error: KukriError, again: BaseException | None) -> list[str]:
    """Say what an error lost on its way: its type, its text or an attribute."""
    if (type(again), str(again), vars(again)) == (type(error), str(error), vars(error)):
        return []
    return [f"{type(error).__qualname__}: {again!r} {vars(again)} of {error!r} {vars(error)}"]


def test_every_error_comes_back_equal() -> None:
    """Catches a pool of processes that hangs as it cannot make the error of a task again."""
    found = classes()
    assert {ContextLengthError, FormatError, KukriError} < set(found)
    faults = []
    for kind in found:
        error = made(kind)
        error.add_note("seen at night")
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            faults += differences(error, again)
    assert not faults, "\n".join(faults)


def test_nothing_travels_with_an_error() -> None:
    """Catches a prompt, an engine or a tensor that is copied to another process in an error's attributes."""
    error = RequestError("wrong", param="prompt")
    error.request = object()  # type: ignore[attr-defined]
    error.__cause__ = ValueError(lambda: None)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.param, hasattr(again, "request")) == ("wrong", "prompt", False)


def fail(n: int) -> None:
    raise ContextLengthError(n, 8)


def fail_as(kind: type[KukriError]) -> None:
    raise made(kind)


@pytest.mark.full
def test_a_pool_of_processes_gives_the_error_of_its_task() -> None:
    """Catches a pool that is broken by an error, and one that never answers again."""
    spawn = get_context("spawn")
    faults = []
    with ProcessPoolExecutor(1, spawn) as executor, spawn.Pool(1) as pool:
        for kind in classes():
            caught = [executor.submit(fail_as, kind).exception(60)]
            with pytest.raises(kind) as raised:
                pool.apply_async(fail_as, (kind,)).get(60)
            for error in (*caught, raised.value):
                vars(error).pop("__notes__", None)
                faults += differences(made(kind), error)
    assert not faults, "\n".join(faults)


@pytest.mark.full
def test_joblib_gives_the_error_of_its_task() -> None:
    """Catches a worker of joblib that is lost to an error, which joblib calls a crash or a lack of memory."""
    joblib = pytest.importorskip("joblib")
    faults = []
    with joblib.externals.loky.get_reusable_executor(max_workers=1) as executor:
        for kind in classes():
            raised = executor.submit(fail_as, kind).exception(60)
            raised.__dict__.pop("__notes__", None)
            faults += differences(made(kind), raised)
    assert not faults, "\n".join(faults)
    with pytest.raises(ContextLengthError, match="9 tokens"):
        joblib.Parallel(n_jobs=2, backend="loky")(joblib.delayed(fail)(n) for n in (9, 9))


def test_a_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    """Catches a caller's `except FileNotFoundError` that a missing model passes by."""
    with pytest.raises(FileNotFoundError, match="was not found"):
        kukri.LLM(tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="was not found"):
        read_json(tmp_path / "tokenizer.json")
    error = errors.MissingFileError("no such file", path="a", offset=3)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.path, again.offset) == (type(error), str(error), "a", 3)


def test_a_wrong_value_is_a_value_error(tmp_path: Path) -> None:
    """Catches a caller's `except ValueError` that a wrong option or parameter passes by."""
    with pytest.raises(ValueError, match="'temperature' must be"):
        kukri.SamplingParams(temperature=-1)
    with pytest.raises(ValueError, match="'max_context' must be"):
        kukri.LLM(tmp_path / "model.gguf", max_context=-1)
