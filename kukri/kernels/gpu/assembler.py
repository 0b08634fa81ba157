"""What a tensor's device offers to kernels and launches: inline PTX, conversions, registers, early starts."""

from __future__ import annotations

from functools import cache

import torch


def has_ptx(x: torch.Tensor) -> bool:
    """True on a device that runs inline PTX."""
    return x.device.type == "cuda" and torch.version.hip is None


def converts_e4m3(x: torch.Tensor) -> bool:
    """True on a device with an instruction from e4m3 to float16: NVIDIA's from sm_89 on."""
    return has_ptx(x) and torch.cuda.get_device_capability(x.device) >= (8, 9)


@cache
def overlaps_kernels(device: torch.device) -> bool:
    """True if a kernel may start while the one before it runs: see overlap.py."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(x: torch.Tensor, max_registers: int | None = None) -> dict[str, int]:
    """Options of a launch on NVIDIA's devices: an early start, and the registers that a thread may have.

    Only for kernels that begin with `await_inputs`.
    """
    options: dict[str, int] = {"launch_pdl": True} if overlaps_kernels(x.device) else {}
    return options if max_registers is None or not has_ptx(x) else options | {"maxnreg": max_registers}
