"""Families times cases: each transcript read whole and cut at every character, and forms of nobody's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kukri.dialects.answer_parser import parser_of
from kukri.dialects.calls import CallDelta
from kukri.dialects.dialect import Dialect
from kukri.dialects.families import DIALECTS, GENERIC, HERMES, MISTRAL_NAMES, QWEN_XML, dialect_of
from kukri.dialects.history import readable
from kukri.dialects.signatures import Signatures
from kukri.dialects.thoughts import Thought
from kukri.tokenizer.chat import ChatTemplate
from tests.dialects.families import FAMILIES, QWEN, Calls, Family, history_of
from tests.stopwatch import slowness, stopwatch

FUNCTIONS = [
    {
        "name": "save",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "n": {"type": "integer"},
                "deep": {"type": "object"},
                "flag": {"type": "boolean"},
                "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
                "kind": {"$ref": "#/$defs/item"},
            },
            "$defs": {"item": {"type": "string"}},
        },
    },
    {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
]
TOOLS = Signatures(FUNCTIONS)
PLAIN: Calls = [("save", {"text": "Paris"})]
NESTED: Calls = [
    (
        "save",
        {
            "text": "Zürich \"}' \\ <b>12</b>\n\n  日本 👩‍🚀 {[(,)]}",
            "n": -12,
            "deep": {"a": [1, {"b": None, "c": [True, 2.5e-3]}], "d": "it's 12"},
            "flag": True,
            "items": ["1", "x y", ""],
            "kind": "17",
        },
    )
]
TWO: Calls = [*NESTED, ("get_time", {})]
SAID = "It is { noon } [here]: 3 < 4."

Outcome = tuple[str, str, list[tuple[str, str]], list[Any], list[Any]]


def dialect(family: Family) -> Dialect:
    return dialect_of(family.template, dict.fromkeys((*family.control, *family.plain), 0))


def split(form: Dialect, pieces: Any, prompt: str = "", is_cut: bool = False, tools: Any = TOOLS) -> Outcome:
    """(thoughts, content, calls, where thoughts are, where answers are) of a text in pieces."""
    parser = parser_of(form, tools, prompt)
    found = [event for piece in pieces for event in parser.push(piece)] + parser.flush(is_cut=is_cut)
    return (*gathered(found), parser.thoughts, parser.answers)


def gathered(events: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """(thoughts, content, calls) of a parser's events."""
    thoughts, content, calls = "", "", []
    for event in events:
        if isinstance(event, Thought):
            thoughts += event.text
        elif isinstance(event, CallDelta):
            if event.name is not None:
                assert event.place == len(calls)
                calls.append((event.name, ""))
            name, arguments = calls[event.place]
            calls[event.place] = name, arguments + event.arguments
        else:
            content += event
    return thoughts, content, calls


def everywhere(form: Dialect, text: str, **options: Any) -> Outcome:
    """What a text is split into, which must be the same cut at any place, and at every one."""
    whole = split(form, [text], **options)
    assert split(form, text, **options) == whole
    for i in range(len(text)):
        assert split(form, [text[:i], text[i:]], **options) == whole, text[:i]
    return whole


def transcripts(family: Family) -> Iterator[tuple[str, str, str, str, Calls]]:
    """(case, text, thoughts, content, calls): what a family writes."""
    think = "Hm, 3 < 4?\n\nSo.".join(family.thinks)
    two = TWO[: family.most_calls]
    yield "answer", SAID.join(family.says), "", SAID, []
    yield "thoughts, answer", think + SAID.join(family.says), "Hm, 3 < 4?\n\nSo.", SAID, []
    for name, calls in (("one call", PLAIN), ("nested", NESTED), ("two calls", two), ("empty", TWO[1:])):
        yield name, family.write(calls), "", "", calls
        yield f"thoughts, {name}", think + family.write(calls), "Hm, 3 < 4?\n\nSo.", "", calls
        if family.before:
            yield f"content, {name}", family.before + family.write(calls), "", "Let me see.", calls


CASES = [
    pytest.param(family, *case[1:], id=f"{name}: {case[0]}")
    for name, family in FAMILIES.items()
    for case in transcripts(family)
]


