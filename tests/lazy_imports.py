"""Imports that wait until a test uses them, so that collecting the tests imports neither torch nor a client.

    with lazy_imports():
        import torch
        from transformers import LlamaConfig

A name stands for the module, class or function from the first call or look at an attribute on. What needs the
thing itself imports it in its function, because a base class, `isinstance` and a table of parameters do.
"""

from __future__ import annotations

import builtins
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any


class LazyImport:
    """A module, or a name of a module, that is imported when it is first called or asked for an attribute."""

    def __init__(self, module: str, name: str | None = None) -> None:
        vars(self).update(_module=module, _name=name)

    def _imported(self) -> Any:
        module = import_module(self._module)
        if self._name is None:
            return module
        try:
            return getattr(module, self._name)
        except AttributeError:
            return import_module(f"{self._module}.{self._name}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name":  # pytest asks each global of a test module for them
            raise AttributeError(name)
        return getattr(self._imported(), name)

    def __setattr__(self, name: str, value: object) -> None:  # monkeypatch would not restore it
        target = ".".join(filter(None, (self._module, self._name, name)))
        raise AttributeError(f"what is patched must be named by a text: '{target}'")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._imported()(*args, **kwargs)


class lazy_imports:
    """Within the block, the imports of the module that has it give each name a `LazyImport`."""

    def __enter__(self) -> None:
        caller, self._import = sys._getframe(1).f_globals, builtins.__import__

        def lazy_import(
            name: str, namespace: Any = None, local: Any = None, wanted: Any = (), level: int = 0
        ) -> Any:
            if namespace is not caller:  # of another thread
                return self._import(name, namespace, local, wanted, level)
            if wanted:
                return SimpleNamespace(**{one: LazyImport(name, one) for one in wanted})
            return LazyImport(name)

        builtins.__import__ = lazy_import  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        builtins.__import__ = self._import
