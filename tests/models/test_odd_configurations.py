"""Odd but legal configurations: each is right or refused by name, and none is wrong in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.odd_configurations import Outcome, cases, outcome
from tests.test_llm_safetensors import RUN

IN_CI = ("llama", "gemma2", "qwen3_moe", "falcon_h1")


def test_the_matrix_is_large() -> None:
    """Catches kinds or fields that leave the matrix without a line that says why."""
    assert sum(len(cases(kind)) for kind in RUN) >= 1500


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUN)
def test_no_odd_configuration_is_wrong_in_silence(kind: str, tmp_path: Path) -> None:
    """Catches a field of config.json that is read past, and a library's exception in place of a refusal."""
    check(kind, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in IN_CI if kind in RUN])
def test_some_families_have_no_wrong_odd_configuration(kind: str, tmp_path: Path) -> None:
    """Catches the same for a family of each sort: plain, with windows, with experts, with states."""
    check(kind, tmp_path)


def check(kind: str, folder: Path) -> None:
    wrong: dict[str, Outcome] = {}
    for i, case in enumerate(cases(kind)):
        found = outcome(case, folder / str(i))
        if found.what in ("wrong", "crashed"):
            wrong[str(case)] = found
    assert wrong == {}
