"""Limits of a process' control groups, from the files of made-up systems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kukri.host.hardware import cpu_quota
from kukri.kernels.cpu.compile import features

V1 = "sys/fs/cgroup/cpu"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/box/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "50000 20000\n",
            },
            2.5,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "damaged"}, None),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/c\n3:memory:/c\n",
                f"{V1}/cpu.cfs_quota_us": "-1\n",
                f"{V1}/cpu.cfs_period_us": "100000\n",
                f"{V1}/c/cpu.cfs_quota_us": "100000\n",
                f"{V1}/c/cpu.cfs_period_us": "100000\n",
            },
            1.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                f"{V1}/cpu.cfs_quota_us": "5\n",
                f"{V1}/cpu.cfs_period_us": "0\n",
            },
            None,
        ),
    ],
)
def test_the_quota_is_the_smallest_of_the_control_groups(
    tmp_path: Path, files: dict[str, str], expected: float | None
) -> None:
    """A container of one core on a machine of forty, by either version of control groups."""
    assert cpu_quota(write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [(None, 8), (0.5, 1), (1.0, 1), (1.5, 1), (2.0, 2), (3.9, 3), (64.0, 8)]
)
def test_threads_follow_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    """Threads that spend a quota on waiting for one another, and then stand still until the next period."""
    monkeypatch.setattr(features, "allowed_cores", lambda: 8)
    monkeypatch.setattr(features, "cpu_quota", lambda: quota)
    assert features.usable_cores() == expected


def test_this_process_has_cores() -> None:
    """A real system's files that are read wrongly."""
    assert 1 <= features.usable_cores() <= features.allowed_cores() <= (os.cpu_count() or 1)
