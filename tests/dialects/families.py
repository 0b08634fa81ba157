"""Model families that call tools: a tokenizer's marks, and what matters of their published chat templates.

The templates render a system text, tools, calls and results as the families do; dates, default system texts
and the like are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.dialects import family_templates as templates
from tests.tiny_gguf import tiny_config, write_tiny

Calls = Sequence[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Family:
    """How a family writes."""

    template: str
    control: tuple[str, ...]  # control tokens; the last one ends an answer
    write: Callable[[Calls], str]  # what the model writes to call
    before: str = "Let me see.\n\n"  # what it may say first
    plain: tuple[str, ...] = ()  # tokens that are marks and no control tokens
    dialect: str = "hermes"  # the name of its entry in the table
    thinks: tuple[str, str] = ("<think>\n", "\n</think>\n\n")  # around its thoughts
    says: tuple[str, str] = ("", "")  # around an answer without calls
    most_calls: int = 2  # in one answer
    history: str = ""  # the prompt of `HISTORY`
    n_calls_in_history: int = 2
    id_length: int | None = None
    variables: dict[str, Any] = field(default_factory=dict)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Calls) -> str:
    objects = [_json({"name": name, "arguments": given}) for name, given in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


def _llama(calls: Calls) -> str:
    return "; ".join(_json({"name": name, "parameters": given}) for name, given in calls)


def _mistral(calls: Calls) -> str:
    return f"[TOOL_CALLS]{_json([{'name': name, 'arguments': given} for name, given in calls])}"


def _mistral_names(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls)


def _code(calls: Calls) -> str:
    lines = [f"{n}({', '.join(f'{key}={value!r}' for key, value in given.items())})\n" for n, given in calls]
    return f"<code>\n{''.join(lines)}</code>"


def _tagged(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_shown(value)}\n</parameter>\n" for key, value in given.items())
        + "</function>\n</tool_call>"
        for name, given in calls
    )


def _seed(calls: Calls) -> str:
    text = _tagged(calls).replace("tool_call>", "seed:tool_call>")
    return re.sub(r"(<parameter=\w+>)\n(.*?)\n(</parameter>)", r"\1\2\3", text, flags=re.DOTALL)


def _keys(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_shown(value)}</arg_value>\n"
            for key, value in given.items()
        )
        + "</tool_call>"
        for name, given in calls
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _harmony(calls: Calls) -> str:
    ((name, given),) = calls
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}"


def _gemma(calls: Calls) -> str:
    quote = '<|"|>'

    def write(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{write(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(write, value)) + "]"
        return _json(value)

    return "".join(f"<|tool_call>call:{name}{write(given)}<tool_call|>" for name, given in calls)


def _python(begin: str, between: str, end: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        lines = (
            f"{n}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for n, given in calls
        )
        return f"{begin}{between.join(lines)}{end}"

    return write


def _listed(begin: str, end: str = "") -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        objects = (_json({"name": name, "arguments": given}) for name, given in calls)
        return f"{begin}[{', '.join(objects)}]{end}"

    return write


def _deepseek(calls: Calls) -> str:
    written = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}<｜tool▁call▁end｜>" for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_QWEN_HISTORY = """\
