"""Errors of tasks on Ray: `pytest -n0 -m ray tests/scale`, with the extra `ray-test`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kukri.errors import KukriError
from tests.test_errors import classes, differences, fail_as, made

pytestmark = pytest.mark.ray
ray: Any = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    yield
    ray.shutdown()


def test_a_task_gives_its_error() -> None:
    """Catches an error that Ray cannot make again, and one whose class Ray cannot combine with its own."""
    task = ray.remote(max_retries=0)(fail_as)
    faults = []
    for kind in classes():
        error = made(kind)
        with pytest.raises(KukriError) as raised:
            ray.get(task.remote(kind), timeout=60)
        assert isinstance(raised.value, kind), f"an except clause for {kind.__name__} misses {raised.value!r}"
        faults += differences(error, raised.value.cause)  # type: ignore[attr-defined]
        faults += [
            f"{kind.__qualname__}.{name}: {getattr(raised.value, name)!r}"
            for name, value in vars(error).items()
            if getattr(raised.value, name) != value
        ]
    assert not faults, "\n".join(faults)
