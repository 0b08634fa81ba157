"""Compiles every Triton kernel for real GPUs without one, and reads from the machine code what it costs.

    python -m benchmarks.gpu_compile                      # all kernels for sm_80, sm_90 and gfx942
    python -m benchmarks.gpu_compile gemv attention --json rows.json

For each kernel and target: registers, bytes spilled, shared memory, the narrowest and the usual load of
weights, matrix instructions, and the issue slots per weight of the innermost loop, which bound the share of
memory bandwidth that a kernel can reach. Ends with 1 if a kernel does not compile or breaks a limit of
`failures`. Needs triton (`pip install triton`), whose wheel has ptxas and the disassemblers; no GPU and no
CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from benchmarks.prototypes import delta_chunks_kernel, layer_kernel
from kukri.kernels.activations import ACTIVATIONS
from kukri.kernels.gpu import (
    attention_kernels,
    expert_kernels,
    linear_kernels,
    recurrent_kernels,
    rope_kernels,
    row_kernels,
    tiles,
)
from kukri.kernels.gpu.pack import PACKED_TYPES, form_of, pack
from kukri.kernels.weight_handles import Weight
from kukri.quant.types import QUANT_TYPES

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
KV_NUMBERS = {"f16": "*fp16", "q8_0": "*i8", "fp8": "*u8", "fp8_native": "*u8"}
MAX_SLOTS = {
    "IQ4_XS": 2.7,
    "MXFP4": 2.6,
    "Q5_K": 2.55,
    "Q6_K": 3.0,  # small programs load activations more often, and were measured to be faster
    "IQ3_XXS": 2.75,
    "IQ3_S": 2.75,
    "NVFP4": 2.65,
    **dict.fromkeys(("IQ1_S", "IQ2_XXS"), 3.35),  # of 3 bits that choose from 8 levels
    **dict.fromkeys(("IQ1_M", "IQ2_XS", "IQ2_S"), 3.5),
}  # per weight of a GEMV for one token: what these reach
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):  # and with an older assembler
    MAX_SLOTS |= {"IQ4_XS": 2.95, "MXFP4": 2.85, "Q5_K": 2.95, "Q6_K": 3.3, "IQ4_NL": 2.7, "Q5_0": 2.55}
    MAX_SLOTS |= {"Q2_K": 2.6, "Q3_K": 2.85}
MAX_SLOTS_OTHERS = 2.5  # the aim
# issue slots of a card for each byte that it reads at full bandwidth: SMs * lanes * clock / bandwidth
SLOTS_PER_BYTE = {
    "sm_80": 108 * 128 * 1.41e9 / 2.04e12,  # A100 80 GB
    "sm_90": 132 * 128 * 1.755e9 / 3.35e12,  # H100 SXM
}


@dataclass(frozen=True)
class Case:
    """A kernel with the constants and options that it is launched with."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    n_warps: int
    n_stages: int = 3
    weights: int = 0  # that one program handles in an iteration of the innermost loop; 0: not counted
    type_name: str = ""
    max_registers: int | None = None
    targets: tuple[str, ...] = tuple(TARGETS)
    types: Mapping[str, str] = field(default_factory=dict)  # for arguments whose names do not tell

    @property
    def signature(self) -> dict[str, str]:
        """The type of each argument, in order."""
        return {name: self.types.get(name, argument_type(name)) for name in self.kernel.arg_names}


# The types of arguments by their names, which mean the same in all kernels. What is not here is *fp32.
_NUMBERS = frozenset(["eps", "a", "b", "scale", "softcap", "least", "most"])
_ROWS = {"a": "*fp32", "b": "*fp32"}  # of recurrent kernels, whose a and b are no numbers of an activation
_SIZES = re.compile(r"n_\w+|(?:\w+_)?stride|width|window|group|rows_each|d_model|d_ffn")
_INTEGERS = re.compile(
    r"(?:\w+_)?(?:quants|high|scales)|x[qs]|order|work|experts|positions|slots|page_table|query_start|arrived"
    r"|context_len|state_slots|state_saves"
)
_POINTERS = {"quants8": "*u8", "key_scales": "*fp16", "value_scales": "*fp16", "q_out": "*fp16"}


