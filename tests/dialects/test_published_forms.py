"""Forms of calls that vLLM's tests of its tool parsers expect to be read.

Source: vLLM, tests/tool_parsers (Qwen3-Coder, GLM-4.5, Gemma 4, Phi-4-mini), as of November 2026.
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