@pytest.mark.parametrize(("family", "text", "thoughts", "content", "calls"), CASES)
def test_a_transcript_is_read_exactly(family, text, thoughts, content, calls):
    """Catches a form that is read as another's, arguments that change, and anything that a cut changes."""
    form = dialect(family)
    assert form.name == family.dialect
    found = everywhere(form, text)
    assert found[:2] == (thoughts, content)
    assert [(name, json.loads(arguments)) for name, arguments in found[2]] == calls


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("{% if tools %}<tool_call>", {}, "hermes"),
        ("{% if tools %}[TOOL_CALLS]", {"[TOOL_CALLS]": 5}, "mistral"),
        ("{% if tools %}[TOOL_CALLS][ARGS]", {}, "mistral-names"),
        ("{% if tools %}", {"<|python_tag|>": 9}, "llama3"),
        ("{% if tools %}<tool_call><function=", {"<|tool_call_start|>": 9}, "qwen-xml"),  # LFM3
        ("{% if tools %}", {}, "generic"),
        ("<tool_call>", {}, "generic"),
        (None, {"<|python_tag|>": 9}, "generic"),
    ],
)
def test_the_template_tells_the_dialect(template, tokens, expected):
    """Catches a model whose calls are read as another family's, or that is never shown its tools."""
    assert dialect_of(template, tokens).name == expected


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_call_that_is_cut_off_is_the_beginning_of_it(family):
    """Catches arguments that a cut makes up, and the form of a call, such as </tool_c, shown as content."""
    text, form = family.write(NESTED), dialect(family)
    ((_, whole),) = split(form, text)[2]
    told = 0
    for i in range(len(text)):
        _, content, calls = split(form, [text[:i]], is_cut=True)[:3]
        assert len(calls) <= 1
        assert not (calls and content), (text[:i], content)
        for name, arguments in calls:
            assert name == "save"
            assert whole.startswith(arguments)
            told += 1
    assert told > len(whole) / 2, "arguments come as they grow"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_calls_survive_the_template(family):
    """Catches calls that a template leaves out or prints as the model does not write them."""
    form, template = dialect(family), ChatTemplate(family.template, "<bos>")
    history = history_of(family)[:2]
    if family.most_calls == 1:
        history[1]["tool_calls"] = history[1]["tool_calls"][:1]
    told = readable(history, None, form, family.template, reads_code=False)
    prompt = template.render(told[:1])
    answer = template.render(told, add_generation_prompt=False).removeprefix(prompt)
    if not form.begins_bare:  # there a text before a call makes it no call
        calls = [(name, json.loads(arguments)) for name, arguments in split(form, answer, prompt)[2]]
        sent = [call["function"] for call in history[1]["tool_calls"]]
        assert calls == [(function["name"], json.loads(function["arguments"])) for function in sent]


