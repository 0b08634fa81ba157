"""How answers read with the default sampling."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import answers


@pytest.mark.slow
@pytest.mark.parametrize("n_open", [6, len(answers._OPEN)])
def test_repetition_is_seen(n_open: int, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch shares that are the same whatever the answers say."""
    monkeypatch.setattr(answers, "_OPEN", answers._OPEN[-n_open:])
    monkeypatch.setattr(answers, "POEMS", answers.POEMS[: n_open // 6])  # 1 of 3, or all
    plain = answers.measure(str(smollm2_path), {}, 1, None)
    greedy = {"temperature": 0, "frequency_penalty": 0, "presence_penalty": 0}
    loops = answers.measure(str(smollm2_path), greedy, 1, None)
    assert plain.rep4 < loops.rep4 / 4
    assert plain.loops < loops.loops
    assert plain.ended > loops.ended
    assert plain.facts > 0.5
    assert 0 < plain.copies <= 1


def test_a_phrase_said_twice_is_seen() -> None:
    """Would catch phrases told apart by case, commas or ends of lines."""
    assert answers.repeats_a_phrase("A gentle rain of gold,\nit falls.\n\na Gentle rain\nof gold again")
    assert not answers.repeats_a_phrase("A gentle rain of gold\nA gentle rain of silver\nOh\nOh")
