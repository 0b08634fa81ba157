"""ARM's kernels: compiled here for it, and run under an emulator if there is one (.ci/arm)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.arm_instructions import assembly_of
from kukri.kernels.cpu.compile import features
from kukri.kernels.cpu.compile.features import cpu_target
from tests.kernels.small_programs import TYPES
from tests.tiny_gguf import write_tiny

HERE = Path(__file__).parent
ARM_PYTHON = os.environ.get("KUKRI_ARM_PYTHON", "")
# the emulator does not say what it has: what multiplies int8 -> features, and the types that are tried
TARGETS = {
    "i8mm": ("+neon,+lse,+dotprod,+i8mm", TYPES),
    "dotprod": ("+neon,+lse,+dotprod", TYPES),
    "generic": ("+neon", ("F16", "Q4_0", "Q8_0")),
}


def compile_for_arm(directory, flags, names):
    env = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": flags}
    command = [sys.executable, str(HERE / "compile_for_arm.py"), str(directory)]
    halves = [subprocess.Popen([*command, *names[i::2]], env=env) for i in range(2)]
    assert [half.wait() for half in halves] == [0, 0]


@pytest.mark.parametrize(
    ("listed", "name", "has_both"),
    [
        ("asimd atomics asimddp", "", (True, False)),
        ("asimd atomics asimddp i8mm", "", (True, True)),
        ("asimd atomics", "", (False, False)),
        ("", "neoverse-n1", (True, False)),
        ("", "neoverse-v1", (True, True)),
        ("", "cortex-x1", (True, False)),
    ],
)
def test_what_a_processor_has(listed, name, has_both, monkeypatch):
    """Would catch weights laid out for an instruction that the processor lacks."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(features, "_first_cpu", lambda: {"Features": listed})
    monkeypatch.setattr(features, "_llvm_host", lambda: ("cortex-a72", {}))
    monkeypatch.delenv("KUKRI_CPU", raising=False)
    monkeypatch.setenv("NUMBA_CPU_NAME", name)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "")
    target = cpu_target.__wrapped__()
    assert (target.has_int8_dot, target.has_int8_matrix) == has_both


@pytest.mark.representative(4)
def test_products_use_the_dot_product():
    """Would catch a lowering that LLVM cannot compile for ARM, and sums by shuffles."""
    code = assembly_of(TARGETS["dotprod"][0], "linear_Q8_0")
    assert len(re.findall(r"\tsdot\t", code)) >= 4 * (1 + 2 + 4)  # a group for each number of tokens
    assert not re.findall(r"\t(zip|uzp|tbl)\w*\t", code)


@pytest.mark.full
def test_products_use_matrix_products():
    """Would catch both halves of the rows multiplied for each word, and shuffles of bytes."""
    code = assembly_of(TARGETS["i8mm"][0], "linear_Q8_0")
    assert len(re.findall(r"\tsdot\t", code)) == 8  # one token: two words
    assert len(re.findall(r"\tsmmla\t", code)) == 8 * (1 + 2 + 2)  # 2, 4 and 8 tokens
    assert not re.findall(r"\t(zip|uzp|tbl)\w*\tv\d+\.(8b|16b)", code)


@pytest.mark.full
def test_the_executor_orders_memory():
    """Would catch an atomic that x86 forgives: ARM reorders what no instruction keeps in order."""
    code = assembly_of("+neon,+lse", "run_plan")
    used = set(re.findall(r"^\t(ldadd\w*|ldap?r|stlr|isb)\b", code, re.MULTILINE))
    assert used == {"ldar", "stlr", "ldadda", "ldaddal", "ldadd", "isb"}


@pytest.mark.slow
@pytest.mark.skipif(not ARM_PYTHON, reason="needs Python under an emulator: .ci/arm")
@pytest.mark.parametrize("lowering", TARGETS)
def test_results_are_those_of_this_machine(lowering, tmp_path):
    """Would catch a lowering that drops a sign, saturates or rounds otherwise: all results, to the bit.

    Floats too: every kernel states the order of its sums, and all processors round alike.
    """
    flags, types = TARGETS[lowering]
    model = write_tiny(tmp_path / "tiny.gguf", weight_type="Q4_0")
    script = [str(HERE / "kernel_results.py")]
    here = subprocess.run(
        [sys.executable, *script, tmp_path / "here.npz", model, *types], capture_output=True, text=True
    )
    assert here.returncode == 0, here.stderr[-3000:]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": flags,
        "KUKRI_CACHE_DIR": str(tmp_path / "cache"),
    }
    ask = (
        "from kukri.kernels.cpu.compile import features, kernel_cache; "
        "cpu = features.cpu_target(); "
        "print('i8mm' if cpu.has_int8_matrix else cpu.lowering, kernel_cache.cache_dir())"
    )
    asked = subprocess.run([ARM_PYTHON, "-c", ask], env=env, capture_output=True, text=True, check=True)
    found, directory = asked.stdout.split()
    assert found == lowering
    kernels = json.loads(here.stdout)
    if lowering == "generic":  # it multiplies rows of logits as int16
        kernels = [name.replace("q8x2", "q16") for name in kernels]
    compile_for_arm(directory, flags, kernels)
    there = subprocess.run(
        [ARM_PYTHON, *script, tmp_path / "there.npz", model, *types], env=env, capture_output=True, text=True
    )
    assert there.returncode == 0, there.stderr[-3000:]
    want, got = np.load(tmp_path / "here.npz"), np.load(tmp_path / "there.npz")
    names = [
        name
        for name in want.files
        if cpu_target().has_int8_dot == (lowering != "generic") or "logits" not in name
    ]
    assert len(names) > 10
    assert [name for name in names if not np.array_equal(want[name], got[name])] == []
