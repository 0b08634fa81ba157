"""Forms of calls that vLLM's tests of its tool parsers expect to be read.

Source: vLLM, tests/tool_parsers of each family that has them, as of November 2026.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kukri.dialects.signatures import Signatures
from tests.dialects.families import FAMILIES
from tests.dialects.test_families import dialect, everywhere

PROPERTIES = {"city": {"type": "string"}, "state": {"type": "string"}, "days": {"type": "integer"}}
TOOLS = Signatures([{"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}])
OSLO, KEY = {"city": "Oslo", "days": 2}, "<arg_key>%s</arg_key>"
ARGUMENTS: list[tuple[str, str, dict[str, Any]]] = [
    ("gemma4", 'cities:{<|"|>3<|"|>:<|"|>Oslo<|"|>}', {"cities": {"3": "Oslo"}}),
    ("gemma4", 'a:{b:{<|"|>3<|"|>:1}}', {"a": {"b": {"3": 1}}}),
    ("gemma4", "left:108.,right:22.8", {"left": 108.0, "right": 22.8}),
    ("gemma4", "city:", {"city": ""}),
    ("gemma4", 'city:,state:<|"|>TX<|"|>', {"city": "", "state": "TX"}),
    ("gemma4", 'places:[[<|"|>a]b<|"|>,<|"|>c<|"|>],<|"|>d<|"|>]', {"places": [["a]b", "c"], "d"]}),
    ("gemma4", "city:null,days:3", {"city": None, "days": 3}),
    ("gemma4", "two words:1", {"two words": 1}),  # any key is written bare
    ("qwen_xml", "\n<parameter=city>\nOslo\n<parameter=days>\n2\n</parameter>\n", OSLO),
    ("qwen_xml", "\n<parameter=days>\n2\n<parameter=city>\nOslo\n</parameter>\n", OSLO),
    ("qwen_xml", "\n<parameter=city>\nOslo\n", {"city": "Oslo"}),
    ("qwen_xml", "<parameter=city>Oslo</parameter><parameter=days>2</parameter>", OSLO),
    ("qwen_xml", "\n<parameter=city>\n\n<parameter=x>\n\n</parameter>\n", {"city": "\n<parameter=x>\n"}),
    ("glm4", "", {}),
    ("glm4", "\n    <arg_key>city</arg_key>\n    <arg_value>Oslo</arg_value>\n    ", {"city": "Oslo"}),
    ("glm4", f"{KEY % 'city'}<arg_value>Oslo</arg_value>{KEY % 'days'}<arg_value>2</arg_value>", OSLO),
    ("glm4", f"\n{KEY % 'city'}\n<arg_value>Oslo\n{KEY % 'days'}\n<arg_value>2\n", OSLO),
]  # fmt: skip
AROUND = {
    "gemma4": ("<|tool_call>call:weather{", "}<tool_call|>"),
    "qwen_xml": ("<tool_call>\n<function=weather>", "</function>\n</tool_call>"),
    "glm4": ("<tool_call>weather", "</tool_call>"),
}


@pytest.mark.parametrize(("name", "written", "meant"), ARGUMENTS)
def test_arguments_are_read_as_vllm_reads_them(name: str, written: str, meant: dict[str, Any]) -> None:
    """Catches a value that takes in the next one where a model forgets an end, or that is lost if empty."""
    text = written.join(AROUND[name])
    _, content, calls, *_ = everywhere(dialect(FAMILIES[name]), f"So.\n{text}\n", tools=TOOLS)
    assert content.strip() == "So."
    assert [(called, json.loads(arguments)) for called, arguments in calls] == [("weather", meant)]


def test_calls_of_phi_after_functools_are_read() -> None:
    """Catches Phi-4-mini's calls shown as text: it often writes functools where its template has a mark."""
    form = dialect(FAMILIES["phi4"])
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    assert (
        everywhere(form, f"functools[{call}, {call}]", tools=TOOLS)[2]
        == [("weather", '{"city": "Oslo"}')] * 2
    )
    for text in ("functools is a module.", "See functools[0] and functools.partial(weather, city='Oslo')."):
        assert everywhere(form, text, tools=TOOLS)[1:3] == (text, [])


NAMES = ("weather", "clock", "shell", "shop.order")
ANY = Signatures([{"name": name} for name in NAMES])
ORDER = "shop.order(items=[{'name': 'tea', 'n': 250}], role=None, is_new=True, tags=[], more={})"
PYTHON: list[tuple[str, list[tuple[str, Any]]]] = [
    ("weather(city='Oslo'), clock()", [("weather", {"city": "Oslo"}), ("clock", {})]),
    (
        ORDER,
        [
            (
                "shop.order",
                {"items": [{"name": "tea", "n": 250}], "role": None, "is_new": True, "tags": [], "more": {}},
            )
        ],
    ),
    ("clock(a=null, b=true)", [("clock", {"a": None, "b": True})]),
    (r"weather(city='L\'Aquila', unit='\"C\"')", [("weather", {"city": "L'Aquila", "unit": '"C"'})]),
    ("shell(command='grep \"]\" x')", [("shell", {"command": 'grep "]" x'})]),
    ("shell(command='cat <<E\na\nE')", [("shell", {"command": "cat <<E\na\nE"})]),
    ("shell(command='sed -n '1,9p' /tmp/a.py')", [("shell", {"command": "sed -n '1,9p' /tmp/a.py"})]),
    (
        "shell(command='python -c \"print(f(3, s='\\,'))\"')",
        [("shell", {"command": "python -c \"print(f(3, s='\\,'))\""})],
    ),
    ("clock(x=b'z'), weather(city='Oslo')", [("clock", {"x": "b'z'"}), ("weather", {"city": "Oslo"})]),
]


