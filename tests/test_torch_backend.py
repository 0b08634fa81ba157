"""The torch backend under the whole engine, on the CPU: the reference's tokens, hooks, server, errors."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.config import EngineConfig, RopeConfig
from kukri.engine import Engine
from kukri.errors import ConfigError, UnsupportedError
from kukri.kernels import choose_backend, make_backend
from kukri.models import Forward, load_model
from kukri.sampling import SamplingParams
from tests.lazy_imports import lazy_imports
from tests.models.made_models import make
from tests.models.tiny_llama import random_ids
from tests.models.tiny_models import TINY, V
from tests.quick import quick
from tests.tiny_gguf import START_ID, tiny_config, write_tiny

with lazy_imports():
    import torch

    from kukri.kernels.pytorch import devices  # noqa: F401 # in the condition of a skipif
    from kukri.kernels.pytorch.sampling import TorchSampling

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch") / "tiny.gguf"
    return write_tiny(path, tiny_config(256), weight_type="Q8_0")


def answers(model: Any, backend: Any, **options: Any) -> list[list[int]]:
    """Tokens of greedy and sampled requests of several lengths, in small steps, as one crowd."""
    config = EngineConfig(max_requests=3, max_step_tokens=24, max_context=120, **options)
    engine = Engine(model, backend, config)
    prompts = [random_ids(n, V, seed=n) for n in (1, 17, 50, 33)]
    requests = [engine.maker.make_request(ids, params) for ids in prompts for params in (GREEDY, SAMPLED)]
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert all(request.n_generated == 12 for request in requests)
    return [request.output_ids for request in requests]


@pytest.mark.full(but=["llama", "qwen3", "lfm2", "gemma4_text", "olmo2"])
@pytest.mark.parametrize("name", quick(TINY, kept=[*TINY][::3]))
def test_tokens_are_those_of_the_reference(name: str) -> None:
    """An op, a cache or a batch of this backend that fits one architecture alone."""
    _, config, source = make(name)
    model = load_model(source, config)
    assert answers(model, make_backend("torch", 1)) == answers(model, make_backend("reference"))


def test_sampling_on_the_device_gives_the_same_answers() -> None:
    """A row, a score or a draft's row that the engine takes to be on the host; logits that are written."""
    _, config, source = make("llama")
    model, answered = load_model(source, config), []
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logit_bias": {7: 3.0}, "logprobs": 2, "prompt_logprobs": 3},
        {"seed": 1, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.4, "logprobs": 0},
        {"seed": 2, "min_p": 0.05, "frequency_penalty": 0.5, "speculation": "ngram"},
        {"seed": 3, "typical_p": 0.8},
        {"seed": 4, "mirostat": 2},
        {"seed": 5, "top_k": 50, "logits_processors": [lambda ids, row: row * 0.5], "logprobs": 1},
    ]
    for is_on_device in (False, True):
        backend = make_backend("torch", 1)
        if is_on_device:
            host = backend.sampling
            backend.sampling = TorchSampling(lambda host=host: host)
        engine = Engine(model, backend, EngineConfig(max_requests=4, max_step_tokens=24, max_context=120))
        requests = [
            engine.maker.make_request(
                random_ids(9 + i, V, seed=i), SamplingParams(max_tokens=10, ignore_eos=True, **kind)
            )
            for i, kind in enumerate(kinds)
        ]
        for request in requests:
            engine.add_request(request)
        while engine.has_work:
            engine.step()
        assert [request.answer.error for request in requests] == [None] * len(kinds)
        answered.append([(r.answer.sampled, r.answer.prompt_logprobs) for r in requests])
    for found, wanted in zip(*reversed(answered), strict=True):
        for got, want in zip(found, wanted, strict=True):
            assert [token.id for token in got] == [token.id for token in want]
            for a, b in zip(got, want, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-6)
                assert [i for i, _ in a.top_logprobs or ()] == [i for i, _ in b.top_logprobs or ()]


def test_a_q8_0_cache_through_the_engine(tmp_path: Path) -> None:
    """Scales that a copied page or a preempted request leaves behind."""
    config = replace(tiny_config(), d_head=32, rope=RopeConfig(10000.0, 32))
    path = write_tiny(tmp_path / "q8.gguf", config, weight_type="Q8_0")
    prompts = [[START_ID, *random_ids(n, 200, seed=n)] for n in (3, 40, 21, 40)]
    page_bytes = 2 * 2 * 2 * 16 * (32 + 2)  # keys and values, of 2 layers and 2 heads
    want = None
    for backend in ("reference", "torch"):
        with LLM(path, backend=backend, kv_type="q8_0", kv_bytes=7 * page_bytes, max_requests=3) as llm:
            got = [result.token_ids for result in llm.generate(prompts, GREEDY)]
            assert llm.engine.scheduler.n_preemptions > 0
        want = want or got
        assert got == want