UNIONS = {
    "a": (["string", "null"], None), "b": (["string", "number"], "007"), "c": (["string", "integer"], 5),
    "d": (["array", "null"], ["x", None]), "e": (["object", "null"], {"f": True}),
    "h": (["null", "boolean"], True),
    "i": (["string", "null"], "true"), "j": (["string", "null"], "a\nb"), "l": (["number", "string"], 1.5),
    "m": (["string", "null"], ""), "n": (["string"], "None"),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_values_of_several_types_survive_the_template(family):
    """Catches an Optional[str] that is the text 'null' after a turn, and a text that becomes a number."""
    form, template = dialect(family), ChatTemplate(family.template, "<bos>")
    given = {key: value for key, (_, value) in UNIONS.items()}
    history = history_of(family)[:2]
    history[1]["tool_calls"] = history[1]["tool_calls"][:1]
    history[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(given)
    told = readable(history, None, form, family.template, reads_code=False)
    prompt = template.render(told[:1])
    answer = template.render(told, add_generation_prompt=False).removeprefix(prompt)
    schema = {key: {"anyOf": [{"type": kind} for kind in kinds]} for key, (kinds, _) in UNIONS.items()}
    tools = Signatures([{"name": "get_weather", "parameters": {"type": "object", "properties": schema}}])
    if not form.begins_bare:
        assert [json.loads(one) for _, one in split(form, answer, prompt, tools=tools)[2]] == [given]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_nothing_is_called_without_tools(family):
    """Catches calls where there are no tools, and thoughts that only tools keep out of the answer."""
    text = "Hm.".join(family.thinks) + SAID.join(family.says)
    assert everywhere(dialect(family), text, tools=None)[:3] == ("Hm.", SAID, [])
    assert everywhere(dialect(family), family.write(PLAIN), tools=None)[2] == []


@pytest.mark.parametrize("form", [*DIALECTS, GENERIC], ids=lambda form: form.name)
def test_what_a_dialect_writes_it_reads(form):
    """Catches a history that shows the model its calls in a form that is not its own."""
    if form.body != "harmony":  # its template always prints them
        text = form.written(NESTED if form.body == "harmony" else TWO)
        found = everywhere(form, text)
        assert found[1] == ""
        assert [(name, json.loads(arguments)) for name, arguments in found[2]] == TWO


# ---- forms of nobody's own


CALLED = [("save", {"text": "x", "n": 1})]
LOOSE = [
    '{"name": "save", "arguments": {"text": "x", "n": 1}}',
    '{"name": "save", "parameters": {"text": "x", "n": 1}}',
    '{"function": "save", "args": {"text": "x", "n": 1}}',
    '{"type": "function", "function": {"name": "save", "arguments": "{\\"text\\": \\"x\\", \\"n\\": 1}"}}',
    '{"arguments": {"text": "x", "n": 1}, "name": "save"}',
    '[{"name": "save", "arguments": {"text": "x", "n": 1}}]',
    "{'name': 'save', 'arguments': {'text': 'x', 'n': 1,},}",
    '{name: "save", arguments: {text: "x", n: 1}}',
    '```json\n{"name": "save", "arguments": {"text": "x", "n": 1}}\n```',
    '```\n{\n  "name": "save",\n  "arguments": {"text": "x", "n": 1}\n}\n```',
    '```tool_call\n{"name": "save", "arguments": {"text": "x", "n": 1}}\n```',
    '<function_call>{"name": "save", "arguments": {"text": "x", "n": 1}}</function_call>',
    '<tool>{"name": "save", "arguments": {"text": "x", "n": 1}}</tool>',
    '<tool_call>{"name": "save", "arguments": {"text": "x", "n": 1}}',
    '<tool_call>\n{"name": "save", "arguments": {"text": "x", "n": 1}\n</tool_call>',
    '```xml\n<tool_call>{"name": "save", "arguments": {"text": "x", "n": 1}}</tool_call>\n```',
    "<function=save>\n<parameter=text>\nx\n</parameter>\n<parameter=n>1</parameter>\n</function>",
    '<tool_call>save\n{"text": "x", "n": 1}\n</tool_call>',
    '[TOOL_CALLS][{"name": "save", "arguments": {"text": "x", "n": 1}}]',
    "<|tool_call_start|>[save(text='x', n=1)]<|tool_call_end|>",
    '<tools>\n{"type": "function", "function": {"name": "save", "description": "Saves.", '
    '"parameters": {"text": "x", "n": 1}, "required": ["text"]}}\n</tools>',
    '{"name": "save", "strict": false, "parameters": { "text": "x", "n": 1}, "description": "Saves."}',
]


@pytest.mark.parametrize("before", ["", "I will save it.\n\n"])
@pytest.mark.parametrize("form", [HERMES, QWEN_XML, GENERIC], ids=lambda form: form.name)
@pytest.mark.parametrize("text", LOOSE)
def test_a_form_that_small_models_write_is_a_call(form, before, text):
    """Catches calls of small models that are shown as text, as every small Qwen coder's were."""
    found = everywhere(form, before + text)
    assert found[1] == before.strip()
    assert [(name, json.loads(arguments)) for name, arguments in found[2]] == CALLED


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Paris", "arguments": {"text": "x"}}',
        '{"name": "save", "description": "Saves a text"}',
        '{"name": "save", "parameters": { "type": "object", "properties": {}}}',
        '<tools>\n{"type": "function", "function": {"name": "save", "description": "Saves.", '
        '"parameters": {"properties": {"text": {"type": "string"}}}}}\n</tools>',
        "<tools>a saw, a hammer</tools>",
        '{"answer": 42} is JSON',
        'As JSON: {"name": "save", "arguments": {}}',
        "```python\nsave(text='x')\n```\nDone.",
        '```json\n{"city": "Paris"}\n```\n',
        "```\nplain\n```",
        "[1] A source.\n[save](http://x.y)\n[ ] to do",
        "if a <tool_call> b < c",
        "<tool>hammer</tool> and <function_call>other</function_call>",
        "  indented\n\n  text \n",
        "{",
        "[",
        "```",
    ],
)
def test_what_is_no_call_is_text(text):
    """Catches answers that lose text, or call something, because they look a little like a call."""
    for form in (HERMES, QWEN_XML):
        assert everywhere(form, text)[:3] == ("", text, [])


