"""Devices by name: whether they exist, the types they compute in, and their memory."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from kukri.errors import ConfigError
from kukri.host.hardware import available_bytes

KINDS = ("cpu", "cuda", "mps", "xpu")  # ROCm's are called cuda by PyTorch


def find_device(name: str) -> torch.device:
    """The device called cpu, cuda, cuda:1, mps or xpu. Raises ConfigError, naming the devices there are."""
    kind, _, number = name.partition(":")
    if kind not in KINDS or (number and not number.isdecimal()):
        raise ConfigError(
            f"the device {name!r} is not supported: choose auto, cpu, cuda, cuda:1 …, mps or xpu"
        )
    n_devices = device_count(kind)
    if int(number or 0) >= n_devices:
        there = ", ".join(devices())
        raise ConfigError(
            f"the device {name} was not found: PyTorch {version()} sees {there}; a driver, or a build of "
            "PyTorch for it, may be missing"
        )
    return torch.device(kind) if kind in ("cpu", "mps") else torch.device(kind, int(number or 0))


def version() -> str:
    """PyTorch's version, and what it was built for."""
    return str(torch.__version__)


def device_count(kind: str) -> int:
    """Devices of a kind that PyTorch can use."""
    if kind == "cpu":
        return 1
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module: Any = getattr(torch, kind, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def devices() -> list[str]:
    """The names of all devices here, the CPU first."""
    numbered = [f"{kind}:{i}" for kind in ("cuda", "xpu") for i in range(device_count(kind))]
    return ["cpu", *numbered, *(["mps"] if device_count("mps") else [])]


def accelerator() -> str | None:
    """The first device that is not the CPU."""
    return next(iter(devices()[1:]), None)


def device_name(device: torch.device) -> str:
    """A name for people, such as cuda:0 (NVIDIA H100)."""
    if device.type in ("cuda", "xpu"):
        module: Any = getattr(torch, device.type)
        return f"{device} ({module.get_device_name(device)})"
    return str(device)


def matrix_dtype(device: torch.device) -> torch.dtype:
    """The numbers of matrix products: float32 on the CPU, else a half type with the widest range."""
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return torch.float16
    return torch.float16 if device.type == "mps" else torch.bfloat16


def free_bytes(device: torch.device) -> int:
    """Free memory of a device."""
    if device.type == "cpu":
        return available_bytes()
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    module: Any = getattr(torch, device.type)
    free: int = module.mem_get_info(device)[0]
    return free


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all work so far."""
    if device.type != "cpu":
        module: Any = getattr(torch, device.type)
        module.synchronize()


def read_gb_per_s(device: torch.device, n_bytes: int = 1 << 30, n_passes: int = 10) -> float:
    """The memory bandwidth, in 10^9 bytes per second, at which a sum reads a buffer; the best pass."""
    numbers = torch.ones(n_bytes // 4, device=device)
    best_s = float("inf")
    for _ in range(n_passes + 1):
        synchronize(device)
        started = perf_counter()
        numbers.sum()
        synchronize(device)
        best_s = min(best_s, perf_counter() - started)
    return n_bytes / best_s / 1e9