@pytest.mark.parametrize(("written", "meant"), PYTHON)
def test_calls_of_python_are_read_as_vllm_reads_them(written: str, meant: list[tuple[str, Any]]) -> None:
    """Catches a call of a shell that a quote within its command ends, and one that takes in the next."""
    olmo = "<function_calls>{}</function_calls>".format(written.replace("), ", ")\n"))
    for name, text in (
        ("lfm2", f"<|tool_call_start|> [{written}]<|tool_call_end|>"),
        ("olmo3", olmo),
        ("llama4", f"[{written}]"),
        ("llama4", f"<|python_start|>[{written}]<|python_end|>"),
    ):
        _, content, calls, *_ = everywhere(dialect(FAMILIES[name]), text, tools=ANY)
        assert (content, [(called, json.loads(given)) for called, given in calls]) == ("", meant), name


ONE = '{"name": "weather", "arguments": {"city": "Oslo"}}'
LAST = '{"arguments": {"name": "Oslo"}, "name": "clock"}'
SERIAL = r'{"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}'
LLAMA = ONE.replace("arguments", "parameters")
WEATHER, CLOCK = ("weather", {"city": "Oslo"}), ("clock", {"name": "Oslo"})
ASK = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
SEEN = (
    "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>"
)
BEGIN, SEP, END = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
OBJECTS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [  # family, text, content, calls
    ("hermes", f"<tool_call>\n{ONE}", "", [WEATHER]),
    ("hermes", f"<tool_call>{ONE}</tool_call><tool_call>{LAST}</tool_call>", "", [WEATHER, CLOCK]),
    ("hermes", f"Sure.<tool_call>{SERIAL}</tool_call>", "Sure.", [WEATHER]),
    ("llama3", ONE, "", [WEATHER]),
    *(("llama3", f"{LLAMA}{mark}{LLAMA}", "", [WEATHER, WEATHER]) for mark in ("; ", ";", " ;\n", "\n")),
    ("llama3", '{"parameters": {}}', '{"parameters": {}}', []),
    ("llama3", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ("llama3", '{"name": "Ada"}', '{"name": "Ada"}', []),
    ("llama3", f'{LLAMA} From {{weather}} and {{"city": 1}}', 'From {weather} and {"city": 1}', [WEATHER]),
    ("mistral", f"Hi[TOOL_CALLS] [{ONE}, {LAST}]", "Hi", [WEATHER, CLOCK]),
    ("mistral", "[TOOL_CALLS] not JSON", "[TOOL_CALLS] not JSON", []),
    ("mistral_names", '[TOOL_CALLS]weather{"city": "Oslo"}[TOOL_CALLS]clock{}', "", [WEATHER, ("clock", {})]),
    ("granite3", f"<|tool_call|> [\n  {LAST},\n  {ONE}\n]", "", [CLOCK, WEATHER]),
    ("granite3", f"<tool_call> [{ONE}]", "", [WEATHER]),
    ("hunyuan", f"Now. <tool_calls>[{ONE}]</tool_calls>\n</answer>", "Now.", [WEATHER]),
    ("nemotron", f"<TOOLCALL>{ONE}</TOOLCALL>", "", [WEATHER]),
    ("nemotron", f"Let me.<TOOLCALL>[{SERIAL}]</TOOLCALL>", "Let me.", [WEATHER]),
    ("seed", f"<seed:think>\nThe form is {SEEN}. So.</seed:think>{SEEN}", "", [WEATHER]),
    ("deepseek", f'Text{BEGIN}weather{SEP}{{"city":"Oslo"}}{END}', "Text", [WEATHER]),
    ("deepseek", f"Text{BEGIN[:19]}weather", f"Text{BEGIN[:19]}weather", []),
    (
        "gpt_oss",
        f'{ASK} to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{{"city": "Oslo"}}'
        '<|call|><|start|>assistant<|channel|>commentary to=functions.clock<|message|>{"name": "Oslo"}',
        "",
        [WEATHER, CLOCK],
    ),
    ("gpt_oss", "<|channel|>commentary to=functions.clock<|message|>foo", "", [("clock", {"text": "foo"})]),
    ("gpt_oss", "<|channel|>commentary to=functions.clock json<|message|>", "", [("clock", {})]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "said", "meant"), OBJECTS)
def test_calls_in_json_are_read_as_vllm_reads_them(
    name: str, text: str, said: str, meant: list[tuple[str, Any]]
) -> None:
    """Catches JSON with a name that is taken for a call, and calls in a neighbour's form that are text."""
    _, content, calls, *_ = everywhere(dialect(FAMILIES[name]), text, tools=ANY)
    assert (content, [(called, json.loads(given)) for called, given in calls]) == (said, meant)


def test_arguments_next_to_the_name_are_arguments() -> None:
    """Catches a call without its arguments, where a model has left out the object around them."""
    text = '<tool_call>{"name": "weather", "city": "Oslo"}</tool_call>'
    assert everywhere(dialect(FAMILIES["qwen"]), text, tools=ANY)[2] == [("weather", '{"city": "Oslo"}')]
