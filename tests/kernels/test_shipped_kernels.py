"""Compiled kernels that come with kukri: which are used, and what is said if none can be."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kukri.errors import ConfigError, MissingKernelError
from kukri.kernels.cpu.compile import compiling, features, jit, kernel_cache, shipped_kernels
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.jit import KernelLibrary
from kukri.kernels.cpu.compile.kernel_cache import read_cached
from kukri.kernels.cpu.compile.levels import LEVELS, best_level
from kukri.kernels.cpu.compile.shipped_kernels import ShippedKernels, read_shipped, write_shipped

CODE = ("symbol", ("a", "b"), b"object code " * 50)
MODULE = "codegen.linear"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of compiled kernels for this processor, in an empty directory; the cache is empty too."""
    if cpu_target().level is None:
        pytest.skip("no compiled kernels come for this processor")
    monkeypatch.setenv("KUKRI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(shipped_kernels, "SHIPPED_DIR", tmp_path)
    for one in (kernel_cache.cache_dir, shipped_kernels.shipped_for_cpu):
        one.cache_clear()
    yield tmp_path / f"{cpu_target().level}.kernels"
    for one in (kernel_cache.cache_dir, shipped_kernels.shipped_for_cpu):
        one.cache_clear()


def test_what_is_written_is_read(shipped: Path) -> None:
    """Catches offsets that are off by one, and code that is not decompressed."""
    others = ("s", (), b"x" * 7), ("t", ("c",), bytes(range(256)))
    write_shipped(shipped, {"b": (MODULE, CODE), "a": (MODULE, others[0]), "c": ("run.threads", others[1])})
    assert read_shipped("b") == CODE
    assert (read_shipped("a"), read_shipped("c")) == others
    assert read_shipped("d") is None
    assert ShippedKernels(shipped).names == ("a", "b", "c")


@pytest.mark.parametrize("place", [0, 70, -1])
def test_damaged_files_are_not_used(shipped: Path, place: int) -> None:
    """Catches code that runs though it is not what was compiled: digest, header and code in turn."""
    write_shipped(shipped, {"a": (MODULE, CODE)})
    data = bytearray(shipped.read_bytes())
    data[place] ^= 1
    shipped.write_bytes(data)
    assert read_shipped("a") is None
    assert "damaged" in shipped_kernels.reason_for_compiling()


def test_whoever_edits_a_kernel_compiles_it(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches machine code that runs in place of the sources next to it."""
    write_shipped(shipped, {"a": (MODULE, CODE), "b": ("run.threads", CODE)})
    edited = {**kernel_cache.module_hashes(), MODULE: "of other sources"}
    monkeypatch.setattr(shipped_kernels, "module_hashes", lambda: edited)
    assert read_shipped("a") is None
    assert read_shipped("b") == CODE
    assert "of other sources" in shipped_kernels.reason_for_compiling()


def test_kernels_run_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches kernels that are compiled though they came with kukri, and an error that does not help."""
    KernelLibrary().load(["gather_rows"])
    compiled = read_cached("gather_rows")
    assert compiled is not None
    monkeypatch.setattr(jit, "read_shipped", {"gather_rows": compiled}.get)
    monkeypatch.setattr(jit, "read_cached", lambda name: None)
    monkeypatch.setattr(compiling, "has_compiler", lambda: False)
    library = KernelLibrary()
    assert library["gather_rows"].parameters == compiled[1]
    with pytest.raises(MissingKernelError, match=r"kernel pack .*run `pip install .*`, which adds Numba"):
        library.load(["gather_rows", "pack"])


def test_a_level_is_what_its_processors_are_taken_for() -> None:
    """Catches kernels of one lowering on weights that were laid out for another."""
    for level in LEVELS:
        listed = dict.fromkeys(level.needs, True)
        assert best_level(listed) == level
        assert features._lowering_of_features(listed) == level.lowering
        assert bool(listed.get("f16c")) == level.has_half
        assert bool(listed.get("avx512vbmi")) == level.has_byte_permute
    assert best_level({"avx2", "fma", "f16c"}).name == "generic"  # a virtual machine that hides bmi2
    zen4 = LEVELS[0].needs
    assert best_level(zen4 | {"avxvnni"}).name == "avx512vbmi"  # Zen 5
    assert best_level(zen4 - {"sse4a"}).name == "avx512vbmi"  # Ice Lake
    assert best_level(zen4 | {"avxvnni", "avx512fp16"}).name == "avx512vbmi"  # AMD's, if they get it


def test_levels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a choice that is not obeyed, and a misspelt one that is ignored."""
    target = cpu_target.__wrapped__
    monkeypatch.setenv("KUKRI_CPU", "generic")
    assert (target().lowering, target().has_half, target().level) == ("generic", False, "generic")
    monkeypatch.setenv("KUKRI_CPU", "avx3")
    with pytest.raises(ConfigError, match=r"zen4, sapphirerapids, avx512vbmi, .+, not avx3"):
        target()


def test_the_target_without_numba_is_one_that_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches weights laid out for kernels that nobody compiles."""
    if not features.has_levels():
        pytest.skip("no compiled kernels come for this processor")
    monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)
    monkeypatch.setattr(features, "has_compiler", lambda: False)
    found = cpu_target.__wrapped__()
    assert found.level == features.host_level().name
    assert found.name


def test_a_wheel_has_the_kernels_of_the_default_model() -> None:
    """Catches a kernel that is renamed, or a family that gets another argument, and so is not compiled."""
    wheel = runpy.run_path(str(Path(__file__).parents[2] / "packaging" / "wheel_kernels.py"))
    listed = wheel["wheel_kernel_names"]()
    names = set(listed)
    assert {"run_plan", "choose_tokens", "linear_Q4_1", "attend_f16[3,64]", "attend_finish"} <= names
    assert len(names) == len(listed)
    assert all(compiling.find_source(name)[1].name == name for name in names)


_WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import pkgutil, importlib
sources = sys.argv[1].split()
for package in ("kukri.kernels.cpu", "kukri.engine", "kukri.formats", "kukri.evaluate", "kukri.interp"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if module.name.removeprefix("kukri.kernels.cpu.") not in sources:
            importlib.import_module(module.name)
import kukri.llm, kukri.cli, kukri.terminal.doctor
from kukri.host.hardware import cpu_features
cpu_features()
"""


@pytest.mark.full
def test_nothing_but_kernels_imports_numba() -> None:
    """Catches an import by which a program without Numba ends."""
    made_of = (
        "compile.intrinsics",
        "run.atomics",
        "compile.simd",
        "codegen.dots",
        "codegen.tile_folds",
        "codegen.tile_products",
        "codegen.tiles",
        "codegen.unpack",
        "pack.block_numbers",
        "codegen.blocks",
        "codegen.super_blocks",
        "codegen.group_dots",
        "codegen.candidates",
        "codegen.head_rotation",
        "codegen.kv_types",
        "codegen.attention_rows",
        "codegen.prompt_attention",
        "codegen.int8_attention",
        "pack.scale_search",
    )
    command = [sys.executable, "-c", _WITHOUT, " ".join([*kernel_cache.KERNEL_MODULES, *made_of])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_levels_are_named_in_the_documentation(request: pytest.FixtureRequest) -> None:
    """Catches a level that the documentation has not heard of."""
    text = (request.config.rootpath / "docs" / "install.md").read_text()
    assert [level.name for level in LEVELS if f"`{level.name}`" not in text] == []
