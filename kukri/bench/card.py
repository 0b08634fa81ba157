"""The machine and the model, as facts that bound how fast decoding can be.

A decoded token reads every weight once, so memory bandwidth / bytes of weights is the most tokens per second
that the machine allows: the ceiling. Measured speeds are given as a share of it.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path

from kukri.dataclass import dataclass
from kukri.errors import KukriError, UnsupportedError
from kukri.formats.headers import read_headers
from kukri.formats.huggingface.weights import is_packed, packed_type
from kukri.host.hardware import cpu_features, cpu_model, installed_versions
from kukri.host.os_calls import memory_bytes
from kukri.kernels.cpu.compile.features import usable_cores
from kukri.kernels.cpu.run.read_speed import measure_read_speed
from kukri.kernels.paged_kv import state_bytes, token_bytes
from kukri.quant.types import fitting_type

_PACKAGES = ("kukri", "numpy", "numba", "llvmlite", "tokenizers")
_BUFFER_BYTES = 512 << 20  # many times what caches hold
_PASSES = 10
_EMBEDDINGS = ("token_embd.weight", "model.embed_tokens.weight")
_LAYER_EMBEDDINGS = ("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight")  # Gemma 4's


@dataclass(frozen=True)
class MachineCard:
    """The machine of a benchmark. `read_gb_per_s` (10^9 bytes) is measured over `n_threads` threads.

    With a `device`, that is its bandwidth.
    """

    cpu: str
    n_cores: int  # cores that this process may use
    features: tuple[str, ...]
    memory_bytes: int
    system: str
    versions: dict[str, str]
    n_threads: int
    read_gb_per_s: float
    device: str | None = None


@dataclass(frozen=True)
class ModelCard:
    """The model of a benchmark.

    `bytes_per_token`: weights read to decode one token; `state_bytes`: a sequence's recurrent states, which
    each token reads and writes.
    """

    path: str
    name: str
    architecture: str
    n_parameters: int
    n_layers: int
    max_context: int
    file_bytes: int
    bytes_by_type: dict[str, int]
    bytes_per_token: int
    kv_bytes_per_token: int
    state_bytes: int = 0


def ceiling_tokens_per_s(machine: MachineCard, model: ModelCard) -> float:
    """The most tokens per second that the measured bandwidth allows for one request with a short context."""
    return machine.read_gb_per_s * 1e9 / (model.bytes_per_token + 2 * model.state_bytes)


def machine_card(n_threads: int) -> MachineCard:
    """The facts of this machine; measures its bandwidth, which takes a second or two."""
    return MachineCard(
        cpu=cpu_model(),
        n_cores=usable_cores(),
        features=cpu_features(),
        memory_bytes=memory_bytes(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions={"python": platform.python_version(), **installed_versions(_PACKAGES)},
        n_threads=n_threads,
        read_gb_per_s=read_bandwidth_of_a_fresh_process(n_threads),
    )


def model_card(path: Path, quantize: str | None = None) -> ModelCard:
    """The facts of a model, from its headers; `quantize` is the type its matrices are packed to when loaded.

    Raises UnsupportedError for a model that kukri cannot run.
    """
    headers = read_headers(path)
    if headers.config is None:
        raise headers.problem or UnsupportedError(f"{path} is not a model that is supported")
    config, target = headers.config, None if quantize is None else packed_type(quantize)
    sizes: Counter[str] = Counter()
    loaded: dict[str, int] = {}
    for tensor in headers.tensors:
        kind, loaded[tensor.name] = tensor.type, tensor.n_bytes
        packed = target and is_packed(tensor.name, tensor.shape) and fitting_type(target, tensor.shape[-1])
        if packed:
            n_rows, n_columns = prod(tensor.shape[:-1]), tensor.shape[-1]
            kind, loaded[tensor.name] = packed.name, n_rows * packed.row_bytes(n_columns)
        sizes[kind] += loaded[tensor.name]
    # one row of an embedding is read, unless it is the head too
    is_tied = config.tie_embeddings and config.head.kind == "language_model"
    of_rows = _LAYER_EMBEDDINGS if is_tied else (*_LAYER_EMBEDDINGS, *_EMBEDDINGS)
    unread = headers.unused(lambda tensor: loaded[tensor.name])
    unread += sum(loaded.get(name, 0) for name in of_rows)
    return ModelCard(
        path=str(path),
        name=config.name,
        architecture=config.architecture,
        n_parameters=headers.n_parameters,
        n_layers=config.n_layers,
        max_context=config.max_context,
        file_bytes=headers.file_bytes,
        bytes_by_type=dict(sizes.most_common()),
        bytes_per_token=sum(sizes.values()) - unread,
        kv_bytes_per_token=token_bytes(headers.cache_layout, "f16"),
        state_bytes=state_bytes(headers.cache_layout),
    )


def measure_read_bandwidth(n_threads: int) -> float:
    """GB/s (10^9 bytes) that `n_threads` threads read together, the best of several passes."""
    return measure_read_speed(n_threads, _BUFFER_BYTES, _PASSES) / 1e9


def read_bandwidth_of_a_fresh_process(n_threads: int) -> float:
    """`measure_read_bandwidth` in another process, so that its buffers do not count as this one's memory."""
    command = [sys.executable, "-m", "kukri.bench.card", str(n_threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise KukriError(f"measuring the memory bandwidth failed: {reason}")
    return float(json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(measure_read_bandwidth(int(sys.argv[1]))))
