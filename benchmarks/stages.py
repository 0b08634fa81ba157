"""A model cut into stages next to one process, what a hop costs, and memory that only halves fit in.

`python -m benchmarks.stages speed [MODEL]`: tokens a second of 1, 8 and 16 streams in two stages on this
machine's cores, as shares of one process on the same cores, in turn; then two stages with half the threads
each and two steps under way, as on two machines. Processor time is that of all processes.

`python -m benchmarks.stages hops`: microseconds of activations [T, D] from one process to another and back,
over the connection of stages and over torch.distributed's gloo, alternating. Needs PyTorch.

`python -m benchmarks.stages memory FILE --limit GIB`: runs the model in one process and in two stages, each
process limited to so much memory of its own (RLIMIT_DATA; files that are mapped do not count).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness import run
from benchmarks.turns import in_turns
from kukri import LLM
from kukri.kernels.cpu.compile.features import usable_cores
from kukri.stages.connection import Connection
from kukri.stages.messages import Kind, rows_from_bytes, rows_to_bytes
from kukri.stages.processes import TOKEN_VARIABLE

_N_TOKENS = 48
_SHAPES = ((1, 576), (8, 576), (8, 2048), (512, 2048))  # tokens, width
_N_HOPS = 100
_BOUNDS = {Kind.ACTIVATIONS: 1 << 24}


def main() -> None:
    """Runs the command that is asked for."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = options.add_subparsers(dest="command", required=True)
    speed = commands.add_parser("speed")
    speed.add_argument("model", nargs="?", default="smollm2-135m")
    speed.add_argument("--rounds", type=int, default=9)
    commands.add_parser("hops").add_argument("--rounds", type=int, default=9)
    memory = commands.add_parser("memory")
    memory.add_argument("model")
    memory.add_argument("--limit", type=float, required=True, help="GiB of each process, 0 for none")
    memory.add_argument("--only", type=int, help=argparse.SUPPRESS)  # the limited process itself
    given = options.parse_args()
    if given.command == "speed":
        measure_speed(given.model, given.rounds)
    elif given.command == "hops":
        measure_hops(given.rounds)
    elif given.only is None:
        compare_memory(given.model, given.limit)
    else:
        run_limited(given.model, given.limit, given.only)


