"""Properties of the assembler of a tensor's device: inline PTX, conversions, registers of a thread."""

from __future__ import annotations

import torch


def has_ptx(x: torch.Tensor) -> bool:
    """True on a device that runs inline PTX."""
    return x.device.type == "cuda" and torch.version.hip is None


def converts_e4m3(x: torch.Tensor) -> bool:
    """True on a device with an instruction from e4m3 to float16: NVIDIA's from sm_89 on."""
    return has_ptx(x) and torch.cuda.get_device_capability(x.device) >= (8, 9)


def register_options(x: torch.Tensor, most: int | None) -> dict[str, int]:
    """The option that lets a thread have `most` registers, on NVIDIA's devices."""
    return {"maxnreg": most} if most is not None and has_ptx(x) else {}
