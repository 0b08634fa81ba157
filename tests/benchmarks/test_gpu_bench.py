"""The benchmark of GPUs, as far as a machine without one can run it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.make_model import SHAPES, make_model
from kukri.bench.device_checks import Check
from kukri.errors import KukriError
from kukri.kernels.pytorch import devices


def test_a_model_is_measured(tmp_path: Path) -> None:
    """A rate that counts other tokens than were computed, a share of something else."""
    path = tmp_path / "tiny.gguf"
    make_model(path, SHAPES["tiny"], "Q8_0", "tiny")
    gpu_tokens = gpu.N_PREFILL, gpu.N_DECODE
    gpu.N_PREFILL, gpu.N_DECODE = 64, 8
    try:
        speed = gpu.measure(path, "cpu", 3, 1, read_gb_per_s=10.0, tflops=0.1)
    finally:
        gpu.N_PREFILL, gpu.N_DECODE = gpu_tokens
    assert (speed.model, speed.n_streams) == ("tiny", 3)
    n_weights = speed.flops_share * 0.1e12 / 2 / speed.prefill_tokens_per_s
    bytes_per_token = speed.bandwidth_share * 10e9 / (speed.decode_tokens_per_s / 3)
    assert 1.0 < bytes_per_token / n_weights < 1.1  # Q8_0 takes 1.06 bytes a weight


def test_ceilings_are_measured() -> None:
    assert 1e-5 < gpu.dense_tflops("cpu") < 100
    assert 1e-3 < devices.read_gb_per_s(devices.find_device("cpu"), 1 << 22, 2) < 1e4


def test_a_failed_check_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds of kernels that are wrong."""

    def fails(device: str, say) -> bool:
        say(Check("x", False, 1.0))
        return False

    monkeypatch.setattr(gpu, "check_device", fails)
    with pytest.raises(KukriError, match="a check failed"):
        gpu.check("cuda", print)


@pytest.mark.skipif(devices.accelerator() is not None, reason="there is a GPU")
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(KukriError, match="sees no GPU"):
        gpu.main()
