"""Arguments between tags: what is a text, what null, a number or an object, by the tool's schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kukri.dialects.families import DIALECTS
from kukri.dialects.signatures import Signatures
from tests.dialects.test_families import split

CASES = json.loads(Path(__file__).with_name("tagged_values.json").read_text(encoding="utf-8"))
FORMS = {form.name: form for form in DIALECTS}
TAGGED = {
    "qwen-xml": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "qwen-xml in one line": "<tool_call><function=f><parameter=a>{}</parameter></function></tool_call>",
    "seed": "<seed:tool_call>\n<function=f>\n<parameter=a>{}</parameter>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "glm in one line": "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>",
    "hermes that invokes": '<invoke name="f">\n<parameter name="a">{}</parameter>\n</invoke>',
}
UNIONS: list[tuple[list[str], str, Any]] = [
    (["string", "number"], "007", "007"),
    (["string", "number"], "1e5", "1e5"),
    (["string", "number"], " 12", " 12"),
    (["string", "number"], "1.5", 1.5),
    (["string", "integer"], "-0", "-0"),
    (["string", "boolean"], "true", True),
    (["string", "boolean"], "True", "True"),
    (["string", "null"], "None", None),
    (["string", "null"], "nullable", "nullable"),
    (["string", "null"], '"null"', '"null"'),
    (["string", "array"], "[1, 2", "[1, 2"),
    (["string", "array"], "['a', 2]", ["a", 2]),
    (["string", "array"], '{"a": 1}', '{"a": 1}'),
    (["string", "object", "null"], "{}", {}),
    (["string", "integer"], "null", "null"),
    (["string", "integer"], "1.5", "1.5"),
    (["string", "integer"], "1.0", "1.0"),
    (["string", "integer"], "0x1F", "0x1F"),
    (["string", "array"], "(see above)", "(see above)"),
]


def read(form: str, written: str, schema: dict[str, Any], defs: dict[str, Any]) -> Any:
    """The value of the argument `a`, read whole and character by character."""
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": defs}
    tools = Signatures([{"name": "f", "parameters": parameters}])
    dialect = FORMS[form.partition(" ")[0]]
    text = TAGGED[form].format(written)
    _, content, calls, *_ = split(dialect, [text], tools=tools)
    assert split(dialect, text, tools=tools)[1:3] == (content, calls)
    assert (content, [name for name, _ in calls]) == ("", ["f"])
    return json.loads(calls[0][1])["a"]


@pytest.mark.parametrize("form", TAGGED)
def test_values_are_of_the_types_that_the_schema_has(form: str) -> None:
    """Catches Optional[str] that is never None, "02134" that becomes 2134, and texts that become objects."""
    faults = []
    for case in CASES:
        if case["written"].endswith("\n") and "\n{}" not in TAGGED[form] and "glm" not in form:
            continue  # the last line break may belong to the form
        got = read(form, case["written"], case["schema"], case.get("defs", {}))
        if got != case["right"] or (type(got), type(case["right"])) in ((bool, int), (int, bool)):
            faults.append(f"{case['name']}: {got!r}, not {case['right']!r}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("form", TAGGED)
def test_a_text_or_something_else(form: str) -> None:
    """Catches a text that turns into a number which is written otherwise, in each form with tags."""
    faults = []
    for types, written, right in UNIONS:
        within = {"anyOf": [{"$ref": "#/$defs/T"}, {"oneOf": [{"type": one} for one in types[1:]]}]}
        for schema in ({"type": types}, {"anyOf": [{"type": one} for one in types]}, within):
            got = read(form, written, schema, {"T": {"anyOf": [{"type": types[0]}]}})
            if (type(got), got) != (type(right), right):
                faults.append(f"{written!r} as {schema}: {got!r}, not {right!r}")
    assert not faults, "\n".join(faults)
