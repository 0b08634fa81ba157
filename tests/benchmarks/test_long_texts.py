"""What Python does in a step next to long texts."""

from __future__ import annotations

import pytest

from benchmarks import long_texts


@pytest.mark.parametrize("has_states", [False, True])
def test_a_prompt_waits_while_steps_are_timed(has_states: bool) -> None:
    """Catches a prompt that finds room, whose computation would be timed in place of its waiting."""
    assert long_texts.waiting_us(200, 5, has_states=has_states) > 0


def test_dry_is_timed() -> None:
    """Catches a text that ends before the steps do."""
    assert long_texts.dry_us(200, 5) > 0
