"""The cache of compiled kernels: which sources they are made of, and the files that keep their object code.

`jit.py` loads kernels from here without Numba, `compiling.py` fills the cache. Object code lies in a
directory named by a hash of the versions and the CPU, in a file named by the kernel and by a hash of the
module that defines the kernel and of all that this module imports: a stale file is never found, and an edit
of one kernel leaves the other modules' kernels alone. Object code is run without a check, so directory and
file must belong to this user, and no one else may write to them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from platformdirs import user_cache_dir

from kukri.errors import ConfigError
from kukri.host.private_files import check_private, make_private, open_private, write_private
from kukri.kernels.cpu.compile.features import cpu_target

KernelCode = tuple[str, tuple[str, ...], bytes]  # symbol, parameters, object code

# Modules that hold kernels, in the order in which they are searched for a name.
KERNEL_MODULES = (
    "run.threads",
    "codegen.step_kernels",
    "codegen.embedding",
    "codegen.panels",
    "codegen.elementwise",
    "codegen.rope_store",
    "codegen.recurrent",
    "codegen.linear",
    "codegen.experts",
    "codegen.adapters",
    "codegen.attention",
    "codegen.masked_attention",
    "codegen.sampling_kernel",
    "pack.pack_kernels",
    "pack.recode",
    "run.bandwidth",
    "pack.encode",
)
KERNEL_PACKAGE = "kukri.kernels.cpu"

_ROOT = str(Path(__file__).parents[4])  # the directory that holds the package
# no other package's code becomes machine code
_IMPORT = re.compile(rb"from (kukri\.(?:kernels|quant)[\w.]*) import (?:\(([^)]*)\)|(.*))")


def cache_root() -> Path:
    """The directory of compiled kernels: $KUKRI_CACHE_DIR/jit or the user's cache directory."""
    return Path(os.environ.get("KUKRI_CACHE_DIR") or user_cache_dir("kukri")) / "jit"


@cache
def cache_dir() -> Path:
    """The directory for exactly these versions and this CPU."""
    digest = hashlib.sha256()
    target = cpu_target()
    for fact in (sys.version, sys.platform, target.identity, target.features):
        digest.update(fact.encode() + b"\0")
    for package in ("numba", "llvmlite"):
        digest.update(_version(package))
    return cache_root() / digest.hexdigest()[:24]


@cache
def module_hashes() -> dict[str, str]:
    """A hash for each of `KERNEL_MODULES`: of its source and of the sources that it imports, all the way."""
    return {name: _hash_of(sources_of(f"{KERNEL_PACKAGE}.{name}")) for name in KERNEL_MODULES}


@cache
def sources_hash() -> str:
    """A hash of all sources that decide what the CPU backend computes: kernels, plans and weight types."""
    folders = Path(_ROOT, "kukri/kernels/cpu"), Path(_ROOT, "kukri/quant/types")
    found = {path.relative_to(_ROOT).as_posix() for folder in folders for path in folder.rglob("*.py")}
    for name in KERNEL_MODULES:
        found |= set(sources_of(f"{KERNEL_PACKAGE}.{name}"))
    return _hash_of(sorted(found))


def sources_of(module: str) -> list[str]:
    """The files of a module and of all that it imports of kernels and weight types, directly or not.

    Paths are relative to the directory of the package.
    """
    found: set[str] = set()
    todo = [_file_of(module)]
    while todo:
        file = todo.pop()
        if file not in found:
            found.add(file)
            todo += _imports(file)
    return sorted(found)


@cache
def _imports(file: str) -> list[str]:
    """The files of kernels and weight types that a file's imports name, in functions too."""
    found = []
    for match in _IMPORT.finditer(_read(file)):
        package, in_brackets, in_line = (text.decode() for text in match.groups(b""))
        for line in (in_brackets or in_line).splitlines():
            for part in line.partition("#")[0].split(","):
                if name := part.partition(" as ")[0].strip():
                    found.append(_file_of(package, name))
    return found


def _file_of(module: str, name: str = "") -> str:
    """The file of a module; with a name, the file of the module or package in which the name is."""
    path = module.replace(".", "/")
    if f"{name}.py" in _listed(path):
        return f"{path}/{name}.py"
    return f"{path}/__init__.py" if _listed(path) else f"{path}.py"


@cache
def _listed(folder: str) -> frozenset[str]:
    """The files of a package; none if it is not one."""
    path = f"{_ROOT}/{folder}"
    return frozenset(os.listdir(path) if os.path.isdir(path) else ())


@cache
def _read(file: str) -> bytes:
    with open(f"{_ROOT}/{file}", "rb") as opened:
        return opened.read()


@cache
def _digest(file: str) -> bytes:
    return file.encode() + b"\0" + hashlib.sha256(_read(file)).digest()


def _hash_of(files: list[str]) -> str:
    return hashlib.sha256(b"".join(map(_digest, files))).hexdigest()[:24]


def _version(package: str) -> bytes:
    """A package's version file, empty if it is not installed. Its metadata would cost 10 ms to read."""
    found = find_spec(package)
    if found is None or found.origin is None:
        return b""
    return Path(found.origin).with_name("_version.py").read_bytes()


def cached_names() -> list[str]:
    """Names of the kernels in the cache that are made of the present sources."""
    endings = set(module_hashes().values())
    parts = (path.stem.rpartition("@") for path in cache_dir().glob("*@*.kernel"))
    return sorted(name for name, _, ending in parts if ending in endings)


def read_cached(name: str) -> KernelCode | None:
    """(symbol, parameters, object code) from the cache, or None if it is not there or cut short.

    Which module defines a kernel is known only once it is imported, which takes Numba, so the file of each
    is tried. Raises ConfigError if another user could have written it.
    """
    for sources in module_hashes().values():
        path = f"{cache_dir()}/{name}@{sources}.kernel"
        if not os.path.lexists(path):
            continue
        try:
            check_private(cache_dir())
            with open_private(Path(path)) as file:
                data = file.read()
            header, _, code = data.partition(b"\n")
            facts = json.loads(header)
            if hashlib.sha256(code).hexdigest() == facts["sha256"]:
                return facts["symbol"], tuple(facts["parameters"]), code
        except ConfigError as error:
            raise ConfigError(f"compiled kernels cannot be loaded: {error} ($KUKRI_CACHE_DIR)") from None
        except (OSError, ValueError, KeyError):
            continue
    return None


def store(name: str, module: str, kernel: KernelCode) -> None:
    """Writes a kernel of one of `KERNEL_MODULES` to the cache atomically.

    A cache that cannot be written costs time, not correctness.
    """
    symbol, parameters, code = kernel
    facts = {"symbol": symbol, "parameters": parameters, "sha256": hashlib.sha256(code).hexdigest()}
    try:
        make_private(cache_dir())
        path = cache_dir() / f"{name}@{module_hashes()[module]}.kernel"
        write_private(path, json.dumps(facts).encode() + b"\n" + code, is_lasting=False)
    except OSError:
        return