def argument_type(name: str) -> str:
    """The type of a kernel's argument, as Triton writes it."""
    if name.isupper():
        return "constexpr"
    if name in _NUMBERS:
        return "fp32"
    if _SIZES.fullmatch(name):
        return "i32"
    return _POINTERS.get(name, "*i32" if _INTEGERS.fullmatch(name) else "*fp32")


@dataclass(frozen=True)
class Compiled:
    """Stands in for Triton's driver of a device, as kernels ask it what they are compiled for."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        """The target."""
        return self.target


@dataclass
class Row:
    """A kernel's cost on a target."""

    case: str
    target: str
    registers: int
    spilled: int  # bytes of stack, or of scratch memory on AMD
    shared: int  # bytes
    loop: int = 0  # instructions of the innermost loop
    rest: int = 0  # all others
    slots: float | None = None  # issue slots per weight
    loads: dict[str, int] = field(default_factory=dict)  # from global memory in that loop, by bits
    matrix: dict[str, int] = field(default_factory=dict)  # matrix and dot instructions


def linear_cases() -> list[Case]:
    """The products: each type for one token and for many, the number of tokens of a small batch for some."""
    none = {"HAS_BIAS": False, "HAS_RESIDUAL": False}
    cases = []
    for name in PACKED_TYPES:
        form = form_of(QUANT_TYPES[name])
        for m in (1, 8) if name in ("Q4_K", "Q8_0", "IQ4_XS") else (1,):
            for kind in ("q8", "plain", "rms_norm", "gated_silu", "gelu_exact"):
                if kind not in ("q8", "rms_norm") and name != "Q4_K":
                    continue  # what one type shows of those is true of all
                tile = tiles.gemv_tile(form, m) if kind == "q8" else tiles.fused_tile(m)
                columns = 0 if kind == "q8" else tiles.fused_columns(1536, m, kind == "rms_norm")
                constants = dict(TYPE=form, M=m, BN=tile.rows, ASM=True, INPUT=kind, W=columns, **none)
                constants["UNROLL"] = tile.unroll
                weights = tile.rows * tiles.LANES * 64 * tile.unroll
                label = f"gemv {name} M={m}" + ("" if kind == "q8" else f" {kind}")
                most = None if kind == "q8" else linear_kernels.MAX_REGISTERS
                case = Case(label, linear_kernels.gemv, constants, tile.n_warps, 3, weights, name, most)
                cases.append(case)
        has_experts = name in ("Q4_K", "MXFP4")
        if has_experts:
            tile = tiles.gemv_tile(form, 1)
            constants = dict(TYPE=form, BN=tile.rows, ASM=True, UNROLL=tile.unroll, **none)
            weights, kernel = tile.rows * tiles.LANES * 64 * tile.unroll, linear_kernels.gemv_of_experts
            label = f"gemv {name} of experts, M=1"
            cases.append(Case(label, kernel, constants, tile.n_warps, 3, weights, name))
        for by_expert in (False, True) if has_experts else (False,):
            for n_tokens in (16, 512):
                tile = tiles.expert_tile(n_tokens) if by_expert else tiles.gemm_tile(form, n_tokens)
                constants = dict(TYPE=form, BN=tile.rows, BM=tile.tokens, ASM=True, EXPERTS=by_expert, **none)
                constants |= {"UNROLL": tile.unroll, "SPLIT": False}
                label = f"gemm {name} {tile.rows}x{tile.tokens}{' of experts' if by_expert else ''}"
                most, sizes = (
                    linear_kernels.MAX_REGISTERS if by_expert else None,
                    (tile.n_warps, tile.n_stages),
                )
                case = Case(
                    label, linear_kernels.gemm, constants, *sizes, tile.rows * 64 * tile.unroll, name, most
                )
                cases.append(replace(case, types={"xq": "*i8"}))
    sums = {"W": tiles.LANE_ROWS, "HAS_BIAS": True, "HAS_RESIDUAL": True}
    cases.append(Case("add_lanes", linear_kernels.add_lanes, sums, 4))
    for by_expert in (False, True):
        constants = dict(BN=tiles.F32_ROWS, BK=tiles.F32_COLUMNS, EXPERTS=by_expert, **none)
        label = f"products of fp32{' by expert' if by_expert else ''}"
        cases.append(Case(label, linear_kernels.gemv_f32, constants, 4))
    for dtype in ("fp16", "bf16"):
        for n_tokens, by_expert in ((1, False), (512, False), (1, True), (512, True)):
            tile = tiles.float_tile(n_tokens)
            constants = dict(BN=tile.rows, BM=tile.tokens, BK=tiles.FLOAT_COLUMNS, UPCAST=False, **none)
            constants["EXPERTS"] = by_expert
            label = f"gemm {dtype} {tile.rows}x{tile.tokens}{' of experts' if by_expert else ''}"
            weights, kernel = tile.rows * tiles.FLOAT_COLUMNS, linear_kernels.gemm_float
            case = Case(label, kernel, constants, tile.n_warps, tile.n_stages, weights)
            cases.append(replace(case, types={"w": f"*{dtype}", "x": f"*{dtype}"}))
    return cases