def measure_speed(model: str, n_rounds: int) -> None:
    """Prints the shares of each number of streams."""
    n_cores = usable_cores()
    common: dict[str, Any] = {"max_context": 1024, "speculation": "off", "max_requests": 16}
    half = max(n_cores // 2, 1)
    with _waiting_stage(half) as address:
        one, turns = LLM(model, **common), LLM(model, stages=2, **common)
        under_way = LLM(model, stages=[address], n_threads=half, **common)
        sides = (one, turns, under_way)
        for n in (1, 8, 16):
            rounds = in_turns([partial(_rate, llm, n) for llm in sides], n_rounds, lambda _: None)
            for name, i in (("two stages", 1), ("two steps under way", 2)):
                wall = median(found[i][0] / found[0][0] for found in rounds)
                cpu = median(found[0][1] / found[i][1] for found in rounds)
                print(
                    f"{n} streams, {name}: {wall:.2f} of one process, {cpu:.2f} by processor time", flush=True
                )
        for llm in sides:
            llm.close()


class _waiting_stage:
    """Within the block `kukri stage` listens at the address that it gives."""

    def __init__(self, n_threads: int) -> None:
        os.environ[TOKEN_VARIABLE] = os.urandom(16).hex()
        command = [sys.executable, "-m", "kukri", "stage", "--listen", "127.0.0.1:0", "--device", "cpu"]
        self.process = subprocess.Popen(
            [*command, "--threads", str(n_threads)], stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> str:
        assert self.process.stdout is not None, "it is a pipe"
        return self.process.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def _rate(llm: LLM, n: int) -> tuple[float, float]:
    """(tokens a second, processor seconds of all processes) of `n` streams."""
    prompts = [f"The number {i} is" for i in range(n)]
    started_s, started_cpu_s = perf_counter(), _cpu_seconds()
    llm.generate(prompts, max_tokens=_N_TOKENS, temperature=0, ignore_eos=True)
    return n * _N_TOKENS / (perf_counter() - started_s), _cpu_seconds() - started_cpu_s


def _cpu_seconds() -> float:
    """Processor seconds of this process and its children, of which those that are not asked sleep."""
    pids = ["self"]
    for children in Path("/proc/self/task").glob("*/children"):
        pids += children.read_text().split()
    schedstats = [file.read_text() for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(text.split()[0]) for text in schedstats) / 1e9


def measure_hops(n_rounds: int) -> None:
    """Prints the medians of both for several sizes."""
    context = get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        children = [
            context.Process(target=_answer_tcp, args=(port,)),
            context.Process(target=_answer_gloo, args=(port + 1,)),
        ]
        for child in children:
            child.start()
        connection = Connection(listener.accept()[0], "the other process")
    connection.bounds = _BOUNDS
    gloo = _gloo(port + 1, 0)
    for shape in _SHAPES:
        rows = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        measures = [partial(_tcp_s, connection, rows), partial(_gloo_s, gloo, rows)]
        rounds = in_turns(measures, n_rounds, lambda _: None)
        tcp_us, gloo_us = (1e6 * median(found[i] for found in rounds) for i in (0, 1))
        print(f"{list(shape)}: TCP {tcp_us:,.0f} us there and back, gloo {gloo_us:,.0f}", flush=True)
    connection.close()
    for child in children:
        child.terminate()
        child.join()


def _tcp_s(connection: Connection, rows: Any) -> float:
    def hop() -> None:
        connection.send(Kind.ACTIVATIONS, *rows_to_bytes(rows))
        rows_from_bytes(connection.expect(Kind.ACTIVATIONS))

    return _median_s(hop)


def _answer_tcp(port: int) -> None:
    connection = Connection(socket.create_connection(("127.0.0.1", port)), "the other process")
    connection.bounds = _BOUNDS
    while True:
        connection.send(
            Kind.ACTIVATIONS, *rows_to_bytes(rows_from_bytes(connection.expect(Kind.ACTIVATIONS))[0])
        )


def _gloo(port: int, rank: int) -> Any:
    import torch.distributed as distributed

    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    return distributed


def _gloo_s(distributed: Any, rows: Any) -> float:
    import torch

    there, back = torch.from_numpy(rows), torch.empty(rows.shape)
    size = torch.tensor(rows.shape)

    def hop() -> None:
        distributed.send(size, 1)  # which varies from step to step
        distributed.send(there, 1)
        distributed.recv(back, 1)

    return _median_s(hop)


def _answer_gloo(port: int) -> None:
    import torch

    distributed, size = _gloo(port, 1), torch.empty(2, dtype=torch.int64)
    while True:
        distributed.recv(size, 0)
        rows = torch.empty(*size.tolist())
        distributed.recv(rows, 0)
        distributed.send(rows, 0)


def _median_s(hop: Callable[[], None]) -> float:
    times = []
    for _ in range(_N_HOPS):
        started_s = perf_counter()
        hop()
        times.append(perf_counter() - started_s)
    return median(times)


def compare_memory(model: str, limit: float) -> None:
    """Prints what became of one process and of two stages under the limit."""
    for n, gib in ((1, 0.0), (1, limit), (2, limit)):
        command = [
            sys.executable,
            "-m",
            "benchmarks.stages",
            "memory",
            model,
            f"--limit={gib}",
            f"--only={n}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = (done.stdout.strip() or done.stderr.strip() or "no message").splitlines()
        size = f"of {gib:g} GiB" if gib else "without a limit"
        print(f"{n} process{'es' * (n > 1)} {size}: {lines[-1]}", flush=True)


def run_limited(model: str, limit: float, n_stages: int) -> None:
    """Limits this process, and so those that it starts, and runs the model; prints one line."""
    import resource

    n_bytes = int(limit * 2**30)
    if n_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (n_bytes, n_bytes))
    threading.stack_size(1 << 20)
    try:
        with LLM(model, stages=n_stages, max_context=512, max_requests=1, n_threads=1) as llm:
            tokens = llm.generate("The number 7 is", max_tokens=8, temperature=0, ignore_eos=True).token_ids
            print(f"runs: {json.dumps(list(tokens))}")
    except (Exception, MemoryError) as error:
        print(f"does not run: {type(error).__name__}: {str(error)[:100]}")


if __name__ == "__main__":
    run(main)
