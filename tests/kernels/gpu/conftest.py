"""Makes the Triton kernels run under Triton's interpreter, unless KUKRI_TEST_DEVICE names a device.

The variable is read when a kernel is decorated and when it is launched, so it is set while the modules are
imported, before the run's first test (Triton itself in tests/conftest.py, before torch can), and during these
tests. Other tests of the process, and programs that they start, do not see it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kernels.gpu.device import DEVICE, IS_INTERPRETED
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch

HAS_TRITON = find_spec("triton") is not None
if not HAS_TRITON and os.environ.get("CI"):
    raise RuntimeError("CI tests the Triton kernels: pip install --group gpu-test")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Imports the kernels before a test of another folder does, which would have them compiled."""
    is_here = any(item.path.parent == Path(__file__).parent for item in session.items)
    if not (HAS_TRITON and is_here) or session.config.option.collectonly:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", str(int(IS_INTERPRETED)))
        for prototype in ("delta_chunks", "persistent"):
            import_module(f"benchmarks.prototypes.{prototype}")
        import_module("kukri.kernels.gpu.ops")
    if IS_INTERPRETED:
        _hasten_interpreter()


def _hasten_interpreter() -> None:
    """Leaves out what Triton's interpreter does again and again, or for nothing: most of its time.

    It replaces Triton's language for each call of a device function and not only for a launch, and computes
    whether integers overflow although nothing looks at the result.
    """
    from triton import language
    from triton.runtime import interpreter

    replace_language = interpreter._patch_lang

    @cache
    def languages(fn):
        return [one for one in (language, language.core) if any(one is x for x in fn.__globals__.values())]

    def replace_once(fn):
        if any(language.core.is_builtin(one.load) for one in languages(fn)):
            return replace_language(fn)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = replace_once
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflow would fail a test"
    builder.options = replace(builder.options, sanitize_overflow=False)


class _WithoutTriton(pytest.Module):
    def collect(self):
        pytest.skip("triton is not installed: pip install --group gpu-test", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if HAS_TRITON else _WithoutTriton.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def _on_device(monkeypatch):
    """Interpreted; or tensors that a test makes lie on the device, and are copied where NumPy reads them."""
    if IS_INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        yield
        return
    plain = torch.Tensor.numpy
    monkeypatch.setattr(torch.Tensor, "numpy", lambda x: plain(x.cpu()))
    with torch.device(DEVICE):
        yield
