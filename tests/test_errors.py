"""Errors as objects: what they keep on their way to another process."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from kukri.errors import ContextLengthError, FormatError, KukriError, RequestError
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
    if kind.__init__ is Exception.__init__:
        return kind("a text")
    parameters = [*inspect.signature(kind.__init__).parameters.values()][1:]
    plain = [one for one in parameters if one.kind is not one.KEYWORD_ONLY]
    values = [VALUES[str(one.annotation)] for one in plain] or ["a text"]
    named = {one.name: VALUES.get(str(one.annotation).split(" |")[0], "a text") for one in parameters}
    return kind(*values, **{one.name: named[one.name] for one in parameters if one.kind is one.KEYWORD_ONLY})


def test_every_error_comes_back_equal() -> None:
    """Catches a pool of processes that hangs as it cannot make the error of a task again."""
    found = classes()
    assert {ContextLengthError, FormatError, KukriError} < set(found)
    faults = []
    for kind in found:
        error = made(kind)
        error.add_note("seen at night")
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            if (type(again), str(again), vars(again)) != (kind, str(error), vars(error)):
                faults.append(f"{kind.__qualname__}: {again!r} {vars(again)} of {error!r} {vars(error)}")
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


@pytest.mark.full
def test_a_pool_of_processes_gives_the_error_of_its_task() -> None:
    """Catches a pool that is broken by an error, and one that never answers again."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for n in (9, 10):
            with pytest.raises(ContextLengthError, match=f"{n} tokens") as raised:
                pool.submit(fail, n).result(60)
            assert (raised.value.n_tokens, raised.value.max_context) == (n, 8)