MATRIX = ("llama", "mistral", "phi", "qwen2")
# float32 sums in other orders; the CPU backend keeps keys and values in float16
CLOSE = {"reference": 3e-4, "torch": 3e-4, "cpu": 1e-2}
_SIZES = (1, 10, 100, pytest.param(1000, marks=pytest.mark.slow))


@pytest.mark.full(only=["phi-cpu-1"])
@pytest.mark.parametrize("n_tokens", _SIZES)
@pytest.mark.parametrize("backend_name", CLOSE)
@pytest.mark.parametrize("name", MATRIX)
def test_forward_with_and_without_a_cache(name: str, backend_name: str, n_tokens: int) -> None:
    """A mask [t, t] where new tokens also see those before them: it must be [t, t + offset]."""
    hf, config, source = make(name, context=1100)
    ids = random_ids(n_tokens, V)
    with torch.no_grad():
        want = hf(torch.tensor([ids])).logits.numpy()
    model, backend = load_model(source, config), make_backend(backend_name, 1)
    try:
        forward, atol = Forward(model, backend), CLOSE[backend_name]
        np.testing.assert_allclose(forward([ids]), want, atol=atol, rtol=0)
        offset = n_tokens // 3
        windows = {layer.window for layer in config.layers}
        cache = forward.new_cache(1, n_tokens)
        if offset:
            np.testing.assert_allclose(
                forward([ids[:offset]], cache=cache), want[:, :offset], atol=atol, rtol=0
            )
        mask = None
        if len(windows) == 1:  # one mask for all layers: it takes the place of their windows
            mask = causal(n_tokens, windows.pop())[None, None, offset:]
            assert mask.shape[2:] == (n_tokens - offset, n_tokens)
        got = forward([ids[offset:]], attention_mask=mask, cache=cache)
        np.testing.assert_allclose(got, want[:, offset:], atol=atol, rtol=0)
    finally:
        close = getattr(backend, "close", None)
        if close is not None:
            close()


def causal(n: int, window: int | None) -> np.ndarray:
    """bool [n, n]: what each token sees."""
    behind = np.arange(n)[:, None] - np.arange(n)
    return (behind >= 0) & (behind < (window or n))


def test_hooks_see_and_edit(tiny_path: Path) -> None:
    """A tap that shows a copy of another moment, or loses an edit in place or a replacement."""
    prompt = [START_ID, *random_ids(30, 200)]
    seen: dict[str, dict[str, list[np.ndarray]]] = {}
    tokens, plain = {}, {}
    for backend in ("reference", "torch"):
        with LLM(tiny_path, backend=backend, max_context=64) as llm:
            seen[backend] = {name: [] for name in llm.hook_names}

            def listen(name: str, x: np.ndarray, kept: Any = seen[backend]) -> None:
                kept[name].append(x.copy())

            def scale(name: str, x: np.ndarray) -> None:
                x *= 1.7

            def swap(name: str, x: np.ndarray) -> np.ndarray:
                return x[:, ::-1]

            plain[backend] = llm.generate(prompt, GREEDY).token_ids
            edits = {"blocks.0.attn.hook_v": scale, "blocks.1.hook_mlp_out": swap}
            with llm.hooks(edits), llm.hooks(dict.fromkeys(llm.hook_names, listen)):
                tokens[backend] = llm.generate(prompt, GREEDY).token_ids
    assert tokens["torch"] == tokens["reference"] != plain["reference"] == plain["torch"]
    for name, arrays in seen["reference"].items():
        assert len(arrays) == len(seen["torch"][name]) > 10
        for got, want in zip(seen["torch"][name], arrays):
            assert (got.dtype, got.shape) == (np.float32, want.shape)
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())


