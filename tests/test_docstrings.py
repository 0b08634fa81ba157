"""Public methods have docstrings, their own or inherited ones: ruff's D102 knows the former alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import kukri

PACKAGE = Path(kukri.__file__).parent
Class = tuple[ast.ClassDef, ast.Module]


@cache
def module(name: str) -> ast.Module | None:
    """The tree of a module of kukri; None of another package, or of a name that is no module."""
    path = PACKAGE.parent / name.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if name.split(".")[0] == "kukri" and file.exists():
            return ast.parse(file.read_text())
    return None


def found(name: str, tree: ast.Module) -> Iterator[Class]:
    """The class that a name stands for in a module, which may import it."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield node, tree
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name and (source := module(node.module or "")):
                    yield from found(alias.name, source)


def bases(one: Class) -> Iterator[Class]:
    """The class's bases in kukri, and theirs."""
    node, tree = one
    for base in node.bases:
        root = base.value if isinstance(base, ast.Subscript) else base  # Generic[T]
        if isinstance(root, ast.Name):
            for each in found(root.id, tree):
                yield each
                yield from bases(each)


def describes(node: ast.ClassDef, name: str) -> bool:
    """True if a class has a docstring for the name, or declares it as a field."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            if each.name == name and ast.get_docstring(each):
                return True
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id == name:
            return True
    return False


def undescribed(node: ast.ClassDef, tree: ast.Module) -> Iterator[str]:
    for each in node.body:
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) or each.name.startswith("_"):
            continue
        if any(isinstance(mark, ast.Attribute) and mark.attr == "setter" for mark in each.decorator_list):
            continue
        if [ast.unparse(line) for line in each.body] == ["..."]:  # an overload, or a field of a protocol
            continue
        if not any(describes(one, each.name) for one, _ in ((node, tree), *bases((node, tree)))):
            yield each.name


def test_every_public_method_is_described() -> None:
    """Catches a method without a docstring that no class above it describes either."""
    missing = [
        f"{path.relative_to(PACKAGE.parent)}: {node.name}.{name}"
        for path in PACKAGE.rglob("*.py")
        for tree in [module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))]
        if tree is not None
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for name in undescribed(node, tree)
    ]
    assert not missing, "\n".join(missing)


def test_a_docstring_is_inherited() -> None:
    """Catches a search that ends at the first class, or finds what is not there."""
    tree = ast.parse(
        "from kukri.kernels.op_set import StageOps as Theirs\n"
        "class One(Theirs):\n def add(self): pass\n def other(self): pass\n"
    )
    node = tree.body[1]
    assert isinstance(node, ast.ClassDef)
    assert [*undescribed(node, tree)] == ["other"]
