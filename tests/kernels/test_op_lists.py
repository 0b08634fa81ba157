"""The lists of ops, held against one another: an op that one of them lacks fails here, without a device."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from kukri.interp.tapes.tape import Tape
from kukri.kernels import op_set
from kukri.kernels.array_ops import ArrayOps
from kukri.kernels.op_set import Ops
from tests.kernels.small_programs import check_ops

GPU_OPS = Path(op_set.__file__).with_name("gpu") / "ops.py"
# The GPU's ops that are PyTorch's alone: no model gives them what a kernel has deferred.
INHERITED = {"embed"}
WITHOUT_DERIVATIVE = {"scan"}  # of Mamba 2


def ops() -> set[str]:
    return {name for name in vars(Ops) if not name.startswith("_")}


def test_the_tape_has_every_op_with_its_parameters() -> None:
    """Catches an op without a derivative: models that use it have no gradients."""
    assert {name for name in ops() if not hasattr(Tape, name)} == WITHOUT_DERIVATIVE
    check_ops(Tape, but=WITHOUT_DERIVATIVE)


def test_the_gpu_has_every_op_or_inherits_it_on_purpose() -> None:
    """Catches an op of PyTorch that nobody meant: it would get a product that no kernel has made."""
    shared = {name for name in ops() if "self.floats" in inspect.getsource(getattr(ArrayOps, name))}
    classes = [one for one in ast.parse(GPU_OPS.read_text()).body if isinstance(one, ast.ClassDef)]
    own = next(one for one in classes if one.name == "TritonOps")
    assert ops() - shared - {one.name for one in own.body if isinstance(one, ast.FunctionDef)} == INHERITED
