"""Peak host memory while a model is copied to a GPU, without one: `python -m benchmarks.gpu_loading -m FILE`.

The device is PyTorch's "meta", whose tensors have shapes and no memory, and no kernel is launched: so all
that this process holds is the host's part, from reading the file to the end of a first step, which uses every
weight. A real device adds its driver.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import numpy as np
import torch
from triton.runtime.jit import JITFunction

from benchmarks.harness import Experiment, Table, run
from kukri.formats import hub
from kukri.kernels.gpu.backend import GpuBackend
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.opening.loading import read_model
from kukri.opening.model_options import ModelOptions

MOST_BESIDE_FILE = 500e6  # bytes, for a model of 3B


@dataclass(frozen=True)
class LoadingMemory:
    """The report: bytes that the host holds at most, libraries and the file's mapped pages included."""

    model: str
    file_bytes: int
    start_bytes: int  # with the libraries loaded, before the model is read
    peak_bytes: int
    device_bytes: int  # the tensors that a device would hold

    @property
    def beside_file(self) -> float:
        """Bytes of the peak beyond the file's."""
        return self.peak_bytes - self.file_bytes


def measure(path: Path) -> LoadingMemory:
    """Loads a model as the gpu backend does, onto a device without memory. Once in a process."""
    JITFunction.run = lambda *arguments, **options: None  # type: ignore[method-assign]
    start_bytes = _peak_rss()
    model = read_model(ModelOptions(model=str(path), max_context=64)).model
    backend = GpuBackend("cpu", with_graphs=False)
    backend.device = torch.device("meta")
    limits = StepLimits(8, 1, 8, 4)
    program = backend.compile(model, backend.new_cache(model.cache_layout, 4), limits)
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    ends, pages = np.arange(2, dtype=np.int32), np.zeros((1, 4), np.int32)
    program(ForwardBatch(zero, zero, zero, ends, one, pages, zero))
    return LoadingMemory(str(path), path.stat().st_size, start_bytes, _peak_rss(), _device_bytes())


def _device_bytes() -> int:
    """Bytes of all tensors on the device without memory, each storage once."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.is_meta]
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())


def _peak_rss() -> int:
    """The most memory that this process held so far, from Linux."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Runs the experiment; 1 if the peak is beyond the limit."""
    experiment = Experiment("gpu_loading", "Measure peak host memory while a model is copied to a device.")
    given = experiment.parse()
    found = measure(hub.resolve(given.model))
    rows = [
        ["file", f"{found.file_bytes / 1e6:.0f}"],
        ["copied to the device", f"{found.device_bytes / 1e6:.0f}"],
        ["host, libraries loaded", f"{found.start_bytes / 1e6:.0f}"],
        ["host, peak", f"{found.peak_bytes / 1e6:.0f}"],
        ["peak - file", f"{found.beside_file / 1e6:.0f}"],
    ]
    experiment.show(found, Table(Path(found.model).name, ["memory", "MB"], rows))
    raise SystemExit(1 if found.beside_file > MOST_BESIDE_FILE else 0)


if __name__ == "__main__":
    run(main)
