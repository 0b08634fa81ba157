"""Kernels that start while the one before them runs; that they do is a device's, and not tested here."""

import ast
import inspect
import re
from importlib import import_module
from textwrap import dedent


def launched():
    """Each kernel that a module launches."""
    from kukri.kernels.gpu import attention, experts, products, recurrent, rows

    found = {}
    for launcher in (attention, experts, products, recurrent, rows):
        for module, name in re.findall(r"(\w+_kernels)\.(?!py\b)(\w+)", inspect.getsource(launcher)):
            kernel = getattr(import_module(f"kukri.kernels.gpu.{module}"), name)
            if hasattr(kernel, "fn"):
                found[f"{module}.{name}"] = kernel.fn
    return found


def test_every_kernel_waits_for_its_inputs_first():
    """A read of what the kernel before has not written yet, which happens on a device now and then."""
    hasty = []
    for name, kernel in launched().items():
        (function,) = ast.parse(dedent(inspect.getsource(kernel))).body
        assert isinstance(function, ast.FunctionDef)
        if ast.unparse(function.body[1]) != "await_inputs()":  # after the docstring
            hasty.append(name)
    assert not hasty


def test_all_launches_are_looked_at():
    """A kernel or a launcher that the test above does not find."""
    assert len(launched()) == 20
