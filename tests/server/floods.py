"""Bodies that flood a server, made from its OpenAPI document: one field at a time is out of all bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

N = 100_000  # items of a list
TEXT = "a" * 2**20
WRONG = (1.5, {}, [], "NaN", {"a": []})  # items; no list takes the first two
_DEPTH = 5
_MARK = "@many@"
_JSON, _FORM = "application/json", "multipart/form-data"


@dataclass(frozen=True)
class Many:
    """A list of many equal items, or an object of many equal values; a body has one at most."""

    item: Any
    n: int = N
    has_keys: bool = False

    @property
    def text(self) -> str:
        """The JSON."""
        item = json.dumps(self.item)
        if self.has_keys:
            return "{" + ",".join(f'"{i}":{item}' for i in range(self.n)) + "}"
        return "[" + ",".join([item] * self.n) + "]"


@dataclass(frozen=True)
class Flood:
    """A body of a path: `place` is the field that is out of bounds, `kind` how."""

    path: str
    place: str
    kind: str
    body: Any
    is_form: bool = False  # the body is one, with a file besides its fields

    @property
    def what(self) -> str:
        """The sort of value that is out of bounds: a list, a text or a number."""
        return "list" if "many" in self.kind else "text" if "a text" in self.kind else "number"

    @property
    def content_type(self) -> str:
        """The type of the data."""
        return f"{_FORM}; boundary=b" if self.is_form else _JSON

    @property
    def data(self) -> bytes:
        """The body as JSON, or as a form in which a list is a field for each item."""
        if self.is_form:
            fields = [("file", "x")]
            for name, value in self.body.items():
                items = [value.item] * value.n if isinstance(value, Many) else [value]
                fields += [(name, str(item)) for item in items]
            parts = (f'--b\r\nx; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields)
            return "".join([*parts, "--b--\r\n"]).encode("utf-8", "surrogatepass")
        many: list[Many] = []

        def mark(one: Any) -> str:
            assert isinstance(one, Many)
            many.append(one)
            return _MARK

        text = json.dumps(self.body, default=mark)
        for one in many:
            text = text.replace(f'"{_MARK}"', one.text)
        return text.encode()


class Floods:
    """The floods of a document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document, self._seen = document, set[str]()

    def all(self, *, with_repeats: bool) -> Iterator[Flood]:
        """Each field of each body, out of bounds in each way; without repeats, one of several bodies once."""
        for path, operations in self._document["paths"].items():
            content = operations.get("post", {}).get("requestBody", {}).get("content", {})
            kind_of_body = next((one for one in (_JSON, _FORM) if one in content), None)
            if kind_of_body is None:
                continue
            if with_repeats:
                self._seen.clear()
            schema = self._resolved(content[kind_of_body]["schema"])
            right = {**self.least(schema), **{k: v for k, v in _RIGHT.items() if k in schema["properties"]}}
            for place, kind, body in self._of(schema, "", 0, WRONG if with_repeats else WRONG[:2]):
                yield Flood(path, place, kind, {**right, **body}, kind_of_body == _FORM)

    def least(self, schema: Any) -> Any:
        """A small value that a schema allows."""
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return schema["enum"][0]
        if variants := _variants(schema):
            return self.least(variants[0])
        match schema.get("type"):
            case "object":
                properties = schema.get("properties", {})
                names = schema.get("required", ())
                return {name: _RIGHT.get(name) or self.least(properties[name]) for name in names}
            case "array":
                return [self.least(schema["items"])] * schema.get("minItems", 0)
            case "integer" | "number":
                return max(schema.get("minimum", 0), 1)
            case "boolean":
                return False
        return "a" * max(schema.get("minLength", 1), 1)

    def _of(
        self, schema: Any, place: str, depth: int, wrongs: tuple[Any, ...]
    ) -> Iterator[tuple[str, str, Any]]:
        """Values of a schema that are out of bounds somewhere."""
        schema = self._resolved(schema)
        if depth > _DEPTH or "enum" in schema or "const" in schema:
            return
        if variants := _variants(schema):
            for variant in variants:
                yield from self._of(variant, place, depth, wrongs)
            return
        kind = schema.get("type")
        if kind == "object":
            least = self.least(schema)
            for name, part in schema.get("properties", {}).items():
                key = json.dumps([name, part])
                if key not in self._seen:
                    self._seen.add(key)
                    for inner, way, value in self._of(part, f"{place}.{name}", depth + 1, wrongs):
                        yield inner, way, {**least, name: value}
            if extra := schema.get("additionalProperties"):
                right = self.least(extra) if isinstance(extra, dict) else 1
                yield place, "many keys", Many(right, has_keys=True)
                if isinstance(extra, dict) and "type" in extra:
                    yield place, "many wrong keys", Many([], has_keys=True)
        elif kind == "array":
            right, most = self.least(schema["items"]), schema.get("maxItems", N)
            key = json.dumps({name: part for name, part in schema.items() if name != "title"})
            if key not in self._seen:
                self._seen.add(key)
                yield place, "many right items", Many(right)
                yield place, "as many as it takes", Many(right, min(most, N))
                for wrong in wrongs:
                    yield place, f"many wrong items {wrong}", Many(wrong)
            for inner, way, value in self._of(schema["items"], f"{place}[]", depth + 1, wrongs):
                yield inner, way, [value]
        elif kind in ("integer", "number"):
            limits = [schema[name] for name in ("minimum", "maximum") if name in schema]
            near = [limit + step for limit in limits for step in (-1, 0, 1)]
            for value in (*near, 2**31, 2**63, 2**64, 10**400, 1e308, -1e308, "NaN"):
                shown = (
                    int(value)
                    if kind == "integer" and isinstance(value, float) and abs(value) < 1e300
                    else value
                )
                yield place, f"{str(shown)[:24]}", shown
        elif kind == "string":
            yield place, "a text of 1 MB", TEXT
            yield place, "a text of half characters", "\ud800" * 1000

    def _resolved(self, schema: Any) -> Any:
        while "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        return schema


# names the model that is there, and is short, whatever the API
_RIGHT = {
    "model": "smol", "messages": [{"role": "user", "content": "a"}], "prompt": "a", "role": "user",
    "options": {"num_predict": 1}, "max_tokens": 1, "max_output_tokens": 1, "n_predict": 1, "stream": False,
}  # fmt: skip


def _variants(schema: Any) -> list[Any]:
    found = schema.get("anyOf") or schema.get("oneOf") or []
    return [variant for variant in found if variant.get("type") != "null"]
