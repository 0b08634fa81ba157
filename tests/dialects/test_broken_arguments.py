"""Arguments as small models write them: whatever comes is JSON of an object, and no text is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kukri.dialects.answer_parser import parser_of
from kukri.dialects.calls import CallDelta
from kukri.dialects.dialect import Dialect
from kukri.dialects.families import DIALECTS, HERMES
from kukri.dialects.signatures import Signatures
from kukri.dialects.values import ending
from tests.dialects.families import FAMILIES
from tests.dialects.test_families import dialect, everywhere, split

TEXTS = {"path": {"type": "string"}, "text": {"type": "string"}}
TOOLS = Signatures([{"name": "write", "parameters": {"type": "object", "properties": TEXTS}}])
BROKEN: dict[str, tuple[str, Any]] = {
    "unescaped quotes": ('{"path": "a", "text": "say "hi" now"}', {"path": "a", "text": 'say "hi" now'}),
    "code in quotes": ('{"text": "print("a", "b")", "path": "x"}', {"text": 'print("a", "b")', "path": "x"}),
    "html": ('{"text": "<a href="x">y</a>"}', {"text": '<a href="x">y</a>'}),
    "an apostrophe": ("{'text': 'it's late'}", {"text": "it's late"}),
    "bare key": ('{path: "a"}', {"path": "a"}),
    "bare value": ('{"path": a.txt}', {"path": "a.txt"}),
    "comma missing": ('{"path": "a" "text": "b"}', {"path": "a", "text": "b"}),
    "equals": ('{"path"="a"}', {"path": "a"}),
    "triple quotes": ('{"path": "a", "text": """b"""}', {"path": "a", "text": "b"}),
    "back ticks": ('{"path": "a", "text": `b`}', {"path": "a", "text": "`b`"}),
    "colon missing": ('{"path" "a"}', {"path": "a"}),
    "array not closed": ('{"path": ["a", "b"}', {"path": ["a", "b"]}),
    "object not closed in an array": ('{"path": [{"a": 1]}', {"path": [{"a": 1}]}),
    "comment": ('{"path": "a" // x\n}', {"path": "a"}),
    "comment after a comma": ('{"path": "a", // x\n "text": "b"}', {"path": "a", "text": "b"}),
    "comment within": ('{"path": /* the "file" */ "a"}', {"path": "a"}),
    "call in value": ('{"path": os.path.join("a", ")")}', {"path": 'os.path.join("a", ")")'}),
    "hex": ('{"path": 0x1F}', {"path": 31}),
    "leading zero": ('{"path": 007}', {"path": "007"}),
    "undefined": ('{"path": undefined}', {"path": None}),
    "infinity": ('{"path": Infinity}', {"path": "Infinity"}),
    "tags": ("<path>a</path>", {"path": "<path>a</path>"}),
    "yaml": ("path: a", {"path": "path: a"}),
    "raw text": ("a.txt", {"path": "a.txt"}),
    "a text": ('"a.txt"', {"path": "a.txt"}),
    "a text that is an object": (r'"{\"path\": \"a\"}"', {"path": "a"}),
    "escapes outside of texts": ('{"path": "a", \\n"text": "b"\\n}', {"path": "a", "text": "b"}),
    "closed twice": ('{"path": "a"}}', {"path": "a"}),
    "empty and quotes": ('{}""', {}),
    "nothing": ("null", {}),
    "an empty list": ("[]", {}),
}


def call(arguments: str) -> str:
    return '<tool_call>\n{"name": "write", "arguments": ' + arguments + "}\n</tool_call>"


@pytest.mark.parametrize("name", BROKEN)
def test_arguments_are_an_object_and_texts_are_whole(name: str) -> None:
    """Catches finish_reason tool_calls with arguments that no client can read, and text that is lost."""
    written, meant = BROKEN[name]
    _, content, calls, *_ = everywhere(HERMES, f"First.\n{call(written)}\nLast.", tools=TOOLS)
    assert content == "First.\nLast."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("write", meant)]


def called(form: Dialect, arguments: str) -> str:
    """A call of `write` in a form whose arguments are JSON, or in Python with them as the first one."""
    around = form.around
    if form.body == "harmony":
        return f"<|channel|>commentary to=functions.write <|constrain|>json<|message|>{arguments}<|call|>"
    if form.body == "python":
        made = f"write({arguments})"
    elif form.body == "named":
        made = f"{around.head}write{around.neck}{arguments}{around.tail}"
    else:
        made = f'{{"name": "write", "{form.arguments_key}": {arguments}}}'
    return "".join((around.before, around.open, made, around.close, around.after))


JSON_FORMS = {form.name: form for form in DIALECTS if form.body in ("harmony", "named", "json")}


@pytest.mark.parametrize("form", JSON_FORMS)
def test_arguments_are_an_object_in_every_form(form: str) -> None:
    """Catches a text that is lost, or comes as no object, in the form of one family alone."""
    faults = []
    for name, (written, meant) in BROKEN.items():
        text = called(JSON_FORMS[form], written)
        _, content, calls, *_ = whole = split(JSON_FORMS[form], [text], tools=TOOLS)
        assert split(JSON_FORMS[form], text, tools=TOOLS) == whole
        if (content.strip(), [(name, json.loads(given)) for name, given in calls]) != (
            "",
            [("write", meant)],
        ):
            faults.append(f"{name}: {calls!r}, content {content!r}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("form", [form.name for form in DIALECTS if form.body == "python"])
def test_arguments_in_python_are_whole_too(form: str) -> None:
    """Catches quotes, comments and lists without an end that are read in JSON alone."""
    python = next(one for one in DIALECTS if one.name == form)
    for written, meant in (
        ('text="say "hi" now"', {"text": 'say "hi" now'}),
        ('text="print("a", "b")", path="x"', {"text": 'print("a", "b")', "path": "x"}),
        ("text='it's late', path=\"x\"", {"text": "it's late", "path": "x"}),
        ('"a", "b"', {"path": "a", "text": "b"}),
        ('path=["a", "b"', {"path": ["a", "b"]}),
        ('path="a", # the file\n text="b"  # so\n', {"path": "a", "text": "b"}),
        ('path="a",\\n text="b"', {"path": "a", "text": "b"}),
        ('path=os.path.join("a", "b")', {"path": 'os.path.join("a", "b")'}),
    ):
        around = python.around
        text = f"{around.before}write({written}){around.after}"
        _, content, calls, *_ = everywhere(python, text, tools=TOOLS)
        assert (content, [json.loads(given) for _, given in calls]) == ("", [meant]), written


# Arguments, or values of one, that are none in any form. "zebra" must not be lost.
RAW = ("zebra", "'zebra", "5, zebra", "(zebra)", "zebra)", "[zebra", "{zebra", "zebra: a", "'a', 'zebra'",
       "path='a' zebra", "path=(1, 'zebra'", "path={'a', 'zebra'}", "x y=zebra", "1, 2, 'zebra'",
       "path==zebra", "path='a' if zebra else 'b'", "path='x', zebra='y'", '{"path": "a"} zebra',
       '{"path" zebra}', '{"path": {"zebra"}}', '{"path": ["a" zebra]}', '"path": "zebra"')  # fmt: skip
WRITTEN = ('{"path": "MARK"}', "path='MARK'", "path:MARK", "\nMARK\n</parameter>", ">MARK</", "MARK")


@pytest.mark.full(but=["qwen", "gpt_oss", "lfm2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_loses_what_it_cannot_read(name: str) -> None:
    """Catches text that a reader took before it gave up, and arguments that are JSON but no object."""
    family, wrong = FAMILIES[name], []
    form, whole = dialect(family), family.write([("write", {"path": "MARK"})]).replace('<|"|>', "")
    value = next(one for one in ("'MARK'", '"MARK"', "MARK") if one in whole)
    bare = Signatures([{"name": "write"}])
    for raw, tools in product(RAW, (TOOLS, bare)):
        for place in (next(one for one in WRITTEN if one in whole), value):
            text = "First.\n" * bool(family.before and family.most_calls > 1) + whole.replace(place, raw)
            _, content, calls, *_ = found = split(form, [text], tools=tools)
            told = [content, *(arguments for _, arguments in calls)]
            is_right = all(isinstance(json.loads(one), dict) for one in told[1:])
            if not (is_right and "zebra" in "".join(told) and split(form, text, tools=tools) == found):
                wrong.append(f"{text!r}: {told}")
    assert not wrong, "\n".join(wrong[:9])


def test_a_key_that_is_there_is_not_written_again() -> None:
    """Catches a parameter called text that the rest of broken arguments replaces."""
    ((_, arguments),) = split(HERMES, [call('{"text": "a", "path": 5 ]zebra}')], tools=TOOLS)[2]
    assert json.loads(arguments) == {"text": "a", "path": 5, "text_": "]zebra}}"}


NOW = Signatures([{"name": "now", "parameters": {"type": "object", "properties": {}}}, {"name": "write"}])


@pytest.mark.parametrize("text", ["{}", "<tool_call>\n{}\n</tool_call>"])
def test_a_tool_without_parameters_is_called_with_its_own_schema(text: str) -> None:
    """Catches an agent that never learns the time, as the model repeats the schema that it was shown."""
    for schema in ('{"type": "object", "properties": {}}', "{}", '{"properties": {}, "required": []}'):
        called = text.replace("{}", '{"name": "now", "parameters": ' + schema + "}")
        assert everywhere(HERMES, called, tools=NOW)[1:3] == ("", [("now", "{}")])
    told = '{"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}'
    assert everywhere(HERMES, told, tools=NOW)[1:3] == (told, [])


def test_what_a_stop_string_leaves_of_a_call_is_no_content() -> None:
    """Catches <tool_call> as the content of an answer that a stop string ended in its second call."""
    first, second = call('{"path": "a"}'), call('{"path": "b"}')
    for i in range(len(second) - len("</tool_call>")):
        for pieces in ([f"So.\n{first}\n{second[:i]}"], list(f"So.\n{first}\n{second[:i]}")):
            parser = parser_of(HERMES, TOOLS)
            found = [one for piece in pieces for one in parser.push(piece)]
            found += parser.flush(is_stopped=True)
            assert "".join(one for one in found if isinstance(one, str)) == "So."
            arguments = ["", ""]
            for one in found:
                if isinstance(one, CallDelta):
                    arguments[one.place] += one.arguments
            assert json.loads(arguments[0]) == {"path": "a"}
            assert not arguments[1] or isinstance(json.loads(arguments[1]), dict)
    parser = parser_of(HERMES, TOOLS)
    found = [*parser.push(f"{first}\nDone < {{x}}"), *parser.flush(is_stopped=True)]
    assert "".join(one for one in found if isinstance(one, str)) == "Done < {x}"


@given(
    st.sampled_from([form for form in DIALECTS if form.body in ("harmony", "named", "json", "python")]),
    st.text("{}[]\"\\:,'a1 \n/(#)="),  # what arguments are made of
)
def test_whatever_is_written_is_json(form: Dialect, written: str) -> None:
    """Catches a call that has ended and whose arguments are the beginning of an object."""
    for arguments in (written, f'{{"path": {written}}}', f'{{"path": "{written}"}}', f'text="{written}"'):
        text = called(form, arguments)
        whole = split(form, [text], tools=TOOLS)
        assert split(form, text, tools=TOOLS) == whole
        for _, arguments in whole[2]:
            assert isinstance(json.loads(arguments), dict), (text, arguments)


@example('"', "")  # an escaped quote ends no text
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5), st.text())
def test_any_beginning_can_be_ended(value: Any, rest: str) -> None:
    """Catches a beginning of an object that stays one, and a rest that is lost."""
    text = json.dumps({"a": value, "b": {"c": "d"}})
    for i in [0, *(i for i in range(len(text) + 1) if text[i - 1 : i] in tuple(',:"{}[] '))]:
        beginning = text[:i]
        if beginning.endswith("\\") or (beginning.count('"') % 2 and beginning.rstrip('"').endswith("\\")):
            continue  # the reader writes escapes whole
        made = json.loads(beginning + ending(beginning, rest), strict=False)
        assert isinstance(made, dict)
        assert not rest.strip() or i == len(text) or any(rest.strip() in one for one in _texts(made))


def _texts(value: Any) -> Iterator[str]:
    """All keys and texts of a value."""
    if isinstance(value, dict):
        yield from value
        value = [*value.values()]
    if isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, str):
        yield value
