"""Counts instructions of ARM's matrix kernels, without an ARM processor.

    python -m benchmarks.arm_instructions

For each weight type, by sdot and by smmla: instructions for a token and 32 inputs of 16 rows, of 4 tokens,
and of these the products, what moves lanes, and what spills registers. What comes once a block of 256 is not
counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

# not MXFP4, whose words are in two loops
TYPES = ("Q4_0", "Q4_1", "Q8_0", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
N_TOKENS = 4  # in a kernel's last loop
# instruction -> features of LLVM that choose it, rows x tokens x inputs of a product
LEVELS = {"sdot": ("+neon,+lse,+dotprod", 4 * 4), "smmla": ("+neon,+lse,+dotprod,+i8mm", 2 * 2 * 8)}
KINDS = {
    "all": r".",
    "products": r"(sdot|smmla)\t",
    "lanes": r"(zip|uzp|trn|tbl|ext|dup|addp|ld1r)\w*\t",
    "spills": r"(ld|st)\w+\t.*\[sp",
}


def count(assembly: str, products: int) -> dict[str, float]:
    """Instructions of each kind for a token and group, by the last loop with products, so many a group."""
    code: list[str] = []
    labels: dict[str, int] = {}
    loops: dict[int, int] = {}  # by their first instruction, the one after their last
    for line in assembly.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif re.match(r"\t[a-z]", line):
            code.append(line.strip())
            target = re.search(r"(\.LBB\w+)", line)
            if target and target[1] in labels:
                loops[labels[target[1]]] = len(code)

    def tally(start: int, stop: int, kind: str = "products") -> int:
        return sum(bool(re.match(KINDS[kind], line)) for line in code[start:stop])

    with_products = sorted(loop for loop in loops.items() if tally(*loop))
    start, stop = with_products[-1]
    found = tally(start, stop)
    counts = {}
    for kind in KINDS:
        inner = tally(start, stop, kind)
        if found < products:  # a loop over words, in one over groups
            outer = tally(*with_products[-2], kind) - inner
            counts[kind] = (outer + inner * products / found) / N_TOKENS
        else:
            counts[kind] = inner * products / found / N_TOKENS
    return counts


def assembly_of(features: str, kernel: str) -> str:
    """A kernel's assembly for a processor with these features."""
    source = (
        "from tests.kernels.compile_for_arm import aim_at_arm, assembly; "
        f"aim_at_arm(); print(assembly({kernel!r}))"
    )
    env = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", source], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def main() -> None:
    """Prints a row for each type and level, or with --json a line of all counts."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.arm_instructions",
        description="Count instructions of ARM's matrix kernels for a token and 32 inputs of 16 rows.",
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    as_json = parser.parse_args().json
    if not as_json:
        print("type    by     " + "".join(f"{kind:>10}" for kind in KINDS))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in TYPES:
        for level, (features, size) in LEVELS.items():
            counts = count(assembly_of(features, f"linear_{name}"), 16 * 32 * N_TOKENS // size)
            found.setdefault(name, {})[level] = counts
            if not as_json:
                print(f"{name:8}{level:7}" + "".join(f"{counts[kind]:10.1f}" for kind in KINDS), flush=True)
    if as_json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
