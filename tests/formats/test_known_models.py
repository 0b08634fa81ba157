"""The list of well-known models: its form, and the page and the command that show it."""

from __future__ import annotations

import re
from pathlib import Path

from kukri.formats.known_models import KNOWN_MODELS, table
from kukri.formats.repos import RepoName, parse_name

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "choose-a-model.md"


def test_each_line_is_a_model_of_the_hub() -> None:
    """Two models of one name, a name that looks like a repository, a file or a path, a typing error."""
    assert len({model.name for model in KNOWN_MODELS}) == len({model.repo for model in KNOWN_MODELS})
    assert len({model.name for model in KNOWN_MODELS}) == len(KNOWN_MODELS) > 40
    for model in KNOWN_MODELS:
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]+", model.name), model
        assert parse_name(model.name) == RepoName(model.repo)
        assert 0.1 < model.n_billion < 100
        assert model.licence in ("apache-2.0", "mit", "gemma", "lfm1.0", "llama3.2", "falcon-llm-license")
        assert model.good_for
        assert "|" not in model.good_for


def test_memory_follows_from_parameters() -> None:
    """A machine that is too small for the weights, or one twice as large as is needed."""
    sizes = {model.name: model.memory_gb for model in KNOWN_MODELS}
    assert sizes["qwen3-0.6b"] == 2
    assert sizes["qwen3-4b"] == 4
    assert sizes["gpt-oss-20b"] == 16
    assert sizes["qwen3.5-35b-a3b"] == 32
    for model in KNOWN_MODELS:
        assert model.memory_gb > (model.download_gb or 0.6 * model.n_billion)


def test_the_page_shows_the_list() -> None:
    """A page that names a model that is gone, lacks a new one, or has it at another memory."""
    names: dict[str, list[str]] = {}
    for memory, name, *_ in table():
        names.setdefault(memory, []).append(f"`{name}`")
    lines = [f"- {one}: {', '.join(of)}" for one, of in names.items()]
    page = PAGE.read_text(encoding="utf-8").splitlines()
    start = page.index(lines[0])
    assert page[start - 1 : start + len(lines) + 1] == ["", *lines, ""]
