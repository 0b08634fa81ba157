"""Writes the lists of fields.md and endpoints.md in docs/reference from the server's endpoints and bodies.

`python packaging/field_reference.py`; tests/test_docs_site.py fails while a page is not what this writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kukri.server.answers.embeddings import EmbeddingBody
from kukri.server.anthropic.schema import MessagesBody
from kukri.server.app import APIS, create_app
from kukri.server.body import Body
from kukri.server.llama_cpp.schema import LlamaBody
from kukri.server.ollama.schema import OllamaChatBody, OllamaGenerateBody, Options
from kukri.server.openai.responses_schema import ResponseBody
from kukri.server.schema import ChatBody, CompletionBody
from kukri.server.settings import ServerSettings
from kukri.server.state.openapi import document_of

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
FIELDS = ("<!-- fields -->\n", "<!-- end of fields -->\n")
ENDPOINTS = ("<!-- endpoints -->\n", "<!-- end of endpoints -->\n")
_MANY = 4  # fields that are named by the API or the endpoint that takes them
BODIES: Mapping[str, type[Body]] = {
    "chat": ChatBody,
    "compl.": CompletionBody,
    "resp.": ResponseBody,
    "mess.": MessagesBody,
    "Ollama chat": OllamaChatBody,
    "generate": OllamaGenerateBody,
    "llama.cpp": LlamaBody,
    "embed.": EmbeddingBody,
}


def fates(body: type[Body]) -> dict[str, str]:
    """Return what becomes of each field that a body knows: applied, also as another, ignored or refused."""
    found = dict.fromkeys(body.ignored, "ignored")
    found |= {name: f"as `{alias.field}`" for name, alias in body.aliases.items() if name != alias.field}
    found |= dict.fromkeys(body._names(), "applied") | dict.fromkeys(body.unused, "ignored")
    found |= dict.fromkeys(body.refused, "refused")
    if "options" in body.model_fields:
        found |= {f"options.{name}": fate for name, fate in fates(Options).items()}
    return found


def field_list() -> str:
    """Return the fields with what each API makes of them, a line for all that fare alike."""
    by_api = {api: fates(body) for api, body in BODIES.items()}
    lines: dict[str, list[str]] = {}
    for name in sorted({name for fated in by_api.values() for name in fated}):
        apis: dict[str, list[str]] = {"applied": [], "ignored": [], "refused": []}
        for api, fated in by_api.items():
            if name in fated:
                apis.setdefault(fated[name], []).append(api)
        applied, ignored, refused = (", ".join(apis.pop(fate)) for fate in ("applied", "ignored", "refused"))
        parts = [applied, *(f"{', '.join(names)} {fate}" for fate, names in apis.items())]
        parts += [ignored and f"ignored by {ignored}", refused and f"refused by {refused}"]
        lines.setdefault("; ".join(filter(None, parts)), []).append(f"`{name}`")
    return "".join(f"- {', '.join(names)}: {fate}\n" for fate, names in lines.items())


def endpoint_lists() -> str:
    """Return all endpoints by their APIs, with what each does, its scope, and the fields that it takes."""
    document = document_of(create_app(None, ServerSettings()), APIS)
    known = {f"all of {api}": body._names() for api, body in BODIES.items()}
    lines = []
    for api in APIS:
        lines.append(f"## {api.name.replace('server', 'Server')}\n")
        for row in (row for row in api.endpoints if row.summary):
            operation = document["paths"][row.shown_path][row.method.lower()]
            paths = ", ".join(f"`{path}`" for path in (row.shown_path, *row.also))
            names = _fields_of(operation, document)
            scope = "" if row.permission is None else f"scope `{row.permission.scope}`"
            facts = "; ".join(filter(None, (scope, _shown(names, known))))
            known.setdefault(f"as `{row.shown_path}`", set(names))
            lines.append(f"- {row.method} {paths}: {row.summary}{facts and f' ({facts})'}")
        lines.append("")
    return "\n".join(lines)


def _fields_of(operation: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    """The fields of a body and of a query, without `model`."""
    content = next(iter(operation.get("requestBody", {}).get("content", {}).values()), {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    fields = document["components"]["schemas"][name].get("properties", {}) if name else ()
    queries = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
    return [field for field in (*fields, *queries) if field != "model"]


def _shown(names: list[str], known: Mapping[str, set[str]]) -> str:
    """The fields of an endpoint; for many that an API or an endpoint before takes, the name of that one."""
    parts = {part: found - {"model"} for part, found in known.items()}
    fits = [part for part, found in parts.items() if len(found) >= _MANY and found <= set(names)]
    part = max(fits, key=lambda one: len(parts[one]), default="")
    own = (f"`{name}`" for name in names if name not in parts.get(part, ()))
    return ", ".join(filter(None, (part, *own)))


def _marked(page: str, marks: tuple[str, str], text: str) -> str:
    """The page with another text between two marks."""
    before, marked = page.split(marks[0])
    return before + marks[0] + text + marks[1] + marked.split(marks[1])[1]


PAGES: Mapping[str, Callable[[str], str]] = {
    "fields.md": lambda page: _marked(page, FIELDS, field_list()),
    "endpoints.md": lambda page: _marked(page, ENDPOINTS, endpoint_lists()),
}


if __name__ == "__main__":
    for name, rewritten in PAGES.items():
        page = REFERENCE / name
        page.write_text(rewritten(page.read_text("utf-8")), encoding="utf-8")
