"""The kernels that a wheel carries, compiled: `python packaging/wheel_kernels.py DIR LEVELS`.

`hatch_build.py` runs this. All kernels of fixed sizes are compiled, and attention of the sizes that common
models have. Processes on all cores share the work through a cache of their own.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kukri.errors import ConfigError
from kukri.kernels.cpu.compile.compiling import find_source
from kukri.kernels.cpu.compile.features import has_levels, host_level, usable_cores
from kukri.kernels.cpu.compile.kernel_cache import KERNEL_MODULES, KERNEL_PACKAGE, read_cached
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.levels import LEVELS
from kukri.kernels.cpu.compile.shipped_kernels import write_shipped
from kukri.kernels.kv_types import KV_BLOCK

# (query heads to a key head, head size) of common models
ATTENTION_SIZES = (
    (1, 32),  # MiniLM, small BGE and E5
    (1, 64),  # SmolLM2-1.7B, BERT, Nomic, phi-1.5
    (1, 80),  # phi-2
    (1, 96),  # Phi-3.5-mini
    (1, 128),  # OLMo2-1B, OLMoE, Llama 2
    (2, 64),  # LFM2-350M
    (2, 128),  # Qwen3-0.6B and 1.7B
    (2, 256),  # Gemma2-2B, Gemma 3 4B
    (3, 64),  # SmolLM2-135M and 360M
    (3, 128),  # Llama-3.2-3B, Phi-4-mini
    (3, 256),  # EmbeddingGemma
    (4, 64),  # Llama-3.2-1B, Granite-2B, LFM2-1.2B
    (4, 128),  # SmolLM3-3B, Qwen3-4B, Llama-3.1-8B, Mistral-7B
    (4, 256),  # Gemma 3 270M and 1B, Qwen3.5
    (6, 128),  # Qwen2.5-1.5B
    (7, 64),  # Qwen2.5-0.5B
    (7, 128),  # Qwen2.5-7B
    (8, 64),  # TinyLlama, gpt-oss
    (8, 128),  # Qwen2.5-3B, Qwen3-30B-A3B, ERNIE-4.5-0.3B
    (12, 128),  # code models of 24 heads
)
SOFTCAP_SIZES = ((2, 256), (2, 128))  # Gemma 2
SOFTCAP_FAMILIES = ("attend_f16_softcap",)
BIASED_SIZES = ((1, 64),)  # all-mpnet-base-v2, Jina v2
MOST_PROCESSES = 16  # each takes some 250 MB


def wheel_kernel_names() -> list[str]:
    """Return the names of all kernels of a wheel, beginning with those that take longest to compile."""
    names = [f"attend_f16[{g},{d}]" for g, d in ATTENTION_SIZES]
    names += [f"attend_q8_0[{g},{d}]" for g, d in ATTENTION_SIZES if d % KV_BLOCK == 0]
    names += [f"{family}[{g},{d}]" for family in SOFTCAP_FAMILIES for g, d in SOFTCAP_SIZES]
    names += [f"attend_f16_biased[{g},{d}]" for g, d in BIASED_SIZES]
    for module in KERNEL_MODULES:
        found = importlib.import_module(f"{KERNEL_PACKAGE}.{module}").KERNELS
        names += [name for name, source in found.items() if isinstance(source, KernelSource)]
    return sorted(names, key=lambda name: not name.endswith("_K_q8x2"))


def compile_for_wheel(path: Path) -> None:
    """Compiles the kernels for the level in KUKRI_CPU on all cores and writes them to a file.

    Raises ConfigError if some cannot be compiled.
    """
    names = wheel_kernel_names()
    with tempfile.TemporaryDirectory() as empty:
        os.environ["KUKRI_CACHE_DIR"] = empty
        program = "from kukri.kernels.cpu.compile.compiling import help_compiling; help_compiling()"
        command = [sys.executable, "-c", program, *names]
        helpers = [
            subprocess.Popen(command, stdin=subprocess.PIPE)  # which they end with
            for _ in range(min(usable_cores(), MOST_PROCESSES))
        ]
        for helper in helpers:
            helper.wait()
        kernels = {name: (find_source(name)[0], code) for name in names if (code := read_cached(name))}
    if len(kernels) < len(names):
        missing = ", ".join(name for name in names if name not in kernels)
        raise ConfigError(f"kernels were not compiled, or their sources changed meanwhile: {missing}")
    write_shipped(path, kernels)


def main() -> None:
    """Compiles into a directory for levels with commas between them, for `all` or for this `host`'s best.

    Each level has a process of its own, as modules of kernels are made for one.
    """
    directory, wanted = sys.argv[1:]
    if not has_levels():
        sys.exit("kernels for a wheel are compiled on x86-64 Linux: unset KUKRI_KERNELS")
    if os.environ.get("KUKRI_CPU") == wanted:
        compile_for_wheel(Path(directory) / f"{wanted}.kernels")
        return
    all_levels = ",".join(level.name for level in LEVELS)
    for level in {"all": all_levels, "host": host_level().name}.get(wanted, wanted).split(","):
        command = [sys.executable, __file__, directory, level]
        subprocess.run(command, env=os.environ | {"KUKRI_CPU": level}, check=True)


if __name__ == "__main__":
    main()
