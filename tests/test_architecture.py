"""The shape of the package: who may import whom, what `import kukri` costs, which names are banned."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import pytest

import kukri

PACKAGE = Path(kukri.__file__).parent

# Each part may import itself and these; `__init__` is the face of the package and imports lazily.
LAYERS = (
    *("dataclass", "errors", "host", "config", "quant", "kernels"),
    *("models", "vision", "sound", "formats", "engine", "tasks", "late_interaction", "stages"),
    *("opening", "interp"),
    *("calls", "llm", "async_llm"),
)
ALLOWED: dict[str, set[str]] = {layer: set(LAYERS[:i]) for i, layer in enumerate(LAYERS)}
ALLOWED["tokenizer"] = {"dataclass", "errors", "formats", "host"}
ALLOWED["sampling"] = {"config", "dataclass", "errors", "host", "kernels"}
ALLOWED["dialects"] = {"dataclass", "errors", "sampling", "tokenizer"}
ALLOWED["tasks"] |= {"tokenizer"}
ALLOWED["engine"] |= {"sampling", "tokenizer"}
for part in ("opening", "calls", "llm", "async_llm"):
    ALLOWED[part] |= {"sampling", "tokenizer", "dialects"}
BELOW_THE_FACES = {*LAYERS, "tokenizer", "sampling", "dialects", "__init__"}
ALLOWED["evaluate"] = BELOW_THE_FACES
ALLOWED["bench"] = BELOW_THE_FACES | {"evaluate"}
ALLOWED["server"] = BELOW_THE_FACES
ALLOWED["scale"] = BELOW_THE_FACES | {"server"}
ALLOWED["terminal"] = BELOW_THE_FACES | {"evaluate", "bench", "server", "scale"}
ALLOWED["llm_plugin"] = BELOW_THE_FACES | {"terminal"}
ALLOWED["cli"] = BELOW_THE_FACES | {"bench", "terminal"}
ALLOWED["__main__"] = {"cli"}
ALLOWED["__init__"] = {*LAYERS, "tokenizer", "sampling"}

OPTIONAL = ("kernels.pytorch", "kernels.gpu", "scale", "stages")  # only their own tests need them
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}


def module_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_names(source: str, module: str) -> set[str]:
    """Full names that a module's source imports, anywhere in it: in functions and for types, too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = module.split(".")[: -node.level] if node.level else []
            parent = ".".join([*start, *([node.module] if node.module else [])])
            found |= {f"{parent}.{alias.name}" for alias in node.names}
    return found


def module_of(file: Path) -> str:
    """The full name of a file of the package."""
    return ".".join(["kukri", *file.relative_to(PACKAGE).with_suffix("").parts])


@cache
def imports_of(file: Path) -> set[str]:
    """Full names that a file of the package imports, which is parsed once for all tests."""
    return imported_names(file.read_text(encoding="utf-8"), module_of(file))


def parts_of(names: set[str]) -> set[str]:
    """Parts of kukri that imported names belong to."""
    found = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == "kukri":
            is_part = len(parts) > 1 and parts[1] in ALLOWED
            found.add(parts[1] if is_part else "__init__")
    return found


def imported_modules(imported: set[str], modules: set[str]) -> set[str]:
    """The modules that hold the imported names, or are named themselves."""
    found = set()
    for name in imported:
        while name not in modules and "." in name:
            name = name.rpartition(".")[0]
        found.add(name)
    return found & modules


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """The nodes that can be reached from themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    return {node for node in graph if node in reached(node)}


def test_the_parser_sees_every_kind_of_import():
    """Catches a test that passes because it finds no imports at all."""
    source = """
import kukri.engine.pages
from kukri import errors, __version__
from ..models import llama
def f():
    from kukri.server.app import serve
"""
    assert parts_of(imported_names(source, "kukri.formats.hub")) == {
        "engine",
        "errors",
        "__init__",
        "models",
        "server",
    }


@pytest.mark.representative(4)
def test_imports_point_down():
    """Catches a kernel that knows the engine, a model that knows the engine, anything that knows a face."""
    faults = []
    for file in module_files():
        part = part_of(file)
        if part not in ALLOWED:
            faults.append(
                f"{part} has no place in the order of layers: give it one here and in docs/design/index.md"
            )
        elif upward := parts_of(imports_of(file)) - {part} - ALLOWED[part]:
            faults.append(f"{module_of(file)} imports {sorted(upward)}, which {part} must not know")
    assert not faults, "\n".join(faults)


def test_every_dataclass_is_made_by_the_light_decorator():
    """Catches a class whose methods the standard library compiles at each start."""
    using = {file.name for file in module_files() if "dataclasses.dataclass" in imports_of(file)}
    assert using == {"dataclass.py"}


def test_circles_are_found():
    """Catches a search that finds no circle at all."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert in_circles(graph) == {"b", "c"}
    assert imported_modules({"kukri.a.f", "kukri.b"}, {"kukri", "kukri.a", "kukri.b"}) == {
        "kukri.a",
        "kukri.b",
    }