def paged(kv: str) -> dict[str, str]:
    """The types of a cache's keys and values."""
    return dict.fromkeys(("keys", "values"), KV_NUMBERS[kv])


def _attention_targets(d_head: int, kv: str) -> tuple[str, ...]:
    """The targets that a case is compiled for."""
    if kv == "fp8_native":
        return ("sm_90",)
    if (d_head, kv) == (512, "q8_0"):  # gfx942 spills 16 bytes
        return ("sm_80", "sm_90")
    return tuple(TARGETS)


def attention_cases() -> list[Case]:
    """Prefill and decode for heads of 64 to 512, each type of cache, with and without softcap and sinks."""
    cases = []
    for d_head, group in ((64, 3), (128, 4), (256, 8), (512, 8)):
        for kv in KV_NUMBERS if d_head <= 128 else ("f16", "q8_0"):
            for special in (False, True) if (d_head, kv) == (64, "f16") else (False,):
                constants = {"GROUP": group, "K": d_head, "KW": d_head, "KV": kv}
                constants |= {"SOFTCAP": special, "HAS_SINKS": special}
                label = f"d{d_head} {kv}{' softcap sinks' if special else ''}"
                for phase in ("prefill", "decode", "split"):
                    is_prefill = phase == "prefill"
                    tile = tiles.attention_tile(group, d_head, is_prefill)
                    sizes: dict[str, Any] = {"BM": tile.rows, "TILE": tile.tokens}
                    if not is_prefill:
                        sizes |= {"ROTARY": d_head, "SPLIT": phase == "split", "STORES": True}
                    case = Case(
                        f"{phase} {label}",
                        attention_kernels.attention if is_prefill else attention_kernels.decode,
                        constants | sizes,
                        tile.n_warps,
                        tile.n_stages,
                        max_registers=attention_kernels.max_registers(kv, d_head, is_prefill),
                        targets=_attention_targets(d_head, kv),
                        types=paged(kv) | ({"q": "*fp16"} if is_prefill else {}),
                    )
                    cases.append(case)
        constants = {"K": d_head, "KW": d_head, "HB": tiles.MERGE_HEADS, "HAS_SINKS": False}
        cases.append(Case(f"merge d{d_head}", attention_kernels.merge, constants, 4))
    return cases


