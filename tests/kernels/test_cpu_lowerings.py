"""The kernel tests once more, compiled for other CPUs: each int8 dot product that this host can run.

Of the tests, those that reach every kernel and every way of multiplying; all of them with `pytest -m slow`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kukri.kernels.cpu.compile.features import cpu_target, has_levels, host_instructions, host_level
from kukri.kernels.cpu.compile.levels import LEVELS
from tests.quick import quick


def runnable():
    """Levels that the host runs, but for its own, under which the tests have run already."""
    return [
        one for one in LEVELS if has_levels() and one != host_level() and one.needs <= host_instructions()
    ]


def lowerings():
    return [level.name for level in runnable() if level.lowering != cpu_target().lowering]


@pytest.mark.full
@pytest.mark.parametrize("lowering", quick(lowerings(), ("avx2", "generic")))
def test_kernels_under(lowering):
    """Would catch a lowering that saturates, drops a sign or converts float16 wrongly where only it runs.

    Each type's kernels take seconds to compile, each shape of attention too: here are types of each kind,
    whose weights are unsigned, signed, looked up or floats, and on AVX2, where every type adds up in its own
    way, those that people run most. Generic code, which takes longest to compile, has one type.
    """
    types = {"avx2": "Q4_0 or Q4_1 or Q4_K or Q6_K or Q8_0 or IQ4_XS or F16", "generic": "Q4_0"}
    chosen = types.get(lowering, "Q4_K or Q8_0 or IQ4_XS or F16")
    matrices = f"(every_width or extreme_weights or extreme_logit) and ({chosen})"
    attention = "f16 or q8_0" if lowering == "avx2" else "f16"
    attends = f"test_attention and 3-2-64 and ({attention})"
    run_kernel_tests(lowering, ["-k", f"({attends}) or silu or keeps_nan or {matrices}"])


@pytest.mark.slow
@pytest.mark.parametrize("level", [level.name for level in runnable()])
def test_all_kernel_tests_under(level):
    """Would catch what the choice above leaves out."""
    run_kernel_tests(level, [])


def run_kernel_tests(level, selection):
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_CPU")} | {"KUKRI_CPU": level}
    check = "from kukri.kernels.cpu.compile.features import cpu_target; print(cpu_target().level)"
    chosen = subprocess.run(
        [sys.executable, "-c", check], env=env, capture_output=True, text=True, check=True
    )
    assert chosen.stdout.strip() == level
    tests = [str(Path(__file__).with_name(f"test_cpu_{name}.py")) for name in ("linear", "ops", "attention")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *selection, *tests],
        env=env,
        capture_output=True,
        text=True,
        timeout=1800,  # against a test that hangs, not against a busy machine
    )
    assert done.returncode == 0, done.stdout[-3000:]
