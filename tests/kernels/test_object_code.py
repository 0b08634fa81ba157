"""Kernels' object code, loaded by kukri and by LLVM."""

import ctypes
import random

import llvmlite.binding as llvm
import pytest

from kukri.kernels.cpu.compile import features, object_code
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.jit import KernelLibrary, _LlvmLoader, call
from kukri.kernels.cpu.compile.kernel_cache import read_cached
from kukri.kernels.cpu.compile.object_code import ObjectCode, UnsupportedObjectError

pytestmark = pytest.mark.skipif(not object_code.is_supported(), reason="objects here are LLVM's to load")

_IR = """
@table = internal constant [4 x i64] [i64 3, i64 5, i64 7, i64 11], align 32
@pointers = internal constant [2 x ptr] [ptr @table, ptr @double]
declare ptr @memset(ptr, i32, i64)
define internal i64 @double(i64 %x) noinline { %y = shl i64 %x, 1
 ret i64 %y }
define i32 @kernel(ptr %result, ptr %none, i64 %record, i64 %tile) {
 %place = getelementptr [4 x i64], ptr @table, i64 0, i64 %tile
 %value = load volatile i64, ptr %place
 %slot = getelementptr [2 x ptr], ptr @pointers, i64 0, i64 1
 %function = load volatile ptr, ptr %slot
 %twice = call i64 %function(i64 %value)
 %bytes = alloca i64
 call ptr @memset(ptr %bytes, i32 1, i64 8)
 %ones = load volatile i64, ptr %bytes
 %sum = add i64 %twice, %ones
 store i64 %sum, ptr %result
 ret i32 0 }
"""
_IR_ALONE = _IR.replace(
    "call ptr @memset(ptr %bytes, i32 1, i64 8)", "store i64 72340172838076673, ptr %bytes"
)


def compiled(source, model):
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel=model, reloc="static")
    return machine.emit_object(llvm.parse_assembly(source))


@pytest.fixture(scope="module")
def kernel():
    """(symbol, object code) of a kernel with calls, branches and constants."""
    KernelLibrary().load(["choose_tokens"])
    symbol, _, code = read_cached("choose_tokens")
    return symbol, code


@pytest.mark.parametrize("model", ["large", "medium"])
def test_code_constants_and_calls(model):
    """Would catch a relocation of a wrong kind or addend, and sections that overlap."""
    code = compiled(
        _IR if model == "large" else _IR_ALONE, model
    )  # the C library may be out of others' reach
    loaded, by_llvm = ObjectCode(code), _LlvmLoader()
    theirs = by_llvm.address("kernel", code)
    for tile, prime in enumerate((3, 5, 7, 11)):
        assert call(loaded.address("kernel"), 0, tile) == 2 * prime + 0x0101010101010101
        assert call(theirs, 0, tile) == 2 * prime + 0x0101010101010101


def test_memory_cannot_be_written(kernel):
    """Would catch pages left both writable and executable."""
    symbol, code = kernel
    loaded = ObjectCode(code)
    address = loaded.address(symbol)
    with open("/proc/self/maps") as maps:
        for line in maps:
            place, rights = line.split()[:2]
            start, stop = (int(part, 16) for part in place.split("-"))
            if start <= address < stop:
                assert rights == "r-xp"
                return
    pytest.fail("the code is not mapped")


def test_names_that_are_not_there(kernel):
    """Would catch a call of address 0."""
    with pytest.raises(UnsupportedObjectError, match="no other in the object"):
        ObjectCode(kernel[1]).address("other")
    missing = compiled(_IR.replace("@memset", "@kukri_has_no_such_function"), "large")
    with pytest.raises(UnsupportedObjectError, match="kukri_has_no_such_function"):
        ObjectCode(missing)


def test_damaged_objects(kernel):
    """Would catch a read or write outside the object or its memory: each is loaded or refused."""
    code = kernel[1]
    chance = random.Random(0)
    n_refused = 0
    for _ in range(400):
        damaged = bytearray(code[: chance.choice([len(code), len(code), chance.randrange(len(code))])])
        for _ in range(chance.choice([1, 4, 64])):
            at = chance.choice([chance.randrange(64), chance.randrange(len(damaged))]) if damaged else 0
            damaged[at : at + 1] = bytes([chance.randrange(256)])
        try:
            ObjectCode(bytes(damaged))
        except (UnsupportedObjectError, OSError):
            n_refused += 1
    assert n_refused > 50


def test_what_llvm_loads_instead(kernel, monkeypatch):
    """Would catch kernels that cannot be used if kukri does not understand an object."""
    monkeypatch.setattr("kukri.kernels.cpu.compile.jit.object_code.is_supported", lambda: False)
    library = KernelLibrary()
    assert library["choose_tokens"](-1, **dict.fromkeys(library["choose_tokens"].parameters, 0)) == 0


def test_host_features_are_llvms():
    """Would catch a feature that goes by another name in /proc/cpuinfo, and so is never used."""
    ours, theirs = features._linux_x86(), features._llvm_host()
    if ours is None:
        pytest.skip("no list of features")
    known = (
        "avx2",
        "fma",
        "f16c",
        "avx512bw",
        "avx512vl",
        "avx512vnni",
        "avx512vbmi",
        "avxvnni",
        "avx512bf16",
        "avx512fp16",
    )
    for name in known:
        assert bool(ours[1].get(name)) == bool(theirs[1].get(name)), name
    assert cpu_target().name
    assert ctypes.sizeof(ctypes.c_void_p) == 8