def test_text_after_a_call_is_text():
    """Catches words after a call that are taken for another, as a word and a parenthesis look like Python."""
    for form in (MISTRAL_NAMES, HERMES):
        text = form.written(PLAIN) + "\nDone (really), and {so} on."
        assert everywhere(form, text)[1:3] == (
            "Done (really), and {so} on.",
            split(form, form.written(PLAIN))[2],
        )


def test_what_looks_like_a_call_and_is_not_taken_is_told():
    """Catches an agent that waits for a call which nobody mentions."""
    for text, missed in (
        ("<tool_call>{broken</tool_call>", ["<tool_call>"]),
        ("<|tool_call_start|>nothing", ["<|tool_call_start|>"]),
        ("plain {text}", []),
    ):
        parser = parser_of(HERMES, TOOLS)
        parser.push(text)
        parser.flush()
        assert parser.missed == missed


ARGUMENTS = [
    ("{'a': 'it\\'s', 'b': True, 'c': None}", {"a": "it's", "b": True, "c": None}),
    ('{"a": "two\nlines\tand a tab", "b": (1, 2)}', {"a": "two\nlines\tand a tab", "b": [1, 2]}),
    ('{"a": "C:\\dir \\x41 \\u00e9", "b": [1, 2,],}', {"a": "C:\\dir A é", "b": [1, 2]}),
    ('{"a": .5, "b": 1_000, "c": 0x1f, "d": word}', {"a": 0.5, "b": 1000, "c": 31, "d": "word"}),
    ('{"a": """say "hi"\n""", "b": {}}', {"a": 'say "hi"\n', "b": {}}),
    ('{"a": "x" "b": 1e999}', {"a": "x", "b": "1e999"}),
]


@pytest.mark.parametrize(("written", "meant"), ARGUMENTS)
def test_arguments_are_json_whatever_they_are_written_in(written, meant):
    """Catches arguments that no client can read."""
    ((_, arguments),) = everywhere(HERMES, f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>')[
        2
    ]
    assert json.loads(arguments) == meant


def test_an_end_that_a_model_forgets_is_added():
    """Catches a call that is lost for want of its last tag; one that was cut off stays as it is."""
    text = "<tool_call>\n<function=save>\n<parameter=text>\nx\n</parameter>\n"
    assert split(QWEN_XML, [text])[2] == [("save", '{"text": "x"}')]
    assert split(QWEN_XML, [text], is_cut=True)[2] == [("save", '{"text": "x"')]


@pytest.mark.full
def test_a_cut_in_the_mark_of_another_call_shows_nothing():
    """Catches a stray < as the content of an answer that was cut in its second call."""
    first, second = (QWEN.write([call]) for call in TWO)
    for i in range(len(second)):
        _, content, calls = everywhere(HERMES, f"{first}\n{second[:i]}", is_cut=True)[:3]
        assert content == ""
        assert calls[0][0] == TWO[0][0]
    assert everywhere(HERMES, f"{first}\nSo a < b", is_cut=True)[1].endswith("So a < b")


def test_thoughts_that_the_prompt_began_end_in_the_answer():
    """Catches a </think> without its opener that is shown, and thoughts that are taken for the answer."""
    thoughtful = dialect(QWEN)
    for prompt in ("<|im_start|>assistant\n<think>\n", "<think>"):
        assert everywhere(thoughtful, "Hm.\n</think>\n\nYes.", prompt=prompt)[:2] == ("Hm.", "Yes.")
    assert everywhere(thoughtful, "</think>\n\nYes.", prompt="<think>\n\n</think>\n\n")[:2] == ("", "Yes.")


