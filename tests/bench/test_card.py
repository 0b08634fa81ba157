"""The facts that a benchmark prints first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kukri.bench import card
from kukri.host import hardware as machine
from kukri.host import os_calls as system


def test_model_card_of_the_default_model(smollm2_path: Path) -> None:
    """Would catch tied embeddings counted twice, or a ceiling from the wrong number of bytes."""
    facts = card.model_card(smollm2_path)
    assert facts.n_parameters == 134_515_008
    assert facts.file_bytes == 98_362_432
    assert facts.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert sum(facts.bytes_by_type.values()) == facts.bytes_per_token  # the head is the embedding
    assert 0.9 * facts.file_bytes < facts.bytes_per_token < facts.file_bytes
    machine = card.MachineCard("", 1, (), 1, "", {}, 1, read_gb_per_s=47.0)
    assert card.ceiling_tokens_per_s(machine, facts) == pytest.approx(47e9 / facts.bytes_per_token)


def test_states_count_towards_the_ceiling(smollm2_path: Path) -> None:
    """Would catch a ceiling that no hybrid can reach: its states move through memory as weights do."""
    machine = card.MachineCard("", 1, (), 1, "", {}, 1, read_gb_per_s=47.0)
    facts = replace(card.model_card(smollm2_path), bytes_per_token=500, state_bytes=20)
    assert card.ceiling_tokens_per_s(machine, facts) == pytest.approx(47e9 / 540)


def test_bandwidth_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a kernel that reads less than it says, by a speed no machine has, or threads that hang."""
    monkeypatch.setattr(card, "_BUFFER_BYTES", 64 << 20)
    monkeypatch.setattr(card, "_PASSES", 3)
    for n_threads in (1, 2):
        assert 0.5 < card.measure_read_bandwidth(n_threads) < 5000


def test_machine_facts() -> None:
    """Would catch a fact that is missing on this system."""
    assert machine.cpu_model()
    assert system.memory_bytes() > 1 << 28
    assert machine.installed_versions(["numpy", "numba", "no such package"]).keys() == {"numpy", "numba"}


@pytest.mark.full
def test_peak_memory_grows_with_what_is_touched() -> None:
    """Would catch kilobytes taken for bytes, or the parent's peak taken for this process's."""
    before = machine.peak_rss_bytes()
    held = np.ones(before // 8 + (64 << 20) // 8)  # more than has been given back meanwhile
    after = machine.peak_rss_bytes()
    assert after >= before + (32 << 20)
    assert after < before + 2 * held.nbytes
