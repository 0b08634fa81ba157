"""The architectures that the files of this folder define. Each file is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

from kukri.models.architecture import Architecture

_FOLDER = Path(__file__).parent


class Architectures(Mapping[str, Architecture]):
    """By name. A file that defines an architecture says each of its names in quotes; others stay unimported.

    Of some sixty files a model needs one or two.
    """

    def __getitem__(self, name: str) -> Architecture:
        """Raises KeyError for a name that no architecture has."""
        for architecture in self.called(name):
            if architecture.name == name:
                return architecture
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """The names of all, by file: this imports every file."""
        return iter(_defined(tuple(sorted(file.stem for file in _FOLDER.glob("*.py")))))

    def __len__(self) -> int:
        """How many there are."""
        return len(list(iter(self)))

    def called(self, name: object) -> tuple[Architecture, ...]:
        """The architectures that have this name here, or in files of either format."""
        return _called(name) if isinstance(name, str) else ()


@cache
def _called(name: str) -> tuple[Architecture, ...]:
    quoted = f'"{name}"'.encode()
    found = _defined(tuple(file.stem for file in sorted(_FOLDER.glob("*.py")) if quoted in file.read_bytes()))
    return tuple(a for a in found.values() if name in (a.name, a.gguf, a.gguf_seeing, a.hf_type))


@cache
def _defined(files: tuple[str, ...]) -> dict[str, Architecture]:
    """The objects in these files, by name."""
    found = {}
    for file in files:
        if file == "__init__":
            continue
        for value in vars(import_module(f"{__package__}.{file}")).values():
            if isinstance(value, Architecture):
                found[value.name] = value
    return found
