"""What a step launches on a device, counted."""

from __future__ import annotations

from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tests.kernels.gpu.device import IS_INTERPRETED


class LaunchCounter(TorchDispatchMode):
    """Counts launches of Triton's kernels and PyTorch's ops, but for those that only make room or views."""

    FREE = (
        "empty",
        "view",
        "slice",
        "split",
        "split_with_sizes",
        "as_strided",
        "select",
        "unfold",
        "unsqueeze",
        "detach",
        "alias",
        "_unsafe_view",
    )

    def __init__(self, monkeypatch):
        super().__init__()
        self.counts = {}
        launched = InterpretedFunction if IS_INTERPRETED else JITFunction
        run = launched.run

        def counted(kernel, *args, **kwargs):
            self._count(kernel.fn.__name__)
            with self._paused():
                return run(kernel, *args, **kwargs)

        monkeypatch.setattr(launched, "run", counted)
        self._is_counting = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if self._is_counting and name not in self.FREE:
            self._count(name)
        return func(*args, **(kwargs or {}))

    def _count(self, name):
        self.counts[name] = self.counts.get(name, 0) + 1

    @contextmanager
    def _paused(self):
        self._is_counting = False
        yield
        self._is_counting = True
