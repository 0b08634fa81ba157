"""`kukri.dataclass` against the standard library's `dataclass`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, ClassVar

import pytest

from kukri.dataclass import dataclass, field

OPTIONS: list[dict[str, bool]] = [
    *({}, {"frozen": True}, {"eq": False}, {"frozen": True, "eq": False}, {"repr": False}),
    *({"kw_only": True}, {"slots": True}, {"slots": True, "eq": False, "weakref_slot": True}),
]
ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    *(((), {}), ((1,), {}), ((), {"n": 1}), ((1, "a"), {}), ((1, "a", (2,)), {"group": 3.0})),
    *(((2,), {"secret": "t"}), ((1,), {"speed": 2.0}), ((), {"n": 1, "size": -1}), ((1,), {"no": 1})),
    *(((1, 2, 3, 4, 5, 6, 7), {}), ((), {"n": 1, "parts": (1, 2)}), ((), {"parts": (1, 2)})),
]


def _classes(make: Callable[..., Any], **options: bool) -> list[type]:
    """Return classes with every kind of field, inherited fields, one field, and none."""

    @make(**options)
    class Thing:
        n: int
        name: str = "x"
        parts: tuple[int, ...] = field(default_factory=tuple)
        secret: str = field(default="s", repr=False)
        speed: float = field(default=1.0, compare=False)
        group: float = field(default=1.0, hash=False, kw_only=True)
        count: int = field(init=False)
        CONSTANT: ClassVar[int] = 3

        def __post_init__(self) -> None:
            object.__setattr__(self, "count", self.n * 2)

    @make(**options)
    class Larger(Thing):
        name: str = "y"
        size: int = 5

        def __post_init__(self) -> None:
            object.__setattr__(self, "count", self.n * 3)
            if self.size < 0:
                raise ValueError("size")

    @make(**options)
    class Single:
        parts: object = ()

    @make(**options)
    class Empty:
        def __repr__(self) -> str:
            return "nothing"

    class Plain(Thing):
        pass

    return [Thing, Larger, Single, Empty, Plain]


def _observed(make: Callable[..., Any], options: dict[str, bool]) -> Iterator[Any]:
    """What can be seen of the classes of a decorator, and of what they make."""

    def outcome(action: Callable[..., Any], *args: Any, **named: Any) -> Any:
        try:
            found = action(*args, **named)
        except (TypeError, ValueError, AttributeError) as error:
            return type(error), str(error)
        return type(found).__qualname__ if type(found) in classes else found

    classes = _classes(make, **options)
    made = []
    for kind in classes:
        yield kind.__init__.__annotations__, kind.__match_args__, kind.__doc__ is None
        for args, named in ARGUMENTS:
            found = outcome(kind, *args, **named)
            yield found
            if isinstance(found, str):
                made.append(kind(*args, **named))
    for one, other in product(made, made):
        yield one == other
        if options.get("frozen") and options.get("eq", True):
            yield hash(one) == hash(other)
    for one in made:
        shown = repr(one) if options.get("repr", True) else ""
        hashed = outcome(hash, one)
        yield (
            shown,
            dataclasses.asdict(one),
            copy.copy(one) == one,
            one == 1,
            isinstance(hashed, int) or hashed,
        )
        yield outcome(dataclasses.replace, one, parts=(7,))
        for name in ("name", "unheard"):
            yield outcome(setattr, one, name, "z"), outcome(delattr, one, name), outcome(getattr, one, name)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_classes_behave_as_the_standard_librarys(options: dict[str, bool]) -> None:
    """A default, a comparison, a hash, a text or an error that differs from the standard library's."""
    found = list(_observed(dataclass, options))
    assert len(found) > 100
    assert found == list(_observed(dataclasses.dataclass, options))


def test_a_text_that_contains_itself_ends() -> None:
    """A repr without an end."""

    @dataclass
    class Node:
        children: list[Any] = field(default_factory=list)

    node = Node()
    node.children.append(node)
    assert repr(node) == f"{Node.__qualname__}(children=[...])"
    assert Node() == Node()
    assert Node().children is not Node().children
