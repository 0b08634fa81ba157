"""The tests of the `openai` client, as they are, against replicas of the real model on two machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray
pytest.importorskip("ray")

from benchmarks.clusters import ClusterServer, Machines  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[ClusterServer]:
    """Two machines with a replica each, with the names and limits of the fixture `served`."""
    machines = Machines(2)
    try:
        limits = ("--max-context", "1024", "--max-requests", "8", "--max-waiting", "64")
        options = ("--address", machines.address, *limits)
        made = ClusterServer(smollm2_path, *options, name="smol")
        yield made
        made.stop()
    finally:
        machines.close()


def test_the_openai_clients_tests_pass(server: ClusterServer) -> None:
    """Catches whatever a client could see of the replicas."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "tests/server/test_openai_client.py"]
    environment = os.environ | {"KUKRI_TEST_SERVER": server.url}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout
    assert " skipped" not in done.stdout
