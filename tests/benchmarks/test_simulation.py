"""The simulation of replicas: what is known without it must come out of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.plan import app
from benchmarks.simulation import Engine, Load, StepCosts, replicas_needed, simulate
from tests.tiny_gguf import tiny_config, write_tiny

COSTS = StepCosts(base_s=0.002, sequence_s=0.0004, token_s=0.00025)
ENGINE = Engine(COSTS, n_pages=4096)
LOAD = Load(rate=8.0, n_requests=600)


def test_a_lone_request_takes_the_time_of_its_steps() -> None:
    """Catches rates that lose or double time."""
    load = Load(rate=0.001, n_requests=1, n_prefixes=1, prefix_tokens=512, own_tokens=2, answer_tokens=2)
    report = simulate(ENGINE, replace(load, prefix_tokens=496), 1)
    # one step of the whole prompt, and a step for each token after the first
    n_prompt = round((report.first_token_p50_s - COSTS.base_s) / COSTS.token_s)
    assert n_prompt - 496 in (1, 2, 3)
    assert report.hit_rate == 0
    assert report.token_p50_s in (0, pytest.approx(COSTS.base_s + COSTS.sequence_s))


@pytest.mark.full
def test_prefix_routing_hits_as_one_replica_does() -> None:
    """Catches a router that spreads prefixes, and a balance that is lost by keeping them together."""
    alone = simulate(ENGINE, replace(LOAD, rate=1.0), 1)
    for n in (2, 8, 32):
        load = replace(LOAD, rate=4.0 * n, n_requests=200 * n, n_prefixes=8 * n)
        by_prefix, in_turn = simulate(ENGINE, load, n), simulate(ENGINE, load, n, "round-robin")
        assert by_prefix.hit_rate > 0.85 * alone.hit_rate
        assert by_prefix.hit_rate > in_turn.hit_rate
        assert by_prefix.first_token_p99_s < in_turn.first_token_p99_s
        assert by_prefix.imbalance < 1.6


def test_one_prefix_for_all_does_not_go_to_one_replica() -> None:
    """Catches a router that sends everybody to the replica that had the prefix first."""
    report = simulate(ENGINE, replace(LOAD, rate=40.0, n_prefixes=1, n_requests=1000), 4)
    assert report.imbalance < 1.3


def test_more_load_needs_more_replicas() -> None:
    found = [
        replicas_needed(ENGINE, replace(LOAD, rate=rate), first_token_s=1.0, token_s=0.02)
        for rate in (1.0, 20.0)
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].n_replicas < found[1].n_replicas
    assert found[1].first_token_p99_s <= 1.0
    assert replicas_needed(ENGINE, LOAD, first_token_s=1e-6, token_s=1.0, most=4) is None


def error_of(*words: str) -> str:
    """What the command says on stderr."""
    return CliRunner().invoke(app, words).stderr


def test_a_plan_is_made_with_given_costs(tmp_path: Path) -> None:
    """Catches costs in other units, and loads that no context holds."""
    path = str(write_tiny(tmp_path / "tiny.gguf", tiny_config(max_context=1024)))
    options = ["--users", "300", "--threads", "1", "--requests", "400", "--json"]
    done = CliRunner().invoke(app, ["-m", path, *options, "--costs", "2,0.4,0.25"])
    found = json.loads(done.stdout)
    assert found["costs"] == {"base_s": 0.002, "sequence_s": 0.0004, "token_s": 0.00025}
    assert found["plan"]["n_replicas"] > 1
    assert found["plan"]["first_token_p99_s"] <= 1.0
    measured = json.loads(CliRunner().invoke(app, ["-m", path, *options]).stdout)["costs"]
    assert 0 < measured["base_s"] < 0.1
    assert "--costs are three numbers" in error_of("-m", path, "--costs", "1,2")
    assert "do not fit in the context" in error_of("-m", path, "--prefix-tokens", "5000")
