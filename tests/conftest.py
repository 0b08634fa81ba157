"""Fixtures that every test may use."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from kukri.kernels.cpu.compile import compiling
from tests.kernels.gpu.device import IS_INTERPRETED

EXPENSIVE = {"torch", "transformers", "anthropic", "openai", "numba"}  # packages that take seconds to import
IMPORTED_TO_COLLECT = pytest.StashKey[set[str]]()
pytest_plugins = ["tests.tiers", "tests.processor_time", "tests.draws"]

if TYPE_CHECKING:
    from kukri import LLM
    from kukri.kernels.backend import Backend

# A busy machine is no fault of an example's; on CI the rest is Hypothesis's own profile for it.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")

# Helpers compile what a test needs, and not also the kernel of sampling that an answer would need next.
compiling._SOON = ()
# Test processes are busy already when kernels are missing: helpers would import Numba for every few kernels.
if "PYTEST_XDIST_WORKER" in os.environ:
    compiling._MOST_HELPERS = 0

# Triton's own functions are interpreted or compiled for good when it is imported, which torch does somewhere:
# here they are interpreted, for tests/kernels/gpu.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", str(int(IS_INTERPRETED)))
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401

# Python takes all down at its end, because nanobind's modules report what is left. Not before: pytest itself
# collects garbage twice when a run ends, which would walk all packages and tests.
atexit.register(gc.unfreeze)

# Shells start what runs in the background with Ctrl-C ignored, which the tests' own processes would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Leaves packages and tests out of garbage collection, while they come and later: they stay anyway."""
    gc.disable()
    try:
        return (yield)
    finally:
        session.config.stash[IMPORTED_TO_COLLECT] = EXPENSIVE & sys.modules.keys()
        gc.freeze()
        gc.enable()


def pytest_runtest_logfinish() -> None:
    """Leaves packages that tests have imported since out of garbage collection too.

    A torch backend sets PyTorch's threads for the whole process, which would slow all later tests down.
    """
    global _n_modules
    if len(sys.modules) > _n_modules + 100:
        gc.collect()  # garbage would stay too, with the processes of its chat templates
        gc.freeze()
        _n_modules = len(sys.modules)
    torch = sys.modules.get("torch")
    n_threads = int(os.environ["OMP_NUM_THREADS"])
    if torch is not None and torch.get_num_threads() != n_threads:
        torch.set_num_threads(n_threads)


_n_modules = len(sys.modules)


@pytest.fixture(scope="session", autouse=True)
def learn_costs() -> Iterator[Callable[..., None]]:
    """Rows cost what AVX-512 states: neither a busy machine nor its processor decides a test."""
    from kukri.engine.row_costs import RowCosts
    from kukri.kernels import cpu

    learn = RowCosts.observe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_ROW_COSTS", cpu._WIDE_ROW_COSTS)
        patch.setattr(RowCosts, "observe", lambda *_: None)
        yield learn


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct Q4_1 file: $KUKRI_TEST_MODEL, or the cached one, downloaded once."""
    from kukri.formats import hub

    return hub.resolve(os.environ.get("KUKRI_TEST_MODEL"))


@pytest.fixture(scope="session")
def compiled_kernels(smollm2_path: Path) -> None:
    """The default model's kernels are in the cache, so no process says on stderr that it compiles."""
    for temperature in ("0", "1"):
        command = [sys.executable, "-m", "kukri", "run", "Hi", "-n", "2", "-t", temperature, "--top-p", "0.9"]
        subprocess.run([*command, "-m", str(smollm2_path)], stdin=subprocess.DEVNULL, capture_output=True)
    from kukri.kernels.cpu.compile.jit import KernelLibrary

    KernelLibrary().load(["attend_masked[64]", "panel_q8"])  # for a forward with a mask


@pytest.fixture(scope="module")
def default_model(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Who names no model gets the tests' real one: $KUKRI_TEST_MODEL may lie outside of the user's cache."""
    from kukri.formats import hub
    from kukri.kernels.cpu.compile.kernel_cache import cache_root

    usual, compiled = hub.MODELS[hub.DEFAULT_MODEL].path, cache_root()
    if usual.exists():
        yield
        return
    cache = tmp_path_factory.mktemp("cache")
    (cache / "models").mkdir()
    (cache / "models" / usual.name).symlink_to(smollm2_path)
    compiled.mkdir(parents=True, exist_ok=True)
    (cache / "jit").symlink_to(compiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUKRI_CACHE_DIR", str(cache))
        yield


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own, for it and its subprocesses. Compiled kernels would land here too."""
    path = tmp_path / "cache"
    monkeypatch.setenv("KUKRI_CACHE_DIR", str(path))
    return path


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random numbers, small enough for the reference backend."""
    from tests.tiny_gguf import write_tiny

    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def slow(tiny_path: Path) -> Iterator[LLM]:
    """A model whose steps take a millisecond and more, so that calls meet in them."""
    from kukri import LLM

    with LLM(tiny_path, backend="reference", speculation="off") as made:
        yield made


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A backend of each kind, for the tests of a file."""
    from kukri.kernels import make_backend

    made = make_backend(request.param)
    yield made
    if request.param == "cpu":
        made.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def reference() -> Backend:
    from kukri.kernels import make_backend

    return make_backend("reference")


@pytest.fixture
def edited_copy(tmp_path: Path) -> Callable[..., Path]:
    """Copies a saved model, its tensors changed by a function, and keys of its config.json."""

    from safetensors.numpy import load_file, save_file

    def edited_copy(saved: Path, change: Callable[[dict[str, Any]], None], keys: dict[str, Any]) -> Path:
        copy = Path(shutil.copytree(saved, tmp_path / "copy"))
        tensors = load_file(copy / "model.safetensors")
        change(tensors)
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, **keys}))
        return copy

    return edited_copy