def row_cases() -> list[Case]:
    """Norms, ops and quantization at the widths of SmolLM2-135M and a 3B model; RoPE with the cache."""
    cases = []
    to_int8 = {"xq": "*i8"}
    for width in (1024, 2048):
        w, warps = {"W": width}, tiles.row_warps(width)
        cases.append(Case(f"rms_norm {width}", row_kernels.rms_norm, w, warps))
        cases.append(Case(f"rms_norm_q8 {width}", row_kernels.rms_norm_q8, w, warps, types=to_int8))
    w, warps = {"W": tiles.ROW_COLUMNS}, tiles.row_warps(tiles.ROW_COLUMNS)
    cases.append(Case("quantize_q8", row_kernels.quantize_q8, w, warps, types=to_int8))
    for name in ACTIVATIONS:
        cases.append(Case(f"map {name}", row_kernels.activate, w | {"NAME": name}, warps))
    constants = w | {"NAME": "gated_silu"}
    cases.append(Case("map gated_silu q8", row_kernels.activate_q8, constants, warps, types=to_int8))
    for d_head, kv in ((64, "f16"), (128, "q8_0"), (128, "fp8")):
        constants = {"K": d_head, "KW": d_head, "ROTARY": d_head, "KV": kv}
        cases.append(Case(f"rope d{d_head} {kv}", rope_kernels.rope_and_store, constants, 1, types=paged(kv)))
    return cases


def mixture_cases() -> list[Case]:
    """The choice of 8 of 128 experts, and the sum over them."""
    constants = {"N_USED": 8, "E": 128, "NORMALIZED": True}
    warps = tiles.row_warps(tiles.ROW_COLUMNS)
    sums = {"N_USED": 8, "W": tiles.ROW_COLUMNS, "HAS_RESIDUAL": True}
    return [
        Case("route 128", expert_kernels.route, constants, 1),
        Case("combine 8", expert_kernels.combine, sums, warps),
    ]


def recurrent_cases() -> list[Case]:
    """Convolutions as LFM2 and Qwen3.5 have them, a state space and a delta rule with 128 x 128 states."""
    cases = []
    for n_taps, n_tokens in ((3, 1), (4, tiles.CONV_TOKENS)):
        constants = {"N_TAPS": n_taps, "TOKENS": n_tokens, "W": tiles.CONV_COLUMNS}
        constants |= {"HAS_BIAS": n_taps == 4, "IS_ACTIVATED": n_taps == 4}
        cases.append(Case(f"conv {n_taps}", recurrent_kernels.conv, constants, 4))
    sizes = {"P": 128, "PB": tiles.STATE_COLUMNS}
    cases.append(Case("scan 128", recurrent_kernels.scan, sizes | {"N": 128, "NW": 128}, 4, types=_ROWS))
    constants = sizes | {"K": 128, "KW": 128, "ARE_TILED": True}
    cases.append(Case("delta_rule 128", recurrent_kernels.delta_rule, constants, 4, types=_ROWS))
    return cases


def delta_chunk_cases() -> list[Case]:
    """The prototype of a delta rule in chunks, with 128 x 128 states."""
    sizes = {"K": 128, "KB": delta_chunks_kernel.STATE_ROWS, "P": 128, "PB": tiles.STATE_COLUMNS}
    most, kernel = delta_chunks_kernel.MAX_REGISTERS, delta_chunks_kernel.delta_chunks
    return [Case("delta_chunks 128", kernel, sizes, 4, 1, types=_ROWS, max_registers=most)]


def layer_cases() -> list[Case]:
    """The prototype of a persistent kernel, at SmolLM2-135M's sizes, for one token."""
    keys, tile = tiles.attention_tile(3, 64, is_prefill=False), tiles.fused_tile(1)
    constants = {
        "TYPE": form_of(QUANT_TYPES["Q4_0"]),
        "GROUP": 3,
        "K": 64,
        "KW": 64,
        "BM": keys.rows,
        "TILE": keys.tokens,
    }
    constants |= {"ROTARY": 64, "KV": "f16", "M": 1, "BN": tile.rows, "ASM": True}
    constants |= {"W": tiles.fused_columns(576, 1, True), "W_PART": tiles.fused_columns(1536, 1, False)}
    most, kernel = layer_kernel.MAX_REGISTERS, layer_kernel.layer
    return [Case("layer Q4_0 M=1", kernel, constants, tile.n_warps, max_registers=most, types=paged("f16"))]


