"""Model families that call tools: a tokenizer's marks, and what matters of their published chat templates.

The templates render a system text, tools, calls and results as the families do; dates, default system texts
and the like are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tiny_gguf import tiny_config, write_tiny

Calls = Sequence[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Family:
    """How a family writes."""

    template: str
    control: tuple[str, ...]  # control tokens; the last one ends an answer
    write: Callable[[Calls], str]  # what the model writes to call
    before: str = "Let me see.\n\n"  # what it may say first
    plain: tuple[str, ...] = ()  # tokens that are marks and no control tokens
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


_CHATML_TOOLS = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
# Tools

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

Return a json object within <tool_call></tool_call> XML tags for each call.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
"""
_QWEN = (
    _CHATML_TOOLS
    + """\
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' -%}
<|im_start|>assistant
{% if message.content %}{{ message.content }}{% endif %}
{%- for tool_call in message.tool_calls or [] %}
{%- if (loop.first and message.content) or not loop.first %}{{ '\\n' }}{% endif %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif -%}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {% if tool_call.arguments is string -%}
{{ tool_call.arguments }}{% else %}{{ tool_call.arguments | tojson }}{% endif %}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
)
_LLAMA_3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set system_message = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system_message = '' %}{% endif -%}
<|start_header_id|>system<|end_header_id|>

{% if tools is not none %}Environment: ipython
{% endif %}{{ system_message }}<|eot_id|>
{%- if tools is not none %}
{%- set first_user_message = messages[0].content | trim %}{% set messages = messages[1:] -%}
<|start_header_id|>user<|end_header_id|>

Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.

{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{{ first_user_message }}<|eot_id|>
{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}
{%- set tool_call = message.tool_calls[0].function -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ tool_call.name }}", "parameters": {{ tool_call.arguments | tojson }}}<|eot_id|>
{%- elif message.role == 'tool' or message.role == 'ipython' -%}
<|start_header_id|>ipython<|end_header_id|>

{% if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
{%- else %}{{ message.content }}{% endif %}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
_MISTRAL = """\
{%- if messages[0].role == 'system' %}
{%- set system_message = messages[0].content %}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in loop_messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and message == user_messages[-1] %}[AVAILABLE_TOOLS] [
{%- for tool in tools %}{{ tool | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]
{{- '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- if loop.last and system_message is defined %}[INST] {{ system_message + '\\n\\n' }}
{{- message.content }}[/INST]
{%- else %}[INST] {{ message.content }}[/INST]{% endif %}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS] [
{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function | tojson %}{{ out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}, "id": "{{ tool_call.id }}"}{% if not loop.last %}, {% else %}]{{ eos_token }}{% endif %}
{%- endfor %}
{%- elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}
{%- elif message.role == 'tool_results' or message.role == 'tool' %}
{%- set content = message.content.content if message.content is defined and message.content.content is defined
else message.content -%}
[TOOL_RESULTS] {"content": {{ content | string }}, {% if not message.tool_call_id is defined or
message.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}"call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""
_MISTRAL_NAMES = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]
{%- set messages = messages[1:] %}{% endif %}
{%- if tools is defined and tools is not none and tools | length > 0 %}[AVAILABLE_TOOLS]{{ tools | tojson }}
{{- '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- elif message.role == 'assistant' %}{% if message.content %}{{ message.content }}{% endif %}
{%- for tool_call in message.tool_calls or [] -%}
[TOOL_CALLS]{{ tool_call.function.name }}[CALL_ID]{{ tool_call.id }}[ARGS]
{{- tool_call.function.arguments | tojson }}
{%- endfor %}{{ eos_token }}
{%- elif message.role == 'tool' -%}
[TOOL_RESULTS]{{ message.tool_call_id }}[TOOL_CONTENT]{{ message.content }}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""
_SMOLLM3 = """\
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif -%}
<|im_start|>system
## Metadata

Reasoning Mode: {{ '/think' if enable_thinking else '/no_think' }}

{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{%- if xml_tools or python_tools %}### Tools

{% if xml_tools %}You are provided with function signatures within <tools></tools> XML tags:

<tools>
{% for tool in xml_tools[:] %}{{ (tool | string) + '\\n' }}{% endfor %}</tools>

Return a json object within <tool_call></tool_call> XML tags for each call.
{% endif %}
{%- if python_tools %}Python code between '<code>' and '</code>' tags will be executed. You can use:
<tools>
{% for tool in python_tools[:] %}{{ (tool | string) + '\\n' }}{% endfor %}</tools>
{% endif %}
{% endif %}<|im_end|>
{% for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- if enable_thinking %}{{ '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}
{%- endif %}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{%- if enable_thinking %}{{ '<|im_start|>assistant\\n' }}
{%- else %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}{% endif %}
{%- endif %}"""

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
QWEN = Family(_QWEN, _CHATML, _hermes, plain=_TAGS, history=_QWEN_HISTORY)
FAMILIES = {
    "qwen": QWEN,
    "hermes": Family(_QWEN, _CHATML, _hermes, history=_QWEN_HISTORY),
    "llama3": Family(
        _LLAMA_3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eot_id|>"),
        _llama,
        before="",
        n_calls_in_history=1,
        history="<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nParis?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "get_weather", "parameters": {"city": "Zürich", "unit": "C"}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"12 C"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": Family(
        _MISTRAL,
        ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
        _mistral,
        id_length=9,
        history="<s>[INST] Paris?[/INST]"
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich", "unit": "C"}, '
        '"id": "CALL00000"}, {"name": "get_time", "arguments": {}, "id": "CALL00001"}]</s>'
        '[TOOL_RESULTS] {"content": 12 C, "call_id": "CALL00000"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {"content": noon, "call_id": "CALL00001"}[/TOOL_RESULTS]',
    ),
    "mistral_names": Family(
        _MISTRAL_NAMES,
        ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[ARGS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
         "[CALL_ID]", "</s>"),
        _mistral_names,
        id_length=9,
        history="<s>[INST]Paris?[/INST]Let me see."
        '[TOOL_CALLS]get_weather[CALL_ID]CALL00000[ARGS]{"city": "Zürich", "unit": "C"}'
        "[TOOL_CALLS]get_time[CALL_ID]CALL00001[ARGS]{}</s>[TOOL_RESULTS]CALL00000[TOOL_CONTENT]12 C"
        "[/TOOL_RESULTS][TOOL_RESULTS]CALL00001[TOOL_CONTENT]noon[/TOOL_RESULTS]",
    ),
    "smollm3": Family(
        _SMOLLM3,
        _CHATML,
        _hermes,
        plain=(*_TAGS, "<code>", "</code>"),
        history="<|im_start|>system\n## Metadata\n\nReasoning Mode: /think\n\n<|im_end|>\n"
        "<|im_start|>user\nParis?<|im_end|>\n<|im_start|>assistant\nLet me see.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "unit": "C"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n12 C<|im_end|>\n<|im_start|>user\nnoon<|im_end|>\n<|im_start|>assistant\n",
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
