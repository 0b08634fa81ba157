"""What the assembler of a tensor's device takes: inline PTX, and the number of registers of a thread."""

from __future__ import annotations

import torch


def has_ptx(x: torch.Tensor) -> bool:
    """True on a device that runs inline PTX."""
    return x.device.type == "cuda" and torch.version.hip is None


def register_options(x: torch.Tensor, most: int | None) -> dict[str, int]:
    """The option that lets a thread have `most` registers, on NVIDIA's devices."""
    return {"maxnreg": most} if most is not None and has_ptx(x) else {}
