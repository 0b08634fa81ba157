"""The families: a table of dialects, and which of them a model has.

To add a family, add an entry; `docs/adding-a-part.md` says how. The first entry whose signs a model has is
its dialect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kukri.dialects.dialect import Around, Dialect
from kukri.dialects.thoughts import Thoughts

HARMONY = Dialect(
    "harmony", "harmony", signs=(("<|channel|>", "<|message|>", "<|constrain|>"),), most_calls=1
)
GEMMA_4 = Dialect(
    "gemma4",
    "gemma",
    Around(open="<|tool_call>", close="<tool_call|>", head="call:", edge='<|"|>'),
    signs=(("<|tool_call>",),),
)
FUNCTION_GEMMA = Dialect(
    "functiongemma",
    "gemma",
    Around(open="<start_function_call>", close="<end_function_call>", head="call:", edge="<escape>"),
    signs=(("<start_function_call>",),),
)
MISTRAL_NAMES = Dialect(
    "mistral-names",
    "named",
    Around(open="[TOOL_CALLS]", neck="[ARGS]"),
    signs=(("[TOOL_CALLS]", "[ARGS]"),),
    id_length=9,
)
MISTRAL = Dialect(
    "mistral",
    "json",
    Around(before="[TOOL_CALLS][", between=", ", after="]"),
    signs=(("[TOOL_CALLS]",),),
    id_length=9,
)
_DEEPSEEK = Around(
    before="<｜tool▁calls▁begin｜>",
    open="<｜tool▁call▁begin｜>",
    close="<｜tool▁call▁end｜>",
    after="<｜tool▁calls▁end｜>",
    neck="<｜tool▁sep｜>",
)
DEEPSEEK_R1 = Dialect(
    "deepseek-r1",
    "named",
    replace(_DEEPSEEK, between="\n", head="function<｜tool▁sep｜>", neck="\n```json\n", tail="\n```"),
    signs=(("<｜tool▁call▁begin｜>", "```json"),),
)
DEEPSEEK = Dialect("deepseek", "named", _DEEPSEEK, signs=(("<｜tool▁call▁begin｜>",),))
MINICPM = Dialect(
    "minicpm",
    "python",
    Around(before="<|tool_call_start|>\n```python\n", between="\n", after="\n```\n<|tool_call_end|>"),
    signs=(("<|tool_call_start|>", "```python"),),
)
LFM2 = Dialect(
    "lfm2",
    "python",
    Around(before="<|tool_call_start|>[", between=", ", after="]<|tool_call_end|>"),
    signs=(("<|tool_call_start|>",),),
)
OLMO_3 = Dialect(
    "olmo3",
    "python",
    Around(before="<function_calls>", between="\n", after="</function_calls>"),
    signs=(("<function_calls>",),),
)
SEED = Dialect(
    "seed",
    "tagged",
    Around(open="<seed:tool_call>\n", close="\n</seed:tool_call>", between="\n"),
    signs=(("<seed:tool_call>",),),
)
GLM = Dialect(
    "glm", "keys", Around(open="<tool_call>", close="</tool_call>", between="\n"), signs=(("<arg_key>",),)
)
HUNYUAN = Dialect(
    "hunyuan",
    "json",
    Around(before="<tool_calls>[", between=", ", after="]</tool_calls>"),
    signs=(("<tool_calls>",),),
)
NEMOTRON = Dialect(
    "nemotron",
    "json",
    Around(before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>"),
    signs=(("<TOOLCALL>",),),
)
_TOOL_CALL = Around(open="<tool_call>\n", close="\n</tool_call>", between="\n")
QWEN_XML = Dialect(
    "qwen-xml", "tagged", replace(_TOOL_CALL, edge="\n"), signs=(("<tool_call>", "<function="),)
)
HERMES = Dialect("hermes", "json", _TOOL_CALL, signs=(("<tool_call>",),))
GRANITE_3 = Dialect(
    "granite3",
    "json",
    Around(before="<|tool_call|>[", between=", ", after="]"),
    signs=(("<|tool_call|>", "<|start_of_role|>"),),
)
PHI_4 = Dialect(
    "phi4",
    "json",
    Around(before="<|tool_call|>[", between=", ", after="]<|/tool_call|>"),
    signs=(("<|tool_call|>",),),
    also=("functools",),  # as Phi-4-mini often writes
)
LLAMA_PYTHON = Dialect(
    "llama-python",
    "python",
    Around(before="[", between=", ", after="]"),
    signs=(("func_name1(",),),
    also=("<|python_start|>", "<|python_tag|>"),
    begins_bare=True,
)
LLAMA_3 = Dialect(
    "llama3",
    "json",
    Around(between="; "),
    signs=(("<|python_tag|>",), ("<|python_start|>",), ('"parameters": ',)),
    also=("<|python_tag|>", "<|python_start|>"),
    arguments_key="parameters",
    begins_bare=True,
    most_calls=1,
)
GENERIC = Dialect("generic", "json", _TOOL_CALL, is_generic=True)  # always with a grammar

DIALECTS = (
    HARMONY, GEMMA_4, FUNCTION_GEMMA, MISTRAL_NAMES, MISTRAL, DEEPSEEK_R1, DEEPSEEK, QWEN_XML, MINICPM, LFM2,
    OLMO_3, SEED, GLM, HUNYUAN, NEMOTRON, HERMES, GRANITE_3, PHI_4, LLAMA_PYTHON, LLAMA_3,
)  # fmt: skip

THINK = Thoughts()
# (signs, how reasoning is marked), for those who do not do it by <think>
THOUGHTS = (
    (("[THINK]",), Thoughts("[THINK]", "[/THINK]", recurs=True)),
    (("<|channel>",), Thoughts("<|channel>thought", "<channel|>", recurs=True)),
    (
        ("<seed:think>",),
        Thoughts("<seed:think>", "</seed:think>", prompts=("<seed:think><seed:cot_budget_reflect>",)),
    ),
    (("<|thought_start|>",), Thoughts("<|thought_start|>", "<|thought_end|>")),
    (
        ("Here is my thought process:",),
        Thoughts("Here is my thought process:", "Here is my response:", also=("Here's my thought process:",)),
    ),
    (("<response>",), Thoughts(answer=("<response>", "</response>"))),
    (("<answer>",), Thoughts(answer=("<answer>", "</answer>"))),
)

# marks around calls that models write without having been trained to
_COMMON_OPENERS = (
    "<tool_call>", "<tool_calls>", "<function_call>", "<function_calls>", "<tool>", "<tools>",
    "<|tool_call|>",
)  # fmt: skip
_COMMON_CLOSERS = (
    "</tool_call>", "</tool_calls>", "</function_call>", "</function_calls>", "</tool>", "</tools>",
    "<|/tool_call|>", "<|python_end|>",
)  # fmt: skip
OPENERS = tuple(dict.fromkeys([*_COMMON_OPENERS, *(mark for d in DIALECTS for mark in d.openers)]))
CLOSERS = tuple(dict.fromkeys([*_COMMON_CLOSERS, *(mark for d in DIALECTS for mark in d.around.closers)]))
# further control tokens within calls
INNER = (
    "[ARGS]", "[CALL_ID]", "<｜tool▁sep｜>", '<|"|>', "<escape>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>",
)  # fmt: skip


def dialect_of(template: str | None, tokens: Container[str]) -> Dialect:
    """Return the dialect of a model by its chat template and tokens; `GENERIC` if no family matches."""
    template = template or ""

    def has(signs: Sequence[str]) -> bool:
        return all(sign in template or sign in tokens for sign in signs)

    takes_tools = re.search(r"\btools\b", template) is not None
    families = (d for d in DIALECTS if (takes_tools or d is HARMONY) and any(map(has, d.signs)))
    thoughts = next((thoughts for signs, thoughts in THOUGHTS if has(signs)), THINK)
    return replace(next(families, GENERIC), thoughts=thoughts)


_INTRODUCTION = """\
You can call functions. Each line between <tools> and </tools> describes one of them:
<tools>
{tools}
</tools>
Call a function by writing its name and its arguments as JSON, like this:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>
The results come between <tool_response> and </tool_response>."""


def introduction(tools: Sequence[Mapping[str, Any]]) -> str:
    """The part of a system prompt that shows tools and the form `GENERIC` to a model without one."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    return _INTRODUCTION.format(tools="\n".join(lines))