@pytest.mark.full
def test_a_call_in_thoughts_that_nothing_closed_is_a_call():
    """Catches an agent that stops as the model forgot to close its thoughts, and calls only thought of."""
    thoughts = "I will call it.\n" + QWEN.write(TWO)
    for prompt, text in (("<think>\n", thoughts), ("", f"<think>{thoughts}")):
        assert [(n, json.loads(a)) for n, a in everywhere(HERMES, text, prompt=prompt)[2]] == TWO
        assert everywhere(HERMES, text, prompt=prompt, is_cut=True)[2] == []
        assert everywhere(HERMES, f"{text}\nOr not.", prompt=prompt)[2] == []
        assert everywhere(HERMES, f"{text}</think>No.", prompt=prompt)[1:3] == ("No.", [])


@pytest.mark.representative(4)
@settings(max_examples=200)
@given(
    form=st.sampled_from([*DIALECTS, GENERIC]),
    text=st.lists(
        st.one_of(
            st.sampled_from(
                [
                    mark
                    for form in DIALECTS
                    for mark in (*form.openers, *form.around.closers, *form.thoughts.marks)
                ]
                + [
                    '{"name": "save", "arguments": {',
                    "save(",
                    "text=",
                    "'",
                    '"',
                    "}",
                    "]",
                    ")",
                    ",",
                    "\n",
                    "```",
                    "\\",
                ]
                + [
                    "<function=save>",
                    "<parameter=text>",
                    "</parameter>",
                    "</function>",
                    "save",
                    "{",
                    "[",
                    ":",
                    " ",
                ]
                + [
                    "<|start|>assistant",
                    "<|channel|>",
                    "analysis",
                    "final",
                    "<|message|>",
                    "<|end|>",
                    "to=save",
                ]
            ),
            st.text(max_size=3),
        ),
        max_size=14,
    ).map("".join),
    cuts=st.lists(st.integers(0, 300), max_size=8),
    is_cut=st.booleans(),
)
def test_however_a_text_is_cut_it_is_the_same(form, text, cuts, is_cut):
    """Catches anything that depends on where a chunk ends, in any family, and a reader that fails."""
    whole = split(form, [text], is_cut=is_cut)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert split(form, [text[a:b] for a, b in pairwise(places)], is_cut=is_cut) == whole
    assert split(form, text, is_cut=is_cut) == whole


DOUBLED = [
    '{{"name": "save", "arguments": {"text": "{{a}}", "deep": {"b": {}}}}}',
    '{{"name": "save", "arguments": {{"text": "{{a}}", "deep": {{"b": {{}}}}}}}}',
    '{"name": "save", "arguments": {{"text": "{{a}}", "deep": {"b": {}}}}}',
]


@pytest.mark.parametrize("text", DOUBLED)
@pytest.mark.parametrize("form", ["<tool_call>\n%s\n</tool_call>", "```json\n%s\n```", "%s"])
def test_doubled_braces_are_braces(form, text):
    """Catches a call that is shown as text: Qwen2.5-Coder copies the doubled braces of its template."""
    _, content, calls, *_ = everywhere(HERMES, form % text)
    assert content == ""
    ((name, found),) = calls
    assert (name, json.loads(found)) == ("save", {"text": "{{a}}", "deep": {"b": {}}})


def test_a_long_call_takes_linear_time():
    """Catches a parser that looks at all of a call again for each token of it."""
    times = []
    for n in (20_000, 80_000):
        text = f'<tool_call>{{"name": "save", "arguments": {{"text": "{"word " * (n // 5)}"}}}}</tool_call>'
        pieces = [text[i : i + 5] for i in range(0, len(text), 5)]
        with stopwatch() as took:
            ((_, arguments),) = split(HERMES, pieces)[2]
        times.append(took.seconds)
        assert len(arguments) > n
    assert times[1] < 10 * times[0] + 0.5 * slowness()