@pytest.mark.representative(4)
def test_no_modules_import_each_other():
    """Catches two files that are one in truth: each needs the other to be understood."""
    names = {module_of(file).removesuffix(".__init__"): file for file in module_files()}
    graph = {name: imported_modules(imports_of(file), set(names)) - {name} for name, file in names.items()}
    assert in_circles(graph) == set()


@pytest.mark.representative(4)
def test_no_folders_import_each_other():
    """Catches a folder that needs a neighbour which needs it, though none of their files do."""
    names = {module_of(file).removesuffix(".__init__"): file for file in module_files()}
    graphs: dict[str, dict[str, set[str]]] = {}  # of the files and folders in each folder
    for name, file in names.items():
        for other in imported_modules(imports_of(file), set(names)):
            here, there = name.split("."), other.split(".")
            n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(here, there)))
            if n < min(len(here), len(there)):  # neither is the other's folder
                graph = graphs.setdefault(".".join(here[:n]), {})
                graph.setdefault(here[n], set()).add(there[n])
                graph.setdefault(there[n], set())
    assert {"kukri", "kukri.formats", "kukri.kernels.cpu", "kukri.interp"} <= set(graphs)
    assert {folder: circle for folder, graph in graphs.items() if (circle := in_circles(graph))} == {}


def test_no_import_climbs_between_folders_of_the_server():
    """Catches an API that is a library for others, and a part of all APIs that knows one."""
    server = PACKAGE / "server"
    folders = {one.name for one in server.iterdir() if one.is_dir()}
    shared = ("", "chat", "models", "answers")  # may import what stands before; "" has the files in no folder
    faults = []
    for file in server.rglob("*.py"):
        folder = "" if file.parent == server else file.relative_to(server).parts[0]
        below = set(shared[: shared.index(folder)] if folder in shared else shared)
        for name in imports_of(file):
            there = name.removeprefix("kukri.server.").split(".")[0]
            is_above = name.startswith("kukri.server.") and there in folders - below - {folder}
            if is_above and file != server / "app.py":
                faults.append(f"{module_of(file)} imports {name}")
    assert not faults, "\n".join(faults)


@pytest.mark.representative(4)
def test_nothing_computes_by_the_reference():
    """Catches a request that is served by the definition of correct, which is slow and never measured."""
    oracle = {"kukri.kernels.reference", "kukri.kernels.reference_sampling"}
    # the backend of that name is asked for, and `kukri doctor` compares with it
    may = {"kernels/__init__.py", "kernels/reference.py", "bench/device_checks.py"}
    using = set()
    for file in module_files():
        if imported_modules(imports_of(file), oracle):
            using.add(file.relative_to(PACKAGE).as_posix())
    assert using == may


def test_every_part_has_a_folder_of_tests():
    """Catches tests that are looked for in vain, as they lie with the tests of another part."""
    tests = Path(__file__).parent
    parts = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    assert [part for part in parts if not any((tests / part).rglob("test_*.py"))] == []


def test_no_module_has_an_empty_name():
    """Catches a drawer where things without a home gather."""
    names = {file.stem for file in module_files()} | {
        path.name for path in PACKAGE.rglob("*") if path.is_dir()
    }
    assert not names & BANNED_NAMES


@pytest.mark.parametrize(
    "path",
    [
        "interp.atp_star.atp_star",
        "interp.cache.ActivationCache",  # its pickles name it
        "interp.control_vectors.ControlVector",
        "interp.edges.edge_attribution_patch",
        "interp.gradients.attribution_patch",
        "interp.graph_effects.GraphMeasure",
        "interp.image_gradients.of_answer",
        "interp.interventions.Intervention",
        "interp.plots.heat_map",
        "late_interaction.max_sim",
        "tasks.Span",
    ],
)
def test_users_import_what_moved_as_before(path):
    """Catches a move that breaks an import which the documentation has shown to users."""
    module, _, name = path.rpartition(".")
    assert hasattr(import_module(f"kukri.{module}"), name)


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


@pytest.mark.full
@pytest.mark.usefixtures("compiled_kernels")
def test_gpu_and_cluster_parts_are_optional(smollm2_path):
    """Catches an engine, command line or server that needs a part which most people do not run."""
    script = (
        "import sys\n"
        f"sys.modules |= dict.fromkeys({[f'kukri.{name}' for name in OPTIONAL]})\n"
        "import kukri.cli, kukri.server.app\n"
        "from kukri import LLM\n"
        f"with LLM({str(smollm2_path)!r}) as llm:\n"
        "    print(llm.generate('The capital of France is', max_tokens=1, temperature=0).text)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "Paris", done.stderr
