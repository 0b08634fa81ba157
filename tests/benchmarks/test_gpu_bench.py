"""The benchmark of GPUs, as far as a machine without one can run it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.make_model import SHAPES, make_model
from kukri.bench.device_checks import Check
from kukri.errors import KukriError
from tests.lazy_imports import lazy_imports

with lazy_imports():
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


class FakeVllm:
    """A vllm module whose clock is the number of tokens that it computes."""

    def __init__(self) -> None:
        self.now, self.steps = 0.0, []

    def LLM(self, **options):
        self.options = options
        return self

    def SamplingParams(self, **params):
        return params

    def generate(self, prompts, params, use_tqdm):
        n_prompt = len(prompts[0]["prompt_token_ids"])
        self.steps.append((len(prompts), n_prompt, params["max_tokens"]))
        self.now += len(prompts) * (n_prompt * 0.001 + (params["max_tokens"] - 1) * 0.01)


def test_vllm_is_measured_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts counted as decoding, a stream's rate for that of all, an engine that is missing and ends it."""
    fake, said = FakeVllm(), []
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr("benchmarks.vllm.perf_counter", lambda: fake.now)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    (speed,) = gpu.peers(Path("m.gguf"), "org/model", 4, 1, said.append)
    assert (speed.engine, speed.model, speed.n_streams) == ("vLLM", "org/model", 4)
    assert speed.prefill_tokens_per_s == pytest.approx(1000)
    assert speed.decode_tokens_per_s == pytest.approx(100)
    assert fake.options["model"] == "org/model"
    assert said == ["left out: llama-cpp-python is not installed: run `pip install --group bench`"]
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert gpu.peers(Path("m.gguf"), "org/model", 4, 1, said.append) == []
    assert said[-1] == "left out: vLLM is not installed: run `pip install vllm`"


def test_llama_cpp_is_measured_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for the CPU alone that is compared with a GPU; other options than were wanted."""
    made = {}

    class Fake:
        name = "llama-cpp-python"
        prefill_s = staticmethod(lambda n_tokens: 0.5)
        batch_decode_s = staticmethod(lambda n_streams, n_prompt, n_tokens: 2.0)
        close = staticmethod(lambda: None)

        def __init__(self, path, n_threads, context_tokens, **options) -> None:
            made.update(options, path=path)

    monkeypatch.setattr(gpu, "LlamaCpp", Fake)
    (speed,) = gpu.peers(Path("m.gguf"), None, 3, 2, print)
    assert (speed.engine, speed.model) == ("llama-cpp-python", "m")
    assert speed.prefill_tokens_per_s == gpu.N_PREFILL / 0.5
    assert speed.decode_tokens_per_s == (gpu.N_DECODE - 1) * 3 / 2.0
    assert made == {"path": Path("m.gguf"), "n_streams": 3, "on_gpu": True}


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


@pytest.mark.skipif("devices.accelerator() is not None", reason="there is a GPU")
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(KukriError, match="a GPU was not found by PyTorch"):
        gpu.main()
