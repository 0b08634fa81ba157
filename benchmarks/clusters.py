"""Machines of Ray on this one, and a server of kukri on them, as tests and benchmarks need them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from signal import SIGTERM
from typing import Any

import httpx

_STARTS = 3  # Ray gives its processes 30 s to start, which a busy machine may need more of
_STORE_BYTES = 100 << 20  # for a machine's objects, through which nothing large goes
CONTROLLER = "ServeController"


class Machines:
    """A Ray cluster whose machines are all this one; each has `n_cpus` processors for replicas.

    Attributes: address, of the first machine.
    """

    def __init__(self, n: int, n_cpus: int = 1) -> None:
        os.environ.setdefault("RAY_worker_niceness", "0")  # as for a Ray of kukri's own
        from ray.cluster_utils import Cluster

        self._node: dict[str, Any] = {"num_cpus": n_cpus, "object_store_memory": _STORE_BYTES}
        head = {**self._node, "include_dashboard": False}
        self._cluster: Any = started(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.address: str = self._cluster.address
        try:
            for _ in range(n - 1):
                self.add()
        except BaseException:
            self.close()
            raise

    def add(self) -> None:
        """Adds a machine."""
        started(lambda: self._cluster.add_node(**self._node))

    def remove(self) -> None:
        """Kills the processes of a machine, one that is not the first."""
        self._cluster.remove_node(self._cluster.worker_nodes.copy().pop(), allow_graceful=False)

    def is_first(self, pid: int) -> bool:
        """True if a process that Ray started is on the first machine."""
        (raylet,) = self._cluster.head_node.all_processes["raylet"]
        return _parent(pid) == int(raylet.process.pid)

    def close(self) -> None:
        """Ends all machines."""
        self._cluster.shutdown()


def started(start: Callable[[], Any]) -> Any:
    """Calls `start`, again if Ray's processes are too slow."""
    for left in reversed(range(_STARTS)):
        try:
            return start()
        except Exception:
            if not left:
                raise


class ClusterServer:
    """`kukri cluster serve` in a process of its own, with one thread a replica. Attributes: url, http."""

    def __init__(self, model: str | Path, *options: str, n_replicas: int = 2, name: str = "tiny") -> None:
        command = [sys.executable, "-m", "kukri", "cluster", "serve", str(model), "--alias", name]
        command += ["--threads", "1", "--port", "0", "--drain", "5", "--replicas", str(n_replicas), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.url, self._name = "", name
        threading.Thread(target=self._read, daemon=True).start()
        try:
            wait_for(lambda: bool(self.url) or self.process.poll() is not None, 300)
            if not self.url:
                raise RuntimeError("".join(self.lines))
            self.http = httpx.Client(base_url=self.url, timeout=120)
            self.wait_for_replicas(n_replicas)
        except BaseException:
            self.process.kill()
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None, "it is a pipe"
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"on (http://127.0.0.1:\d+)/v1", line)
            if found:
                self.url = found[1]

    def replicas(self) -> list[str]:
        """The names of the replicas that the server knows."""
        text = self.http.get("/metrics").text
        return re.findall(rf'kukri_kv_pages\{{model="{self._name}",replica="(\w+)"\}}', text)

    def wait_for_replicas(self, n: int, timeout_s: float = 300) -> None:
        """Waits until the server knows `n` of them."""
        wait_for(lambda: len(self.replicas()) == n, timeout_s)

    def pids(self) -> list[int]:
        """The processes of its replicas, and of no other server's."""
        return replica_pids(rf"serve-.*-{self.http.base_url.port}:")

    def stop(self) -> None:
        """Ends it, and its replicas. Raises RuntimeError if it does not end well."""
        self.process.send_signal(SIGTERM)
        try:
            if self.process.wait(60):
                raise RuntimeError("".join(self.lines[-20:]))
        finally:
            self.process.kill()


def replica_pids(command: str = "") -> list[int]:
    """The processes of replicas, by what Ray calls them: of `kukri cluster serve`, "serve-", or "batch-"."""
    return processes(f"ServeReplica:kukri-{command}")


def processes(pattern: str) -> list[int]:
    """The processes whose names, as Ray gives them, match from the beginning on."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and re.match(
                f"ray::{pattern}".encode(), (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
    return sorted(found)


def wait_for(is_true: Callable[[], bool], timeout_s: float) -> None:
    """Waits until something is true. Raises TimeoutError if it does not come true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline_s:
            raise TimeoutError("it never came true")
        time.sleep(0.05)


def _parent(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return int(text.rpartition(")")[2].split()[1])
