"""Backends: `make_backend(name)` gives an object that runs a model's program.

Every op has a definition in `reference` (NumPy, fp32); `cpu` has the fast kernels, `pytorch` runs on any
device that PyTorch has, and nothing else imports PyTorch.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kukri.errors import ConfigError, UnsupportedError
from kukri.host.installed import needs_package

if TYPE_CHECKING:  # the command line reads the stages of sampling, without NumPy
    from kukri.kernels.backend import Backend

BACKENDS = ("cpu", "portable", "reference", "torch", "gpu")
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA's, AMD's, and both under WSL


def choose_backend(backend: str | None, device: str | None) -> tuple[str, str | None]:
    """The name of the backend to make and of its device, by two options that may each be left out.

    Without either it is the CPU backend. A device other than the CPU is the gpu backend's, torch with Triton
    kernels; "auto" is the first such device there is, else the CPU. Raises ConfigError on options that
    contradict each other, without PyTorch, or without such a device.
    """
    if backend is not None and backend not in BACKENDS:
        raise UnsupportedError(f"the backend {backend!r} is not supported: use one of {', '.join(BACKENDS)}")
    if backend in ("cpu", "portable", "reference"):
        if device not in (None, "cpu", "auto"):
            raise ConfigError(f"the {backend} backend is not supported on {device}: leave the backend out")
        return backend, None
    if backend is None and (device in (None, "cpu") or (device == "auto" and not _may_have_accelerator())):
        return "cpu", None
    if importlib.util.find_spec("torch") is None:
        wanted = f"device {device}" if device else f"backend {backend}"
        raise ConfigError(f"{needs_package(wanted, 'torch', 'gpu')}, or leave it out")
    from kukri.kernels.pytorch import devices

    if device not in (None, "auto"):
        if backend == "gpu" and device == "cpu":
            raise ConfigError("the gpu backend is not supported on the CPU: choose torch, or a GPU")
        found = str(devices.find_device(str(device)))
        return ("torch" if backend == "torch" or found == "cpu" else "gpu"), found
    first = devices.accelerator()
    if first is not None:
        return backend or "gpu", first
    if backend == "gpu":
        raise ConfigError(f"a GPU was not found by PyTorch {devices.version()}: choose --device cpu (device)")
    return ("cpu", None) if backend is None else ("torch", "cpu")


def make_backend(name: str, n_threads: int | None = None, device: str | None = None) -> Backend:
    """Return a backend by name, on a device. "portable" is the CPU's, bit-identical on every processor; "gpu"
    is torch where Triton is missing. Raises as `choose_backend` does.
    """
    name, device = choose_backend(name, device)
    if name == "reference":
        from kukri.kernels.reference import ReferenceBackend

        return ReferenceBackend()
    if name in ("cpu", "portable"):
        from kukri.kernels.cpu import CpuBackend

        return CpuBackend(n_threads=n_threads, is_portable=name == "portable")
    if name == "gpu" and str(device).startswith("cuda") and importlib.util.find_spec("triton") is not None:
        from kukri.kernels.gpu.backend import GpuBackend

        return GpuBackend(str(device), n_threads)
    from kukri.kernels.pytorch import TorchBackend

    return TorchBackend(device or "cpu", n_threads)


def _may_have_accelerator() -> bool:
    """False if there is surely none that PyTorch could use: a second of importing it is saved then."""
    if importlib.util.find_spec("torch") is None:
        return False
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    return any(Path(driver).exists() for driver in _DRIVERS)
