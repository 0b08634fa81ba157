"""Makes the Triton kernels run under Triton's interpreter, unless KUKRI_TEST_DEVICE names a device.

The variable is read when a kernel is decorated and when it is launched, so it is set while the modules are
imported (Triton itself in tests/conftest.py, before torch can) and during these tests. Other tests of the
process, and programs that they start, do not see it.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.kernels.gpu.device import DEVICE, IS_INTERPRETED

os.environ["TRITON_INTERPRET"] = str(int(IS_INTERPRETED))
try:
    import triton  # noqa: F401
except ImportError as error:
    if os.environ.get("CI"):
        raise RuntimeError("CI tests the Triton kernels: pip install -e '.[gpu-test]'") from error
    HAS_TRITON = False
else:
    import benchmarks.prototypes.delta_chunks
    import benchmarks.prototypes.persistent  # noqa: F401
    import kukri.kernels.gpu.ops  # noqa: F401

    HAS_TRITON = True
finally:
    del os.environ["TRITON_INTERPRET"]


class _WithoutTriton(pytest.Module):
    def collect(self):
        pytest.skip("triton is not installed: pip install -e '.[gpu-test]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if HAS_TRITON else _WithoutTriton.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def _on_device(monkeypatch):
    """Interpreted; or tensors that a test makes lie on the device, and are copied where NumPy reads them."""
    if IS_INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        yield
        return
    plain = torch.Tensor.numpy
    monkeypatch.setattr(torch.Tensor, "numpy", lambda x: plain(x.cpu()))
    with torch.device(DEVICE):
        yield
