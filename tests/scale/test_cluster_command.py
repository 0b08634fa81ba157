"""`kukri cluster` and `kukri batch --ray` where they cannot do what is wanted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
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
    assert "needs the package ray: run `pip install " in error_of("cluster", "serve", "--replicas", "2")


def test_options_on_replicas_need_ray(tmp_path: Path) -> None:
    """Catches a batch that runs on one engine though two replicas were asked for."""
    error = error_of("batch", str(tmp_path / "in"), str(tmp_path / "out"), "--replicas", "2")
    assert "--ray" in error


def test_options_of_several_models_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches options that are taken and have no effect."""
    monkeypatch.setattr("kukri.terminal.cluster.require_ray", lambda command: None)
    assert "--model-dir is not supported with replicas" in error_of(
        "cluster", "serve", "--model-dir", str(tmp_path)
    )


def test_a_server_that_is_not_there() -> None:
    assert "no server answers" in error_of("cluster", "status", "--url", "http://127.0.0.1:9")
