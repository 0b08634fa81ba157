"""Hooks of the documentation's site (mkdocs.yml): pages from outside docs/, API reference, source links."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
}
MODULES = {  # next to the names of `kukri` itself
    "Errors": ["kukri.errors"],
    "Interpretability": [
        f"kukri.interp.{name}"
        for name in (
            "interventions.intervention",
            "features.control_vectors",
            "cache",
            "patching",
            "gradients.attribution",
            "store",
            "plots.figures",
        )
    ],
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]`]|`[^`\n]*`)*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not below docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_relinked(text, ROOT, config)))
    files.append(File.generated(config, "api.md", content=_api_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links to sources into links to the repository, or text if it has no address."""
    if page.file.src_uri in (*PAGES.values(), "api.md"):
        return markdown
    return _relinked(_plain_pipes(markdown), (ROOT / "docs" / page.file.src_uri).parent, config)


def _plain_pipes(markdown: str) -> str:
    """Takes the backslash from pipes in code: a table needs it on GitHub, and here it would be shown."""
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), markdown)


def _relinked(markdown: str, folder: Path, config: Any) -> str:
    """The text of a page in a folder, with links that hold on the site."""
    docs = ROOT / "docs"
    place = docs if folder == ROOT else folder

    def relinked(match: re.Match[str]) -> str:
        is_image, text, target = match.groups()
        path, _, anchor = target.partition("#")
        file = (folder / path).resolve()
        if file.is_relative_to(docs):
            return f"{is_image}[{text}]({os.path.relpath(file, place)}{'#' + anchor if anchor else ''})"
        inside = str(file.relative_to(ROOT))
        if inside in PAGES:
            return f"[{text}]({os.path.relpath(docs / PAGES[inside], place)})"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{inside})"
        return text

    return _LINK.sub(relinked, markdown)


def _api_page() -> str:
    """The API reference: every public name, by mkdocstrings."""
    source = ast.parse((ROOT / "kukri" / "__init__.py").read_text(encoding="utf-8"))
    assigned = [node for node in source.body if isinstance(node, ast.Assign)]
    (homes,) = (node.value for node in assigned if ast.unparse(node.targets[0]) == "_HOMES")
    names = [f"kukri.{name}" for name in sorted(ast.literal_eval(homes))]
    parts = ["# Python API", "`from kukri import …`", *(f"::: {name}" for name in names)]
    for title, modules in MODULES.items():
        parts += [f"## {title}", *(f"::: {module}\n    options: {{heading_level: 3}}" for module in modules)]
    return "\n\n".join(parts) + "\n"
