"""Object code in memory: the ELF objects that LLVM makes of kernels, loaded without LLVM.

A kernel's object is code, constants, and a few references between them and to the C library; loading it takes
the program a page of Python and a tenth of a millisecond, and importing llvmlite takes fifty. Other systems
and processors, and objects with something unexpected in them, are LLVM's to load. The format: the ELF-64
specification and the System V ABI's supplement for AMD64 (section 4.4, relocation).
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from functools import cache
from typing import NamedTuple

from kukri.host.os_calls import c_library, make_executable, private_memory

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_IDENT = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
_RELOCATABLE, _X86_64 = 1, 62
_PROGBITS, _SYMTAB, _RELA, _NOBITS = 1, 2, 4, 8
_IS_LOADED = 2  # one of a section's flags
_UNDEFINED = 0
_ABSOLUTE_64 = 1
_FORMATS = {_ABSOLUTE_64: "<Q", 2: "<i", 4: "<i", 24: "<q"}  # R_X86_64_64; the distances PC32, PLT32 and PC64
_PAGE = 4096


class UnsupportedObjectError(Exception):
    """An object that this loader does not understand."""


class ObjectCode:
    """An object in memory, as long as this lives. Its pages are executable and cannot be written."""

    def __init__(self, data: bytes) -> None:
        """Raises UnsupportedObjectError, and OSError if the system allows no executable memory."""
        try:
            sections = _sections(data)
            places, size = _placed(sections)
            tables = {i: _symbols(data, sections, s) for i, s in enumerate(sections) if s.kind == _SYMTAB}
            self._memory = private_memory(size)
            base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            starts = {i: base + place for i, place in places.items()}
            for i, place in places.items():
                self._memory[place : place + sections[i].size] = _contents(data, sections[i])
            for section in sections:
                if section.kind == _RELA and section.info in places:
                    target, place = sections[section.info], places[section.info]
                    for offset, info, addend in _RELOCATION.iter_unpack(_contents(data, section)):
                        name, symbol = tables[section.link][info >> 32]
                        value = _address(name, symbol, starts) + addend
                        _relocate(self._memory, base, place, target.size, offset, info & 0xFFFFFFFF, value)
            self._addresses = {
                name: starts[symbol.section] + symbol.value
                for table in tables.values()
                for name, symbol in table
                if symbol.section in starts and symbol.value < sections[symbol.section].size
            }
        except (struct.error, LookupError, ValueError, OverflowError, MemoryError) as error:
            raise UnsupportedObjectError(f"an object that is not sound: {error}") from None
        make_executable(base, size)

    def address(self, symbol: str) -> int:
        """The address of a function. Raises UnsupportedObjectError if there is none of that name."""
        if symbol not in self._addresses:
            raise UnsupportedObjectError(f"no {symbol} in the object")
        return self._addresses[symbol]


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbol(NamedTuple):
    name: int
    info: int
    other: int
    section: int
    value: int
    size: int


def is_supported() -> bool:
    """True on the systems whose objects this loads: Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 2**32


def _sections(data: bytes) -> list[_Section]:
    header = _HEADER.unpack_from(data)
    ident, kind, machine, start, n = header[0], header[1], header[2], header[6], header[12]
    if not ident.startswith(_IDENT) or (kind, machine, header[11]) != (_RELOCATABLE, _X86_64, _SECTION.size):
        raise UnsupportedObjectError("no relocatable ELF object for x86-64")
    return [_Section(*_SECTION.unpack_from(data, start + i * _SECTION.size)) for i in range(n)]


def _placed(sections: list[_Section]) -> tuple[dict[int, int], int]:
    """(the offset of each section that is loaded, by its number, and bytes in all)."""
    places, end = {}, 0
    for i, section in enumerate(sections):
        if section.flags & _IS_LOADED and section.kind in (_PROGBITS, _NOBITS) and section.size:
            alignment = max(section.alignment, 1)
            if alignment > _PAGE:
                raise UnsupportedObjectError(f"a section aligned to {alignment} bytes")
            places[i] = -(-end // alignment) * alignment
            end = places[i] + section.size
    return places, max(end, 1)


def _contents(data: bytes, section: _Section) -> bytes:
    if section.kind == _NOBITS:
        return bytes(section.size)
    contents = data[section.offset : section.offset + section.size]
    if len(contents) != section.size:
        raise UnsupportedObjectError("a section beyond the object's end")
    return contents


def _symbols(data: bytes, sections: list[_Section], table: _Section) -> list[tuple[str, _Symbol]]:
    """The symbols of a table, with their names."""
    names = _contents(data, sections[table.link])
    symbols = [_Symbol(*fields) for fields in _SYMBOL.iter_unpack(_contents(data, table))]
    return [(names[s.name : names.index(0, s.name)].decode("ascii"), s) for s in symbols]


def _address(name: str, symbol: _Symbol, starts: dict[int, int]) -> int:
    """A symbol's address: in a loaded section, or in the C library."""
    if symbol.section == _UNDEFINED:
        return _library_address(name)
    if symbol.section not in starts:
        raise UnsupportedObjectError(f"{name or 'a symbol'} lies in no loaded section")
    return starts[symbol.section] + symbol.value


def _relocate(
    memory: mmap.mmap, base: int, place: int, size: int, offset: int, kind: int, value: int
) -> None:
    """Writes an address, or its distance from where it is written: `offset` in a section of `size` bytes that
    begins at `place` of the memory at `base`.
    """
    if kind not in _FORMATS:
        raise UnsupportedObjectError(f"a relocation of kind {kind}")
    form = _FORMATS[kind]
    if offset + struct.calcsize(form) > size:
        raise UnsupportedObjectError("a relocation outside its section")
    at = place + offset
    struct.pack_into(form, memory, at, value if kind == _ABSOLUTE_64 else value - base - at)


@cache
def _library_address(name: str) -> int:
    """The address of a function of the C library."""
    try:
        return ctypes.cast(getattr(c_library(), name), ctypes.c_void_p).value or 0
    except AttributeError:
        raise UnsupportedObjectError(f"no {name} in this process") from None
