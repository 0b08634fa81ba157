"""Who compiles which kernel, where several processes want the same ones."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kukri.errors import ConfigError
from kukri.kernels.cpu.compile import compiling, kernel_cache
from tests import processor_time
from tests.test_architecture import PACKAGE, imported_modules, imported_names

CODE = ("symbol", ("a",), b"code")
MODULE = "codegen.linear"


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory for kernels, which helpers use too."""
    monkeypatch.setenv("KUKRI_CACHE_DIR", str(tmp_path))
    kernel_cache.cache_dir.cache_clear()
    monkeypatch.setattr(compiling, "_SOON", ())
    monkeypatch.setattr(compiling, "_MOST_HELPERS", 3)
    monkeypatch.setattr(compiling, "_helpers", [])  # those of other tests may be at work still
    yield kernel_cache.cache_dir()
    kernel_cache.cache_dir.cache_clear()


def ended(is_true: Callable[[], bool], seconds: float = 300.0) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_true()


def test_what_another_process_compiles_is_waited_for(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two processes that compile the same kernel, and one that waits while there is more to do."""
    compiled: list[str] = []
    monkeypatch.setattr(compiling, "_compile_and_store", lambda name: compiled.append(name) or CODE)
    kernels.mkdir(parents=True)
    come: list[tuple[str, kernel_cache.KernelCode]] = []
    with (kernels / "a.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ours = threading.Thread(target=lambda: come.extend(compiling.compile_kernels(["a", "b", "c"])))
        ours.start()
        assert ended(lambda: compiled == ["b", "c"])
        kernel_cache.store("a", MODULE, ("theirs", ("x",), b"their code"))
        ours.join(0.2)
        assert ours.is_alive()
    ours.join(20)
    assert [name for name, _ in come] == ["b", "c", "a"]
    assert come[-1][1] == ("theirs", ("x",), b"their code")
    assert compiled == ["b", "c"]


def test_a_process_that_ended_amid_its_work_is_not_waited_for(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches locks that outlive who held them."""
    monkeypatch.setattr(compiling, "_compile_and_store", lambda name: CODE)
    kernels.mkdir(parents=True)
    (kernels / "a.lock").touch()
    assert list(compiling.compile_kernels(["a"])) == [("a", CODE)]


def test_a_directory_that_cannot_be_written_costs_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a start that fails where there is no home directory to write to."""
    (tmp_path / "file").touch()
    for module in (compiling, kernel_cache):
        monkeypatch.setattr(module, "cache_dir", lambda: tmp_path / "file" / "jit")
    monkeypatch.setattr(compiling, "_compile_and_store", lambda name: CODE)
    assert list(compiling.compile_kernels(["a", "b"])) == [("a", CODE), ("b", CODE)]


@pytest.mark.full
def test_helpers_compile_and_import_nothing_from_the_working_directory(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches helpers that fail unnoticed, and code run because somebody left a file in a directory."""
    for name in ("kukri", "numba", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'trap')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    compiling._start_helpers(["gather_rows", "pack"])
    assert compiling._helpers
    assert ended(lambda: all(helper.poll() is not None for helper in compiling._helpers))
    assert all(helper.returncode == 0 for helper in compiling._helpers)
    assert kernel_cache.cached_names() == ["gather_rows", "pack"]
    assert not (tmp_path / "trap").exists()


def test_no_helpers_are_started_by_another_program(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an application with Python inside that starts copies of itself."""
    monkeypatch.setattr(sys, "executable", "/usr/bin/editor")
    compiling._start_helpers(["gather_rows", "pack"])
    assert compiling._helpers == []


def test_a_helper_ends_with_the_process_it_helps(kernels: Path) -> None:
    """Catches processes that continue for nobody after Ctrl-C."""
    program = "from kukri.kernels.cpu.compile.compiling import help_compiling; help_compiling()"
    helper = subprocess.Popen([sys.executable, "-P", "-c", program, "choose_tokens"], stdin=subprocess.PIPE)
    assert ended(lambda: (kernels / "choose_tokens.lock").exists())
    assert helper.stdin is not None
    helper.stdin.close()
    assert helper.wait(timeout=30) == 1
    assert not list(kernels.glob("*.kernel"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda file: file.chmod(0o660), "kernel.* must not be writable by other users"),
        (lambda file: file.parent.chmod(0o777), "must not be writable by other users"),
        (lambda file: os.chown(file, 12345, -1), "must not belong to another user"),
        (lambda file: os.chown(file.parent, 12345, -1), "must not belong to another user"),
        (lambda file: file.rename(file.parent / "b") and file.symlink_to(file.parent / "b"), None),
    ],
    ids=["file mode", "directory mode", "file owner", "directory owner", "link"],
)
def test_machine_code_that_others_could_write_is_not_loaded(
    kernels: Path, spoil: Callable[[Path], object], reason: str | None
) -> None:
    """Catches object code of another user that runs because of where it lies."""
    kernel_cache.store("a", MODULE, CODE)
    assert kernel_cache.read_cached("a") == CODE
    assert kernels.stat().st_mode & 0o777 == 0o700
    try:
        spoil(next(kernels.glob("a@*.kernel")))
    except PermissionError:
        pytest.skip("only root gives files away")
    if reason is None:
        assert kernel_cache.read_cached("a") is None
        return
    with pytest.raises(ConfigError, match=reason):
        kernel_cache.read_cached("a")


def test_an_edit_compiles_what_is_made_of_the_edited_file_and_nothing_else(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a stale kernel that runs, and attention that is compiled again for a comment elsewhere."""
    for module in kernel_cache.KERNEL_MODULES:
        kernel_cache.store(module, module, CODE)
    read = kernel_cache._read

    def left_after_an_edit_of(file: str) -> set[str]:
        monkeypatch.setattr(
            kernel_cache, "_read", lambda name: read(name) + b"# edited" * name.endswith(file)
        )
        for one in (kernel_cache._digest, kernel_cache.module_hashes):
            one.cache_clear()
        return set(kernel_cache.KERNEL_MODULES) - set(kernel_cache.cached_names())

    try:
        edited = left_after_an_edit_of("kernels/cpu/codegen/elementwise.py")
        assert edited == {"codegen.elementwise", "codegen.experts"}
        assert left_after_an_edit_of("kernels/cpu/plan/record.py") == set()
        assert left_after_an_edit_of("kernels/cpu/compile/intrinsics.py") == set(kernel_cache.KERNEL_MODULES)
        assert "codegen.linear" in left_after_an_edit_of("quant/types/q4_k.py")
        assert "run.threads" not in left_after_an_edit_of("quant/types/q4_k.py")
        assert left_after_an_edit_of("no such file") == set()
    finally:
        for one in (kernel_cache._digest, kernel_cache.module_hashes):
            one.cache_clear()


@pytest.mark.full
def test_a_kernel_is_made_of_all_that_its_module_imports() -> None:
    """Catches a form of import that the search for sources does not see, by Python's own parser."""
    files = {str(path.relative_to(PACKAGE.parent)): path for path in PACKAGE.rglob("*.py")}
    names = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
        for name in files
        if name.startswith(("kukri/kernels/", "kukri/quant/"))
    }
    for module in kernel_cache.KERNEL_MODULES:
        found = kernel_cache.sources_of(f"kukri.kernels.cpu.{module}")
        imported = {
            names[one]
            for name in found
            for one in imported_modules(imported_names(files[name].read_text(), ""), set(names))
        }
        assert imported <= set(found), module


@pytest.mark.full
def test_nothing_outside_of_the_kernels_sources_becomes_machine_code() -> None:
    """Catches a constant that sizes a stack buffer and may change without the kernel being compiled again."""
    no_code = ("kukri.errors.", "kukri.dataclass.", "kukri.host.", "kukri.config.KVType")
    for module in kernel_cache.KERNEL_MODULES:
        for name in kernel_cache.sources_of(f"kukri.kernels.cpu.{module}"):
            imported = imported_names((PACKAGE.parent / name).read_text(), "")
            outside = {one for one in imported if one.startswith("kukri.")}
            outside = {one for one in outside if not one.startswith(("kukri.kernels.", "kukri.quant."))}
            assert all(one.startswith(no_code) for one in outside), f"{name} imports {sorted(outside)}"


def test_a_routine_has_the_same_code_whoever_is_compiled_first():
    """Catches results that depend on the order of kernels: Numba hands a caller's flags down to functions."""
    from kukri.kernels.cpu.compile.intrinsics import device, part, reordered, routine

    for mark in (device, routine, part):

        @mark
        def fused(a, b, c):
            return a * b - c

        @reordered
        def caller(a):
            return fused(a, a, a)

        caller.compile("float32(float32)")
        fused.compile("float32(float32, float32, float32)")
        (code,) = fused.inspect_llvm().values()
        assert "fmul" in code, mark.__name__
        assert "contract" not in code, mark.__name__


def test_every_kernel_of_the_first_tier_exists():
    """Catches a kernel that was renamed: a run of the first tier would end before its first test."""
    for name in processor_time.first_tier_kernels():
        compiling.find_source(name)