def test_a_server_answers_on_it(tiny_path: Path) -> None:
    """A service that knows the CPU backend alone."""
    from fastapi.testclient import TestClient

    from kukri.server.app import create_app
    from kukri.server.settings import ServerSettings

    body = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0, "seed": 1}
    texts = []
    for backend in ("reference", "torch"):
        with LLM(tiny_path, backend=backend, max_context=96) as llm:
            app = create_app(llm, ServerSettings(model_names=("tiny",)))
            with TestClient(app, base_url="http://127.0.0.1") as client:
                reply = client.post("/v1/completions", json=body)
                assert reply.status_code == 200, reply.text
                texts.append(reply.json()["choices"][0]["text"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("backend", "device", "found"),
    [
        (None, None, ("cpu", None)),
        (None, "cpu", ("cpu", None)),
        (None, "auto", ("cpu", None)),
        ("cpu", "auto", ("cpu", None)),
        ("reference", None, ("reference", None)),
        ("torch", None, ("torch", "cpu")),
        ("torch", "cpu", ("torch", "cpu")),
        ("torch", "auto", ("torch", "cpu")),
    ],
)
def test_backend_and_device(backend: str | None, device: str | None, found: Any, monkeypatch: Any) -> None:
    """A default that needs PyTorch, or a device that is dropped in silence."""
    monkeypatch.setattr("kukri.kernels.pytorch.devices.accelerator", lambda: None)
    assert choose_backend(backend, device) == found


@pytest.mark.parametrize("backend", [None, "torch", "gpu"])
def test_auto_takes_a_gpu_if_there_is_one(backend: str | None, monkeypatch: Any) -> None:
    monkeypatch.setattr("kukri.kernels._may_have_accelerator", lambda: True)
    monkeypatch.setattr("kukri.kernels.pytorch.devices.accelerator", lambda: "cuda:0")
    assert choose_backend(backend, "auto") == (backend or "gpu", "cuda:0")


@pytest.mark.skipif("devices.accelerator() is not None", reason="there is a GPU")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, r"the device cuda was not found: PyTorch .* sees cpu; a driver"),
        ({"device": "cuda:3"}, "the device cuda:3 was not found"),
        ({"device": "mps"}, "the device mps was not found"),
        ({"device": "tpu"}, "the device 'tpu' is not supported: choose auto, cpu, cuda"),
        ({"device": "cuda:x"}, "the device 'cuda:x' is not supported"),
        ({"backend": "gpu"}, r"a GPU was not found by PyTorch .*: choose --device cpu \(device\)"),
        ({"backend": "gpu", "device": "cpu"}, "the gpu backend is not supported on the CPU: choose torch"),
        (
            {"backend": "cpu", "device": "cuda"},
            "the cpu backend is not supported on cuda: leave the backend out",
        ),
    ],
)
def test_a_device_that_is_not_there(options: dict[str, Any], message: str) -> None:
    """A traceback of PyTorch's, or a silent fall back to the CPU."""
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


def test_unknown_backends_are_named() -> None:
    with pytest.raises(
        UnsupportedError,
        match="the backend 'tpu' is not supported: use one of cpu, portable, reference, torch, gpu",
    ):
        choose_backend("tpu", None)


def test_without_pytorch(monkeypatch: Any) -> None:
    """An ImportError, or an auto that wants PyTorch."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else real(name))
    monkeypatch.setattr("kukri.kernels._DRIVERS", ("/",))
    assert choose_backend(None, "auto") == ("cpu", None)
    for options in ({"device": "cuda"}, {"backend": "torch"}, {"backend": "gpu", "device": "auto"}):
        with pytest.raises(ConfigError, match=r"needs the package torch: run `pip .*`, or leave it out"):
            LLM(**options)


@pytest.mark.parametrize(("free_bytes", "kv_bytes"), [(1000, None), (200_000, 300_000)])
def test_too_little_memory_is_said_before_weights_are_copied(
    free_bytes: int, kv_bytes: int | None, tiny_path: Path, monkeypatch: Any
) -> None:
    """An allocation that fails amid loading, or a KV cache that nobody counted."""
    monkeypatch.setattr("kukri.kernels.pytorch.free_bytes", lambda device: free_bytes)
    monkeypatch.setattr("kukri.kernels.pytorch.constants.to_device", None)
    with pytest.raises(ConfigError, match=r"cpu must have more than 0\.00 GiB of free memory for"):
        LLM(tiny_path, backend="torch", kv_bytes=kv_bytes)


_LIBRARY = "import kukri; kukri.LLM(sys.argv[1], max_context=64).generate('a', max_tokens=2)"
_COMMAND = """
from kukri.cli import main
sys.argv[1:] = ["run", "-m", sys.argv[1], "--raw", "a", "--max-tokens", "2"]
try:
    main()
except SystemExit as end:
    assert not end.code
"""


@pytest.mark.parametrize("start", [_LIBRARY, _COMMAND], ids=["library", "command"])
def test_the_cpu_backend_does_not_look_for_pytorch(start: str, tiny_path: Path) -> None:
    """A search of all of sys.path at each start, with PyTorch or without; or a second to import it."""
    script = f"""
import sys
looked_for = []
class Seen:
    def find_spec(self, name, path=None, target=None):
        looked_for.append(name.split(".")[0])
sys.meta_path.insert(0, Seen())
{start}
print(sorted({{"numpy", "torch", "triton"}} & set(looked_for)), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny_path)], capture_output=True, text=True, check=True
    )
    assert done.stderr.split("\n")[-2] == "['numpy']"


@pytest.mark.full
def test_the_command_line_takes_a_device(tiny_path: Path) -> None:
    """An option that a command does not pass on."""
    script = "import sys; from kukri.cli import main; main()"
    command = ["run", "-m", str(tiny_path), "--raw", "a", "--device", "tpu"]
    done = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True)
    assert done.returncode == 2
    assert "the device 'tpu' is not supported" in done.stderr