def all_cases() -> list[Case]:
    """Every kernel that the GPU backend launches, and the prototypes."""
    launched = linear_cases() + attention_cases() + row_cases() + mixture_cases() + recurrent_cases()
    return launched + delta_chunk_cases() + layer_cases()


def compile_case(case: Case, target: GPUTarget) -> Any:
    """The compiled kernel. Pointers and strides are declared multiples of 16, as a launch finds them."""
    names = case.kernel.arg_names
    constants = dict(case.constants)
    if target.backend == "hip" and "ASM" in constants:
        constants["ASM"] = False
    signature = case.signature
    sizes = (
        ("stride", "width", "n_columns", "n_tokens")
        if case.name.startswith(("gemm", "rms", "map", "quant"))
        else ()
    )
    aligned = [
        i
        for i, name in enumerate(names)
        if signature[name][0] == "*" or name.endswith("_stride") or name in sizes
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": case.n_warps, "num_stages": case.n_stages}
    if case.max_registers is not None and target.backend == "cuda":
        options["maxnreg"] = case.max_registers
    driver.set_active(Compiled(target))  # type: ignore[arg-type]
    return triton.compile(source, target=target, options=options)


def measure(case_index: int, target_name: str) -> Row | str:
    """The row of one kernel, or why it did not compile."""
    case, target = all_cases()[case_index], TARGETS[target_name]
    try:
        kernel = compile_case(case, target)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{case.name} {target_name}: {type(error).__name__}: {lines[-1][:200]}"
    row = Row(case.name, target_name, 0, 0, kernel.metadata.shared)
    if target.backend == "cuda":
        read_sass(row, case, kernel.asm["cubin"])
    else:
        read_amdgcn(row, kernel.asm["amdgcn"])
    return row


def read_sass(row: Row, case: Case, cubin: bytes) -> None:
    """Fills in a row from NVIDIA's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(TOOLS / "cuobjdump", "-res-usage", file.name)
        text = _output(TOOLS / "nvdisasm", "-c", file.name)
    used = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    row.registers, row.spilled = used["REG"], used["STACK"] + used["LOCAL"]
    instructions, loop = innermost_loop(text)
    row.loop, row.rest = len(loop), len(instructions) - len(loop)
    body = loop or instructions
    row.loads = dict(Counter(_load_bits(op) for op in body if op.startswith("LDG")))
    row.matrix = dict(Counter(op.split(".")[0] for op in body if re.match(r"[HI]G?MMA|IDP", op)))
    if case.weights:
        row.slots = round(len(body) * case.n_warps * 32 / case.weights, 2)


def innermost_loop(text: str) -> tuple[list[str], list[str]]:
    """(all opcodes, those of the main loop) of a disassembly.

    The main loop is that with the most dot products and then the longest, of those that contain no other.
    """
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(opcodes)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", line):
            opcode, rest = instruction[1], instruction[2]
            jump = re.search(r"(\.L_\w+)", rest) if opcode.startswith("BRA") else None
            if jump and labels.get(jump[1], len(opcodes)) < len(opcodes):
                loops.append((labels[jump[1]], len(opcodes)))
            opcodes.append(opcode)
    inner = [
        loop for loop in loops if not any(o != loop and loop[0] <= o[0] and o[1] <= loop[1] for o in loops)
    ]

    def work(loop: tuple[int, int]) -> tuple[int, int]:
        n_dots = sum(op.startswith("IDP") for op in opcodes[loop[0] : loop[1]])
        return n_dots, loop[1] - loop[0]

    start, stop = max(inner, key=work, default=(0, -1))
    return opcodes, opcodes[start : stop + 1]


def _load_bits(opcode: str) -> str:
    wide = re.search(r"\.(128|64|U8|S8|U16|S16)\b", opcode)
    return {"U8": "8", "S8": "8", "U16": "16", "S16": "16"}.get(wide[1], wide[1]) if wide else "32"


def read_amdgcn(row: Row, text: str) -> None:
    """Fills in a row from AMD's assembly."""

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", text)
        return int(found[1]) if found else 0

    # scratch memory; scalar registers that do not fit go to lanes of vector registers, which is no spill
    row.registers, row.spilled = number("vgpr_count"), number("private_segment_fixed_size")
    bits = {"ubyte": "8", "sbyte": "8", "ushort": "16", "dword": "32", "dwordx2": "64", "dwordx4": "128"}
    loads = re.findall(r"(?:global|buffer)_load_(ubyte|sbyte|ushort|dwordx2|dwordx4|dword)\b", text)
    row.loads = dict(Counter(bits[load] for load in loads))
    row.matrix = dict(Counter(re.findall(r"v_mfma|v_dot4", text)))


def _output(*command: Any) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return done.stdout


def failures(row: Row) -> list[str]:
    """The limits that a row breaks."""
    broken = []
    if row.spilled:
        broken.append(f"{row.spilled} bytes spilled")
    if row.case.startswith("gemv"):
        if {"8", "16"} & set(row.loads):
            broken.append(f"narrow loads {row.loads}")
        limit = MAX_SLOTS.get(row.case.split()[1], MAX_SLOTS_OTHERS)
        if row.case.endswith("M=1") and row.slots is not None and row.slots > limit:
            broken.append(f"{row.slots} slots per weight, at most {limit}")
    return [f"{row.case} {row.target}: {what}" for what in broken]


def bytes_per_weight(type_name: str) -> float:
    """Bytes of a weight with its scales, as `pack.py` lays them out."""
    type, shape = QUANT_TYPES[type_name], (1, 1 << 16)
    (row,) = pack(Weight(np.zeros((1, type.row_bytes(shape[1])), np.uint8), type, shape))
    return sum(plane.nbytes for plane in row.planes if plane.ndim > 1) / shape[1]


def share_of_slots(row: Row) -> str | None:
    """For a GEMV for one token: the share of a card's issue slots that it takes at full bandwidth."""
    kernel, *rest = row.case.split()
    if kernel != "gemv" or rest[1:] != ["M=1"] or row.target not in SLOTS_PER_BYTE or row.slots is None:
        return None
    n_bytes = bytes_per_weight(rest[0])
    there = SLOTS_PER_BYTE[row.target] * n_bytes
    share = f"{row.slots:.2f} of {there:.1f} slots per weight, {row.slots / there:.2f}"
    return f"{rest[0]} {row.target}: {n_bytes:.3f} bytes per weight, {share}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line a kernel and target; 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", help="parts of names; all without")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    chosen = [
        i
        for i, case in enumerate(all_cases())
        if not options.kernels or any(part in case.name for part in options.kernels)
    ]
    cases, targets = all_cases(), options.targets.split(",")
    pairs = [(i, target) for i in chosen for target in targets if target in cases[i].targets]
    rows, broken = [], []
    with ProcessPoolExecutor(options.jobs) as pool:
        for result in pool.map(measure, *zip(*pairs, strict=True)):
            if isinstance(result, str):
                broken.append(result)
                print("FAILED", result, flush=True)
                continue
            rows.append(result)
            broken += failures(result)
            print(
                f"{result.case:24s} {result.target:7s} registers {result.registers:3d} "
                f"spilled {result.spilled:4d} "
                f"shared {result.shared:6d} loop {result.loop:4d} rest {result.rest:4d} "
                f"slots/weight {result.slots} loads {result.loads} {result.matrix}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    for line in filter(None, map(share_of_slots, rows)):
        print("SHARE", line)
    for line in broken:
        print("BROKEN", line)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
