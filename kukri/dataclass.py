"""`dataclass`, as in `dataclasses`, in a tenth of the time.

The standard library compiles the texts of up to six methods of a class, which takes 0.6 ms in the mean, and
each start makes 180 classes. Here only `__init__` is compiled, and the other methods are closures over the
names of the fields. `fields`, `replace`, `asdict` and subclasses work as usual. Not supported are `InitVar`,
orders, frozen slots, factories of fields that are no parameters, and frozen subclasses made by the standard
library's `dataclass`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, asdict, field, fields, replace
from functools import partial
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

__all__ = ["Field", "asdict", "dataclass", "field", "fields", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, **options):
        """Add `__init__` and the other methods of a dataclass to a class, and return the class."""
        return partial(_made, **options) if cls is None else _made(cls, **options)


_FACTORY = object()  # the default of a parameter whose field has a default factory


def _made(cls: type, *, repr: bool = True, eq: bool = True, frozen: bool = False, **options: Any) -> type:
    made: type = dataclasses.dataclass(init=False, repr=False, eq=False, **options)(cls)
    own = fields(made)  # type: ignore[arg-type]
    methods: dict[str, Any] = {"__init__": _init(made, own, frozen)}
    if repr:
        methods["__repr__"] = _repr([one.name for one in own if one.repr])
    if eq:
        methods["__eq__"] = _equal(_values([one.name for one in own if one.compare]))
        hashed = [one.name for one in own if (one.compare if one.hash is None else one.hash)]
        methods["__hash__"] = _hash(_values(hashed)) if frozen else None
    if frozen:
        methods |= _frozen(made, {one.name for one in own})
    for name in methods.keys() - vars(made).keys():
        setattr(made, name, methods[name])
    return made


def _init(made: type, own: tuple[Field[Any], ...], frozen: bool) -> Any:
    parameters: dict[Any, list[str]] = {False: ["self"], True: ["*"]}  # by kw_only
    body = ["pass"]
    names: dict[str, Any] = {"_FACTORY": _FACTORY, "_set": object.__setattr__, "__name__": made.__module__}
    for one in own:
        name, default = one.name, f"_default_{one.name}"
        parameter = value = name
        if one.default_factory is not MISSING:
            names[default] = one.default_factory
            parameter, value = f"{name}=_FACTORY", f"{default}() if {name} is _FACTORY else {name}"
        elif one.default is not MISSING:
            names[default] = one.default
            parameter = f"{name}={default}"
        if one.init:
            parameters[one.kw_only].append(parameter)
            body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(made, "__post_init__"):
        body.append("self.__post_init__()")
    declared = ", ".join(parameters[False] + (parameters[True] if len(parameters[True]) > 1 else []))
    exec(f"def __init__({declared}):\n " + "\n ".join(body), names)
    init = names["__init__"]
    init.__qualname__ = f"{made.__qualname__}.__init__"
    init.__annotations__ = {one.name: one.type for one in own if one.init} | {"return": None}
    return init


def _repr(names: list[str]) -> Any:
    def __repr__(self: Any) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({shown})"

    return recursive_repr()(__repr__)


def _values(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function from an object to the tuple of these attributes."""
    if len(names) > 1:  # attrgetter returns one attribute without a tuple, and needs one at least
        return attrgetter(*names)
    return lambda one: tuple(getattr(one, name) for name in names)


def _equal(values: Callable[[Any], tuple[Any, ...]]) -> Any:
    def __eq__(self: Any, other: Any) -> Any:
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    return __eq__


def _hash(values: Callable[[Any], tuple[Any, ...]]) -> Any:
    return lambda self: hash(values(self))


def _frozen(made: type, names: set[str]) -> dict[str, Any]:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is made or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(made, self).__setattr__(name, value)  # type: ignore[arg-type, misc]

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is made or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(made, self).__delattr__(name)  # type: ignore[arg-type, misc]

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}
