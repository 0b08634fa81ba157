"""The checks of a device: they pass on the CPU, and find what is wrong."""

from __future__ import annotations

import json

import pytest

from kukri.bench.device_checks import Sizes, check_backend
from kukri.kernels.reference_sampling import ReferenceSampling
from kukri.terminal.doctor import check_gpu
from tests.lazy_imports import lazy_imports

with lazy_imports():
    from kukri.kernels import pytorch
    from kukri.kernels.pytorch import ops as torch_ops

SMALL = Sizes(tokens=(1, 9), n_columns=256, n_rows=21, contexts=(40, 17, 3), n_layers=1)


def one_thread() -> pytorch.TorchBackend:
    return pytorch.TorchBackend(n_threads=1)


def test_all_pass_on_the_cpu():
    """A check that fails on a right backend, or compares nothing."""
    checks = list(check_backend(one_thread, sizes=SMALL))
    assert len(checks) > 20
    assert all(check.passed and check.error < 1e-4 for check in checks)


@pytest.mark.parametrize(
    ("op", "found"),
    [("linear", "product"), ("attention", "attention"), ("map", "model"), ("head_norm", "model")],
)
def test_a_wrong_op_is_found(op, found, monkeypatch):
    """Checks that a wrong kernel passes."""
    right = getattr(torch_ops.TorchOps, op)

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        return result.roll(1, dims=-1)

    monkeypatch.setattr(torch_ops.TorchOps, op, wrong)
    failed = {check.name for check in check_backend(one_thread, sizes=SMALL) if not check.passed}
    assert any(name.startswith(found) for name in failed)


def test_wrong_sampling_is_found(monkeypatch):
    """A device that chooses other tokens than the definition does."""

    class FirstToken(ReferenceSampling):
        def choose(self, records, logits):
            super().choose(records, logits)
            records.fields["token"][3] = 0

    monkeypatch.setattr(pytorch.TorchBackend, "sampling", FirstToken())
    *_, check = check_backend(one_thread, sizes=SMALL)
    assert (check.name, check.passed, check.error) == ("sampling, tokens", False, 1.0)


@pytest.mark.full
def test_the_command_says_what_failed(monkeypatch, capsys):
    """A failure that a script cannot see."""
    monkeypatch.setattr("kukri.bench.device_checks.check_backend.__defaults__", (None, SMALL))
    check_gpu("cpu", as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    assert report["device"] == "cpu"
    monkeypatch.setattr(torch_ops.TorchOps, "map", lambda self, name, x, other=None, a=0.0, b=0.0: x)
    with pytest.raises(SystemExit, match="1"):
        check_gpu("cpu", as_json=False)
    text = capsys.readouterr().out
    assert "FAILED torch: model, logits" in text
    assert f"1 of {len(report['checks'])} checks FAILED" in text
