"""`kukri cluster` and `kukri batch --ray` where they cannot do what is wanted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny_gguf import tiny_config, write_tiny
from typer.testing import CliRunner

from kukri.cli import app


def error_of(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'kukri[serve,ray]'" in error_of("cluster", "serve", "--replicas", "2")


def test_options_on_replicas_need_ray(tmp_path: Path) -> None:
    """Catches a batch that runs on one engine though two replicas were asked for."""
    error = error_of("batch", str(tmp_path / "in"), str(tmp_path / "out"), "--replicas", "2")
    assert "--ray" in error


def test_options_of_several_models_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches options that are taken and have no effect."""
    monkeypatch.setattr("kukri.terminal.cluster.require_ray", lambda command: None)
    assert "--model-dir is an option of kukri serve" in error_of(
        "cluster", "serve", "--model-dir", str(tmp_path)
    )


def test_a_server_that_is_not_there() -> None:
    assert "no server answers" in error_of("cluster", "status", "--url", "http://127.0.0.1:9")


def test_a_plan_is_made_with_given_costs(tmp_path: Path) -> None:
    """Catches costs in other units, and loads that no context holds."""
    path = str(write_tiny(tmp_path / "tiny.gguf", tiny_config(max_context=1024)))
    options = ["--users", "300", "--threads", "1", "--requests", "400", "--json"]
    done = CliRunner().invoke(app, ["plan", path, *options, "--costs", "2,0.4,0.25"])
    found = json.loads(done.stdout)
    assert found["costs"] == {"base_s": 0.002, "sequence_s": 0.0004, "token_s": 0.00025}
    assert found["plan"]["n_replicas"] > 1
    assert found["plan"]["first_token_p99_s"] <= 1.0
    measured = json.loads(CliRunner().invoke(app, ["plan", path, *options]).stdout)["costs"]
    assert 0 < measured["base_s"] < 0.1
    assert "--costs are three numbers" in error_of("plan", path, "--costs", "1,2")
    assert "do not fit in the context" in error_of("plan", path, "--prefix-tokens", "5000")
