"""The shape of the package: who may import whom, what `import kukri` costs, which names are banned."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import kukri

PACKAGE = Path(kukri.__file__).parent

# Each part may import itself and these; `__init__` is the face of the package and imports lazily.
LAYERS = (
    *("errors", "machine", "config", "mapped_files", "quant", "kernels"),
    *("models", "formats", "engine", "tasks", "answer", "loading", "llm"),
)
ALLOWED: dict[str, set[str]] = {layer: set(LAYERS[:i]) for i, layer in enumerate(LAYERS)}
ALLOWED["tokenizer"] = {"errors", "formats"}
ALLOWED["sampling"] = {"errors", "kernels"}
ALLOWED["tasks"] = ALLOWED["engine"] | {"tokenizer"}
ALLOWED["engine"] |= {"sampling", "tokenizer"}
for part in ("answer", "loading", "llm"):
    ALLOWED[part] |= {"sampling", "tokenizer"}
BELOW_THE_FACES = {*LAYERS, "tokenizer", "sampling", "__init__"}
ALLOWED["evaluate"] = BELOW_THE_FACES
ALLOWED["bench"] = BELOW_THE_FACES | {"evaluate"}
ALLOWED["server"] = BELOW_THE_FACES
ALLOWED["terminal"] = BELOW_THE_FACES | {"evaluate", "bench", "server"}
ALLOWED["llm_plugin"] = BELOW_THE_FACES | {"terminal"}
ALLOWED["cli"] = BELOW_THE_FACES | {"bench", "terminal"}
ALLOWED["__main__"] = {"cli"}
ALLOWED["__init__"] = {*LAYERS, "tokenizer", "sampling"}

BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}


def module_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_parts(source: str, module: str) -> set[str]:
    """Parts of kukri that a module's source imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = module.split(".")[: -node.level] if node.level else []
            parent = ".".join([*start, *([node.module] if node.module else [])])
            names = [f"{parent}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "kukri":
                is_part = len(parts) > 1 and parts[1] in ALLOWED
                found.add(parts[1] if is_part else "__init__")
    return found


def test_the_parser_sees_every_kind_of_import():
    """Catches a test that passes because it finds no imports at all."""
    source = """
import kukri.engine.pages
from kukri import errors, __version__
from ..models import llama
def f():
    from kukri.server.app import serve
"""
    assert imported_parts(source, "kukri.formats.hub") == {
        "engine",
        "errors",
        "__init__",
        "models",
        "server",
    }


@pytest.mark.parametrize("file", module_files(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file):
    """Catches a kernel that knows the engine, a model that knows the engine, anything that knows a face."""
    part = part_of(file)
    assert part in ALLOWED, (
        f"{part} has no place in the order of layers: give it one here and in docs/design.md"
    )
    module = ".".join(["kukri", *file.relative_to(PACKAGE).with_suffix("").parts])
    upward = imported_parts(file.read_text(encoding="utf-8"), module) - {part} - ALLOWED[part]
    assert not upward, f"{module} imports {sorted(upward)}, which {part} must not know"


def test_every_test_file_has_a_name_of_its_own():
    """Test files are modules without a package: two of one name cannot both be collected."""
    names = Counter(file.name for file in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, n in names.items() if n > 1] == []


def test_no_module_has_an_empty_name():
    """Catches a drawer where things without a home gather."""
    names = {file.stem for file in module_files()} | {
        path.name for path in PACKAGE.rglob("*") if path.is_dir()
    }
    assert not names & BANNED_NAMES


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        (
            "import kukri",
            {"numpy", "numba", "llvmlite", "torch", "triton", "transformers", "fastapi", "typer", "rich"},
        ),
        (
            "import kukri.cli",
            {"numpy", "numba", "torch", "rich", "tokenizers", "jinja2", "fastapi", "pydantic", "kukri.llm"},
        ),
        ("import kukri.llm", {"torch", "triton", "transformers", "fastapi", "numba", "rich", "typer"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_imports_stay_light(statement, unwanted):
    """Catches an import at module level that every start would pay for."""
    script = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not unwanted & set(done.stdout.split())
