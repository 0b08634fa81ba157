"""Build hooks: whether a wheel carries compiled kernels, or depends on Numba, which compiles them.

KUKRI_KERNELS says for which processors: `all`, the best level that this `host` runs, or names of levels
(kukri/kernels/cpu/compile/levels.py) with commas between them. Without it no kernels are compiled, which
takes minutes, and the wheel needs Numba.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

# Compiled kernels are for Linux on x86-64; a wheel has no other code in it and installs everywhere.
ELSEWHERE = "sys_platform != 'linux' or platform_machine != 'x86_64'"
WANTED = os.environ.get("KUKRI_KERNELS", "")


class Dependencies(MetadataHookInterface):
    """Adds the extra `compile` to the dependencies: everywhere, or where compiled kernels are of no use."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets `dependencies` to those in the hook's table of pyproject.toml, and Numba."""
        compiler = metadata["optional-dependencies"]["compile"]
        if WANTED:
            compiler = [f"{package}; {ELSEWHERE}" for package in compiler]
        metadata["dependencies"] = [*self.config["dependencies"], *compiler]


class CompiledKernels(BuildHookInterface[Any]):
    """Compiles the kernels and puts them into the wheel."""

    def dependencies(self) -> list[str]:
        """Needed to compile: what kernels import."""
        return ["numpy>=2.2,<3", "numba>=0.61,<1", "platformdirs>=4,<5"] if WANTED else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles in a process of its own; not for `pip install -e`, whose kernels may be edited."""
        self._directory = Path(tempfile.mkdtemp())
        if WANTED and version != "editable":
            command = [
                sys.executable,
                "-m",
                "kukri.kernels.cpu.compile.wheel_kernels",
                str(self._directory),
                WANTED,
            ]
            subprocess.run(command, cwd=self.root, check=True)
            build_data["force_include"][str(self._directory)] = "kukri/kernels/cpu/compile/shipped"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the files, which are in the wheel."""
        shutil.rmtree(self._directory)
