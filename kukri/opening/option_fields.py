"""Declares an option once: its type and default, and here its help, its flag and what it accepts.

`kukri.opening.model_options` declares the options of loading a model this way, and `kukri.server.settings`
the settings of a server. An option's flag, its key in the configuration file, the check of its value and its
documentation follow from its field.
"""

import os
import re
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from kukri.dataclass import Field, dataclass, field, fields
from kukri.errors import ConfigError

_BYTES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SWITCHES = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_DURATION = re.compile(r"(?:\d+(?:\.\d*)?(?:ms|h|m|s))+|\d+(?:\.\d*)?")


@dataclass(frozen=True)
class OptionFacts:
    """The values that an option accepts, and how it is shown.

    `read` converts a value from a caller, a flag, a file or Ray to the option's value, and raises ValueError
    with the words after "must be". `flag` is empty for an option without one; `repeats` a flag that may be
    given several times.
    """

    read: Callable[[Any], Any]
    help: str
    flag: str
    group: str | None
    metavar: str | None = None
    envvar: str | None = None
    repeats: bool = False


def declared(
    read: Callable[[Any], Any],
    help: str,
    group: str | None = None,
    *,
    default: Any = None,
    flag: str = "",
    is_shown: bool = True,
    **shown: Any,
) -> Any:
    """A field that is an option, with the facts of OptionFacts; `repr` leaves it out unless `is_shown`."""
    facts = {"facts": OptionFacts(read, help, flag, group, **shown)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=facts)
    return field(default=default, metadata=facts, repr=is_shown)


def size_bytes(text: str, name: str = "a size") -> int:
    """The bytes of a size such as 2MiB, 500KB or 4096. Raises ConfigError, about `name`, for other text."""
    found: int = _checked(as_size, text, name)
    return found


def _checked(read: Callable[[Any], Any], value: Any, name: str) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ConfigError(f"{name} must be {error}, not {value!r}") from None


def as_size(value: Any) -> int:
    """The bytes of a number, or of a text such as 2MiB."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([KMG]i?B|)", str(value))
    if match is None:
        raise ValueError("a size such as 2MiB or 1.5GiB")
    return int(float(match[1]) * _BYTES[match[2]])


def as_integer(value: Any) -> int:
    """A whole number."""
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ValueError("a whole number")
    return int(text)


def as_number(value: Any) -> float:
    """A number."""
    if not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise ValueError("a number")


def as_switch(value: Any) -> bool:
    """True or False, also as a text."""
    if isinstance(value, bool):
        return value
    found = _SWITCHES.get(str(value).lower())
    if found is None:
        raise ValueError("true or false")
    return found


def as_text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def as_path(value: Any) -> str:
    """A path, as text."""
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError("a path")
    return str(os.fspath(value))


def one_of(kind: Any) -> Callable[[Any], Any]:
    """Reads one of the names of a Literal."""
    names = get_args(kind)

    def read(value: Any) -> Any:
        if value is False and "off" in names:  # YAML's word for off
            return "off"
        if value not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return value

    return read


def as_names(value: Any) -> tuple[str, ...]:
    """Names, of a list or of a text with commas."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, Sequence) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("names with commas between them")
    return tuple(value)


def at_least_one(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Reads what `read` does, from 1 on."""

    def checked(value: Any) -> Any:
        if (found := read(value)) < 1:
            raise ValueError("at least 1")
        return found

    return checked


def duration_s(value: float | str, name: str) -> float:
    """The seconds of a number, or of a text such as 300, 10m or 1h30m; -1 stays -1.

    Raises ConfigError, about `name`, for anything else.
    """
    found: float = _checked(_duration, value, name)
    return found


def _duration(value: Any) -> float:
    if type(value) in (int, float) and isfinite(value):
        return float(value)
    given = str(value).strip()
    if len(given) > 32 or isinstance(value, bool) or not _DURATION.fullmatch(given.removeprefix("-")):
        raise ValueError("a time such as 300, 10m or 1h30m")
    parts = re.findall(r"([\d.]+)(ms|h|m|s)?", given)
    seconds = sum(float(number) * _SECONDS[unit or "s"] for number, unit in parts)
    return -seconds if given.startswith("-") else seconds


def as_time(value: Any) -> float:
    """The seconds of a time above 0."""
    seconds = _duration(value)
    if not seconds > 0:
        raise ValueError("above 0")
    return seconds


def as_file(value: Any) -> Path:
    """A path."""
    return Path(as_path(value))


def option_facts(one: Field[Any]) -> OptionFacts:
    """Return the facts with which a field was declared."""
    facts: OptionFacts = one.metadata["facts"]
    return facts


def choices(one: Field[Any]) -> tuple[str, ...]:
    """The names that an option chooses from; none for any other option."""
    kinds = [kind for kind in (one.type, *get_args(one.type)) if get_origin(kind) is Literal]
    return get_args(kinds[0]) if kinds else ()


def flag_of(one: Field[Any]) -> str:
    """Return the flag of an option, for a switch the one that turns it on; "" if it has no flag."""
    facts = option_facts(one)
    if facts.group is None:
        return ""
    return facts.flag.partition("/")[0] or "--" + one.name.replace("_", "-")


def read_option(one: Field[Any], value: Any, where: str | None = None) -> Any:
    """The value of an option. Raises ConfigError about `where`, by default its keyword and its flag."""
    flag = flag_of(one)
    return _checked(
        option_facts(one).read, value, where or (f"{one.name!r} ({flag})" if flag else repr(one.name))
    )


def read_fields(options: Any, where: Callable[[Field[Any]], str | None] = lambda _: None) -> None:
    """Convert the given value of each field of a frozen dataclass. Raises ConfigError."""
    for one in fields(options):
        value = getattr(options, one.name)
        if value is None:  # not given, as an empty form and YAML's null say it
            value = one.default_factory() if callable(one.default_factory) else one.default
        elif value is not one.default:
            value = read_option(one, value, where(one))
        object.__setattr__(options, one.name, value)


def describe(options: type) -> None:
    """Adds the help of each field to the docstring of a dataclass."""
    lines = (
        f"        {one.name}: {'False: ' * flag_of(one).startswith('--no-')}{option_facts(one).help}"
        for one in fields(options)
    )
    options.__doc__ = "\n".join([str(options.__doc__), "", "    Attributes:", *lines, "    "])