<|im_start|>user
Paris?<|im_end|>
<|im_start|>assistant
Let me see.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Zürich", "unit": "C"}}
</tool_call>
<tool_call>
{"name": "get_time", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
12 C
</tool_response>
<tool_response>
noon
</tool_response><|im_end|>
<|im_start|>assistant
"""
QWEN = Family(templates.QWEN, _CHATML, _hermes, plain=_TAGS, history=_QWEN_HISTORY)
FAMILIES = {
    "qwen": QWEN,
    "hermes": Family(templates.QWEN, _CHATML, _hermes, history=_QWEN_HISTORY),
    "llama3": Family(
        templates.LLAMA_3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eot_id|>"),
        _llama,
        before="",
        dialect="llama3",
        n_calls_in_history=1,
        history="<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nParis?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "get_weather", "parameters": {"city": "Zürich", "unit": "C"}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"12 C"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": Family(
        templates.MISTRAL,
        ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
        _mistral,
        dialect="mistral",
        id_length=9,
        history="<s>[INST] Paris?[/INST]"
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich", "unit": "C"}, '
        '"id": "CALL00000"}, {"name": "get_time", "arguments": {}, "id": "CALL00001"}]</s>'
        '[TOOL_RESULTS] {"content": 12 C, "call_id": "CALL00000"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {"content": noon, "call_id": "CALL00001"}[/TOOL_RESULTS]',
    ),
    "mistral_names": Family(
        templates.MISTRAL_NAMES,
        ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[ARGS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
         "[CALL_ID]", "</s>"),
        _mistral_names,
        dialect="mistral-names",
        id_length=9,
        history="<s>[INST]Paris?[/INST]Let me see."
        '[TOOL_CALLS]get_weather[CALL_ID]CALL00000[ARGS]{"city": "Zürich", "unit": "C"}'
        "[TOOL_CALLS]get_time[CALL_ID]CALL00001[ARGS]{}</s>[TOOL_RESULTS]CALL00000[TOOL_CONTENT]12 C"
        "[/TOOL_RESULTS][TOOL_RESULTS]CALL00001[TOOL_CONTENT]noon[/TOOL_RESULTS]",
    ),
    "smollm3": Family(
        templates.SMOLLM3,
        _CHATML,
        _hermes,
        plain=(*_TAGS, "<code>", "</code>"),
        history="<|im_start|>system\n## Metadata\n\nReasoning Mode: /think\n\n<|im_end|>\n"
        "<|im_start|>user\nParis?<|im_end|>\n<|im_start|>assistant\nLet me see.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "unit": "C"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n12 C<|im_end|>\n<|im_start|>user\nnoon<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen_xml": Family(templates.QWEN_XML, _CHATML, _tagged, plain=_TAGS, dialect="qwen-xml"),
    "gpt_oss": Family(
        templates.GPT_OSS,
        ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
        _harmony,
        before="<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant",
        dialect="harmony",
        history='<|start|>system<|message|>Reasoning: medium\n\n# Valid channels: analysis, '
        'commentary, final. Channel must be included for every '
        'message.<|end|><|start|>user<|message|>Paris?<|end|><|start|>assistant<|channel|'
        '>analysis<|message|>Let me see.<|end|><|start|>assistant '
        'to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Zürich", '
        '"unit": "C"}<|call|><|start|>functions.get_weather '
        'to=assistant<|channel|>commentary<|message|>"12 C"<|end|><|start|>assistant '
        'to=functions.get_time<|channel|>commentary '
        'json<|message|>{}<|call|><|start|>functions.get_time '
        'to=assistant<|channel|>commentary<|message|>"noon"<|end|><|start|>assistant',
        thinks=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        says=("<|channel|>final<|message|>", ""),
        most_calls=1,
    ),
    "gemma4": Family(
        templates.GEMMA_4,
        ("<bos>", "<|turn>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
         "<tool_response|>", "<|channel>", "<channel|>", '<|"|>', "<|think|>", "<turn|>"),
        _gemma,
        dialect="gemma4",
        history='<bos><|turn>user\nParis?<turn|>\n<|turn>model\nLet me '
        'see.<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,unit:<|"|>C<|"|>}<tool_ca'
        'll|><|tool_call>call:get_time{}<tool_call|><|tool_response>response:get_weather{'
        'value:<|"|>12 '
        'C<|"|>}<tool_response|><|tool_response>response:get_time{value:<|"|>noon<|"|>}<t'
        'ool_response|>',
        thinks=("<|channel>thought\n", "<channel|>"),
    ),
    "lfm2": Family(
        templates.LFM2,
        ("<|startoftext|>", "<|im_start|>", "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>",
         "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>", "<|im_end|>"),
        _python("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        dialect="lfm2",
        history='<|startoftext|><|im_start|>user\nParis?<|im_end|>\n<|im_start|>assistant\nLet me '
        "see.\n<|tool_call_start|>[get_weather(city='Zürich', unit='C'), "
        'get_time()]<|tool_call_end|><|im_end|>\n<|im_start|>tool\n'
        '<|tool_response_start|>12 C<|tool_response_end|><|im_end|>\n<|im_start|>tool\n'
        '<|tool_response_start|>noon<|tool_response_end|><|im_end|>\n<|im_start|>assistant\n',
    ),
    "olmo3": Family(
        templates.OLMO_3, _CHATML, _python("<function_calls>", "\n", "</function_calls>"), dialect="olmo3"
    ),
    "glm4": Family(
        templates.GLM_4,
        ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>", "<|user|>"),
        _keys,
        plain=(*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        dialect="glm",
    ),
    "phi4": Family(
        templates.PHI_4,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|tool_call|>",
         "<|/tool_call|>", "<|tool_response|>", "<|end|>"),
        _listed("<|tool_call|>", "<|/tool_call|>"),
        dialect="phi4",
        history='<|user|>Paris?<|end|><|assistant|>Let me see.\n<|tool_call|>[{"name": '
        '"get_weather", "arguments": {"city": "Zürich", "unit": "C"}}, {"name": '
        '"get_time", "arguments": {}}]<|/tool_call|><|end|><|tool|>12 '
        'C<|end|><|tool|>noon<|end|><|assistant|>',
    ),
    "granite3": Family(
        templates.GRANITE_3,
        ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<|end_of_text|>"),
        _listed("<|tool_call|>"),
        dialect="granite3",
        history='<|start_of_role|>system<|end_of_role|>You are Granite.<|end_of_text|>\n'
        '<|start_of_role|>user<|end_of_role|>Paris?<|end_of_text|>\n'
        '<|start_of_role|>assistant<|end_of_role|>Let me see.\n<|tool_call|>[{"name": '
        '"get_weather", "arguments": {"city": "Zürich", "unit": "C"}}, {"name": '
        '"get_time", "arguments": {}}]<|end_of_text|>\n'
        '<|start_of_role|>tool<|end_of_role|>12 C<|end_of_text|>\n'
        '<|start_of_role|>tool<|end_of_role|>noon<|end_of_text|>\n'
        '<|start_of_role|>assistant<|end_of_role|>',
        thinks=("<think>", "</think>\n\n"),
        says=("<response>", "</response>"),
    ),
    "hunyuan": Family(
        templates.HUNYUAN,
        ("<|startoftext|>", "<|extra_0|>", "<|extra_4|>", "<|eos|>"),
        _listed("<tool_calls>", "</tool_calls>"),
        dialect="hunyuan",
        says=("<answer>\n", "\n</answer>"),
    ),
    "nemotron": Family(
        templates.NEMOTRON,
        ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
        _listed("<TOOLCALL>", "</TOOLCALL>"),
        dialect="nemotron",
    ),
    "seed": Family(
        templates.SEED,
        ("<seed:bos>", "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>",
         "<seed:eos>"),
        _seed,
        dialect="seed",
        thinks=("<seed:think>", "</seed:think>\n"),
    ),
    "deepseek": Family(
        templates.DEEPSEEK,
        ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
         "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
         "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜end▁of▁sentence｜>"),
        _deepseek,
        dialect="deepseek",
        history='<｜begin▁of▁sentence｜><｜User｜>Paris?<｜Assistant｜></think>Let me '
        'see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": '
        '"Zürich", "unit": '
        '"C"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><'
        '｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁output▁begin｜>12 '
        'C<｜tool▁output▁end｜><｜tool▁output▁begin｜>noon<｜tool▁output▁end｜>',
    ),
    "minicpm": Family(
        templates.MINICPM,
        ("<s>", "<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|thought_start|>",
         "<|thought_end|>", "<|im_end|>"),
        _python("<|tool_call_start|>\n```python\n", "\n", "\n```\n<|tool_call_end|>"),
        dialect="minicpm",
        thinks=("<|thought_start|>\n", "\n<|thought_end|>\n"),
    ),
    "llama4": Family(
        templates.LLAMA_4,
        ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>"),
        _python("[", ", ", "]"),
        before="",
        dialect="llama-python",
    ),
}  # fmt: skip
PYTHON_TOOLS = [
    "def get_weather(city: str, unit: str) -> str:\n    '''The weather of a city'''",
    "def get_time() -> str:",
]
SMOLLM3_CODE = replace(
    FAMILIES["smollm3"],
    write=_code,
    variables={"python_tools": PYTHON_TOOLS},
    history=FAMILIES["smollm3"].history.replace(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "unit": "C"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        "<code>\nget_weather(city='Zürich', unit='C')\nget_time()\n</code>",
    ),
)


def history_of(family: Family) -> list[dict[str, Any]]:
    """A question, the calls that it led to and their results."""
    calls = [("get_weather", {"city": "Zürich", "unit": "C"}, "12 C"), ("get_time", {}, "noon")]
    calls = calls[: family.n_calls_in_history]
    return [
        {"role": "user", "content": "Paris?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": f"CALL{i:05}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
                }
                for i, (name, arguments, _) in enumerate(calls)
            ],
        },
        *(
            {"role": "tool", "tool_call_id": f"CALL{i:05}", "content": result}
            for i, (_, _, result) in enumerate(calls)
        ),
    ]


def write_family(path: Path, family: Family) -> Path:
    """A tiny model with random weights, the family's marks as tokens and its template."""
    config = replace(tiny_config(4096), n_vocab=256 + len(family.control) + len(family.plain))
    named = {"tokenizer.chat_template": family.template}
    if "bos_token" in family.template:
        named["tokenizer.ggml.bos_token_id"] = 256
    keys = {name.replace(".", "__"): value for name, value in named.items()}
    return write_tiny(path, config, control=family.control, plain=family.plain, **keys)
