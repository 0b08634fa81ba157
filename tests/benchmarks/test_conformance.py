"""The table of client packages: what is right, refused by name, wrong or not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import conformance, conformance_cases, conformance_frameworks


def outcome(about: str, error: str | None, package: str = "a", version: str = "1.0") -> dict[str, Any]:
    return {"package": package, "version": version, "about": about, "case": about, "error": error}


REFUSED = "BadRequestError: Error code: 400 - 'top_a' is not supported"


@pytest.mark.parametrize(
    ("error", "version", "expected"),
    [
        (None, "1.0", "right"),
        (REFUSED, "1.0", "refused"),
        ("InternalServerError: Error code: 500 - the request failed", "1.0", "fails"),
        ("AssertionError: [{'name': 14000}]", "1.0", "fails"),
        ("no matching distribution", "not installed", "not installed"),
    ],
)
def test_states(error: str | None, version: str, expected: str) -> None:
    """Catches a crash that counts as a refusal, and a registry out of reach that counts as a failure."""
    assert conformance.state(outcome("chat", error, version=version)) == expected


def test_the_table_has_a_row_for_each_client_and_each_reason() -> None:
    """Catches a case that is dropped, a column without its client, and a reason that nobody reads."""
    found = conformance.table(
        [
            *(outcome("chat", None), outcome("more", None), outcome("more", REFUSED)),
            *(outcome("chat", "AssertionError: ''", "b"), outcome("rerank", None, "b")),
            outcome("", "no network", "c", "not installed"),
        ]
    )
    assert found.splitlines() == [
        "| client | version | chat | rerank | more |",
        "| --- | --- | --- | --- | --- |",
        "| a | 1.0 | right |  | 1 of 2 right, refused |",
        "| b | 1.0 | fails | right |  |",
        "| c | not installed |  |  |  |",
        "",
        f"- a, more: refused: {REFUSED}",
        "- b, chat: fails: AssertionError: ''",
        "- c, installation: not installed: no network",
    ]


def test_each_client_has_cases() -> None:
    """Catches a client of the command without cases, and a case in a column that the table does not order."""
    cases = conformance_cases.CASES
    assert conformance_frameworks.__name__ == conformance.FRAMEWORKS  # which the command runs
    assert set(conformance.CLIENTS) - {"npm"} <= set(cases)
    assert {about for own in cases.values() for about, _ in own} <= set(conformance.COLUMNS)


def test_an_installation_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a registry out of reach that ends the command, or that counts as a failure of the server."""
    monkeypatch.setattr("venv.create", lambda *_, **__: None)
    monkeypatch.setattr(conformance, "_pip", lambda folder: ["sh", "-c", "echo no network >&2; exit 1", "sh"])
    (found,) = conformance.run_clients("http://127.0.0.1:1", ["cohere"], tmp_path)
    assert (found["version"], found["error"]) == ("not installed", "no network")
    assert conformance.state(found) == "not installed"
