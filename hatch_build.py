"""Build hooks: whether a wheel carries compiled kernels, or depends on Numba, which compiles them.

KUKRI_KERNELS says for which processors: `all`, the best level that this `host` runs, or names of levels
(kukri/kernels/cpu/compile/levels.py) with commas between them. Without it no kernels are compiled, which
takes minutes, and the wheel needs Numba.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

# Compiled kernels are for Linux on x86-64. All wheels of a release should have the same dependencies, because
# some installers read them of one wheel only, so the condition stands in the wheel with kernels too.
ELSEWHERE = "sys_platform != 'linux' or platform_machine != 'x86_64'"
WANTED = os.environ.get("KUKRI_KERNELS", "")
# The oldest C library that NumPy's wheels run on. An index takes no wheel for `linux`, which is what pip
# takes on every Linux that it built the wheel on.
RELEASED, OWN = "manylinux_2_28_x86_64", "linux_x86_64"


class Dependencies(MetadataHookInterface):
    """Adds Numba to the dependencies, and the people and addresses of packaging/release.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `dependencies` to those in the hook's table of pyproject.toml, and Numba: everywhere, or where
        compiled kernels are of no use.
        """
        release = runpy.run_path(str(Path(self.root) / "packaging" / "release.py"))
        metadata.update(release["project_fields"](release["read_facts"]()))
        compiler = metadata["optional-dependencies"]["compile"]
        if WANTED:
            compiler = [f"{package}; {ELSEWHERE}" for package in compiler]
        metadata["dependencies"] = [*self.config["dependencies"], *compiler]


class CompiledKernels(BuildHookInterface[Any]):
    """Compiles the kernels and puts them into the wheel."""

    def dependencies(self) -> list[str]:
        """Needed to compile: what kernels import."""
        return ["numpy>=2.2", "numba>=0.66", "platformdirs>=4"] if WANTED else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles in a process of its own; not for `pip install -e`, whose kernels may be edited."""
        self._directory = Path(tempfile.mkdtemp())
        if WANTED and version != "editable":
            program = Path(self.root) / "packaging" / "wheel_kernels.py"
            command = [sys.executable, str(program), str(self._directory), WANTED]
            # in an environment of its own pip names the packages to build with by this variable
            paths = os.pathsep.join(filter(None, (self.root, os.environ.get("PYTHONPATH"))))
            subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=True)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{RELEASED if WANTED == 'all' else OWN}"
            build_data["force_include"][str(self._directory)] = "kukri/kernels/cpu/compile/shipped"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the files, which are in the wheel."""
        shutil.rmtree(self._directory)
