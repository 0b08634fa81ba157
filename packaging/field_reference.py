"""Writes the table of fields in docs/reference/endpoints.md from the bodies that the server reads.

`python packaging/field_reference.py`; tests/test_docs_site.py fails while the page is not what this writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kukri.server.anthropic.schema import MessagesBody
from kukri.server.body import Body
from kukri.server.llama_cpp.schema import LlamaBody
from kukri.server.ollama.schema import OllamaChatBody, OllamaGenerateBody, Options
from kukri.server.openai.embeddings import EmbeddingBody
from kukri.server.openai.responses_schema import ResponseBody
from kukri.server.schema import ChatBody, CompletionBody

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "endpoints.md"
MARKS = ("<!-- fields -->\n", "<!-- end of fields -->\n")
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
    """Return what becomes of each field that a body knows: applied, ignored, refused or `= another name`."""
    found = dict.fromkeys(body.ignored, "ignored") | dict.fromkeys(body.refused, "refused")
    found |= {name: f"= `{alias.field}`" for name, alias in body.aliases.items() if name != alias.field}
    found |= dict.fromkeys(body._names(), "applied")
    if "options" in body.model_fields:
        found |= {f"options.{name}": fate for name, fate in fates(Options).items()}
    return found


def refusals(body: type[Body]) -> dict[str, str]:
    """Return the reason of each field that a body refuses."""
    found = {name: reason for name, (_, reason) in body.refused.items() if name not in body._names()}
    if "options" in body.model_fields:
        found |= {f"options.{name}": reason for name, reason in refusals(Options).items()}
    return found


def field_table() -> str:
    """Return the table, a row for all fields that fare alike, and the reasons of refusals."""
    by_body = [fates(body) for body in BODIES.values()]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in sorted({name for fated in by_body for name in fated}):
        rows.setdefault(tuple(fated.get(name, "") for fated in by_body), []).append(f"`{name}`")
    lines = [f"| fields | {' | '.join(BODIES)} |", "| --- " * (1 + len(BODIES)) + "|"]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    reasons: dict[tuple[str, str], list[str]] = {}
    for where, body in BODIES.items():
        for name, reason in refusals(body).items():
            reasons.setdefault((name, reason), []).append(where)
    lines += ["", "| refused | at | because |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {', '.join(where)} | {why} |" for (name, why), where in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def endpoints_page(page: str) -> str:
    """Return the page with its table of fields as the bodies declare them."""
    before, marked = page.split(MARKS[0])
    return before + MARKS[0] + field_table() + MARKS[1] + marked.split(MARKS[1])[1]


if __name__ == "__main__":
    PAGE.write_text(endpoints_page(PAGE.read_text("utf-8")), encoding="utf-8")
