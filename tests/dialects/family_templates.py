# ruff: noqa: E501
"""What matters of the chat templates of families that call tools: their control tokens, and where tools and calls stand.

Written for the tests after the published templates; dates, default system texts and instructions are left out.
"""

from __future__ import annotations

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
QWEN = (
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
LLAMA_3 = """\
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
MISTRAL = """\
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
MISTRAL_NAMES = """\
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
SMOLLM3 = """\
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

# Qwen3-Coder: calls between tags; Qwen3.5 writes the same
QWEN_XML = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
# Tools

You have access to the following functions:

<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

Reply in this format: <tool_call>\\n<function=example>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' -%}
<|im_start|>assistant
{% if message.content %}{{ message.content }}{% endif %}
{%- for tool_call in message.tool_calls or [] %}
{%- if (loop.first and message.content) or not loop.first %}{{ '\\n' }}{% endif %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif -%}
{{ '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{%- for key, value in tool_call.arguments | items -%}
{{ '<parameter=' + key + '>\\n' }}
{%- set value = value | tojson if value is mapping or (value is sequence and value is not string) else value | string -%}
{{ value + '\\n</parameter>\\n' }}
{%- endfor -%}
{{ '</function>\\n</tool_call>' }}
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role == 'user' or not loop.first or not tools -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

GPT_OSS = """\
{%- macro header(role, channel) -%}
{{ '<|start|>' + role + '<|channel|>' + channel + '<|message|>' }}
{%- endmacro -%}
<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}

# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>
{%- if messages[0].role in ['developer', 'system'] %}
{%- set instructions = messages[0].content %}{% set loop_messages = messages[1:] %}
{%- else %}{% set instructions = '' %}{% set loop_messages = messages %}{% endif %}
{%- if instructions or tools -%}
<|start|>developer<|message|>{{ instructions }}
{%- if tools %}
# Tools

namespace functions {
{%- for tool in tools %}
// {{ tool.function.description }}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;
{%- endfor %}
}
{%- endif -%}
<|end|>
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in loop_messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set tool_call = message.tool_calls[0].function %}
{%- if message.content %}{{ header('assistant', 'analysis') + message.content + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + tool_call.name + '<|channel|>commentary json<|message|>' }}
{{- tool_call.arguments | tojson }}<|call|>
{%- set last.name = tool_call.name %}
{%- elif message.role == 'assistant' %}{{ header('assistant', 'final') + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson }}<|end|>
{%- else %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

GEMMA_4 = """\
{%- macro value(x) -%}
{%- if x is string -%}<|"|>{{ x }}<|"|>
{%- elif x is boolean -%}{{ 'true' if x else 'false' }}
{%- elif x is mapping -%}{{ object(x) }}
{%- elif x is sequence -%}[{% for item in x %}{{ value(item) }}{% if not loop.last %},{% endif %}{% endfor %}]
{%- else -%}{{ x }}
{%- endif -%}
{%- endmacro -%}
{%- macro object(x) -%}
{ {%- for key, item in x | dictsort %}{{ key }}:{{ value(item) }}{% if not loop.last %},{% endif %}{% endfor -%} }
{%- endmacro -%}
{{- bos_token }}
{%- if tools or messages[0].role == 'system' or enable_thinking -%}
<|turn>system
{% if enable_thinking %}<|think|>{% endif %}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}
{%- for tool in tools or [] -%}
<|tool>declaration:{{ tool.function.name }}{description:<|"|>{{ tool.function.description }}<|"|>
{%- if tool.function.parameters %},parameters:{{ object(tool.function.parameters) }}{% endif %}}<tool|>
{%- endfor -%}
<turn|>
{% endif %}
{%- set ns = namespace(after=none) %}
{%- for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{%- if message.role == 'tool' -%}
<|tool_response>response:{{ message.name }}{value:{{ value(message.content) }}}<tool_response|>
{%- set ns.after = 'tool' %}
{%- else %}
{%- if ns.after != 'tool' %}<|turn>{{ role }}
{% endif %}
{%- if message.content %}{{ message.content | trim }}{% endif %}
{%- for tool_call in message.tool_calls or [] -%}
<|tool_call>call:{{ tool_call.function.name }}{{ object(tool_call.function.arguments) }}<tool_call|>
{%- endfor %}
{%- if not message.tool_calls %}<turn|>
{% endif %}
{%- set ns.after = 'call' if message.tool_calls else none %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.after != 'tool' %}<|turn>model
{% endif %}"""

# the template of the first LFM2 prints no calls
LFM2 = """\
{{- bos_token }}
{%- set system = namespace(text='') %}
{%- if messages[0].role == 'system' %}{% set system.text = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}
{%- set system.text = system.text + ('\\n' if system.text else '') + 'List of tools: <|tool_list_start|>[' %}
{%- for tool in tools %}
{%- set system.text = system.text + (tool | tojson) + ('' if loop.last else ', ') %}
{%- endfor %}
{%- set system.text = system.text + ']<|tool_list_end|>' %}
{%- endif %}
{%- if system.text %}{{ '<|im_start|>system\\n' + system.text + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'tool' %}
{%- set content = '<|tool_response_start|>' + content + '<|tool_response_end|>' %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

OLMO_3 = """\
{%- if messages[0].role != 'system' %}<|im_start|>system
You are a helpful function-calling AI assistant.
{%- if not tools %} You do not currently have access to any functions. <functions></functions><|im_end|>
{% endif %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ '<|im_start|>system\\n' + message.content }}
{%- if not tools %}<|im_end|>
{% endif %}
{%- endif %}
{%- if loop.first and tools %} Output any function calls within <function_calls></function_calls> XML tags.
{{- ' <functions>' + (tools | tojson) + '</functions><|im_end|>\\n' }}
{%- endif %}
{%- if message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- if message.tool_calls %}<function_calls>
{%- for tool_call in message.tool_calls %}{{ tool_call.function.name + '(' }}
{%- for key, value in tool_call.function.arguments | items %}{{ key + '=' + (value | tojson) }}
{%- if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %})
{%- if not loop.last %}{{ '\\n' }}{% endif %}
{%- endfor %}</function_calls>
{%- endif %}<|im_end|>
{% elif message.role in ['tool', 'environment'] %}{{ '<|im_start|>environment\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GLM_4 = """\
[gMASK]<sop>
{%- if tools %}<|system|>
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Call one as <tool_call>{name}
<arg_key>{key}</arg_key>
<arg_value>{value}</arg_value>
</tool_call>{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|user|>
{{ message.content }}
{%- elif message.role == 'assistant' %}<|assistant|>
<think></think>
{%- if message.content and message.content.strip() %}{{ '\\n' + message.content.strip() }}{% endif %}
{%- for tool_call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + tool_call.function.name + '\\n' }}
{%- for key, value in tool_call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}
{{- '</arg_value>\\n' }}
{%- endfor %}</tool_call>
{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}<|system|>
{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- '\\n<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif %}"""

PHI_4 = """\
{%- for message in messages %}
{%- if message.role == 'system' and message.tools -%}
<|system|>{{ message.content }}<|tool|>{{ message.tools }}<|/tool|><|end|>
{%- else %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

GRANITE_3 = """\
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}{% set system = 'You are Granite.' %}{% endif %}
{%- if thinking %}
{%- set system = system + ' Write your thoughts between <think></think> and your response between <response></response>.' %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- if tools %}
{{- '<|start_of_role|>available_tools<|end_of_role|>' + (tools | tojson(indent=4)) + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

HUNYUAN = """\
{{- '<|startoftext|>' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}
{{- '\\nCall functions as <tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>.\\n' + (tools | tojson) }}
{%- endif %}
{{- '<|extra_4|>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ message.content + '<|extra_0|>' }}
{%- elif message.role == 'tool' %}{{ '<tool_response>' + message.content + '</tool_response><|extra_0|>' }}
{%- else %}
{%- if '<answer>' in message.content %}{% set content = message.content.split('<answer>')[-1] %}
{%- else %}{% set content = message.content %}{% endif %}
{{- content }}
{%- if message.tool_calls %}<tool_calls>[
{%- for tool_call in message.tool_calls %}
{{- '{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments if tool_call.function.arguments is string else tool_call.function.arguments | tojson }}
{{- '}' }}{% if not loop.last %}, {% endif %}
{%- endfor %}]</tool_calls>
{%- endif %}<|eos|>
{%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n' }}{% endif %}"""

NEMOTRON = """\
<SPECIAL_10>System
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}
<AVAILABLE_TOOLS>[{% for tool in tools %}{{ tool.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor -%}
]</AVAILABLE_TOOLS>

Call them as <TOOLCALL>[{"name": "name", "arguments": "args"}]</TOOLCALL>
{%- endif %}

{% for message in messages %}
{%- if message.role == 'user' %}{{ '<SPECIAL_11>User\\n' + message.content + '\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<SPECIAL_11>User\\n<TOOL_RESPONSE>[' }}{% endif %}
{{- message.content }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ ']</TOOL_RESPONSE>\\n' }}{% else %}, {% endif %}
{%- else %}{{ '<SPECIAL_11>Assistant\\n' + (message.content or '') }}
{%- if message.tool_calls %}<TOOLCALL>[
{%- for tool_call in message.tool_calls %}
{{- '{"name": "' + tool_call.function.name + '", "arguments": ' + (tool_call.function.arguments | tojson) + '}' }}
{%- if not loop.last %}, {% endif %}
{%- endfor %}]</TOOLCALL>
{%- endif %}
<SPECIAL_12>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<SPECIAL_11>Assistant\\n' }}
{%- if enable_thinking is defined %}{{ '<think>\\n' if enable_thinking else '<think></think>' }}{% endif %}{% endif %}"""

SEED = """\
{%- if tools or messages[0].role == 'system' %}<seed:bos>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- for tool in tools or [] %}
Function:
def {{ tool.function.name }}(): {{ tool | tojson }}
{%- endfor %}
{%- if tools %}
<seed:tool_call>
<function=example>
<parameter=key>value</parameter>
</function>
</seed:tool_call>
{%- endif %}<seed:eos>
{%- endif %}
{%- for message in messages %}
{{- '<seed:bos>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<seed:think>' + message.reasoning_content + '</seed:think>' }}{% endif %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for tool_call in message.tool_calls or [] %}
{{- '\\n<seed:tool_call>\\n<function=' + tool_call.function.name + '>\\n' }}
{%- for key, value in tool_call.function.arguments | items %}
{{- '<parameter=' + key + '>' + (value if value is string else value | string) + '</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</seed:tool_call>' }}
{%- endfor %}<seed:eos>
{%- endfor %}
{%- if add_generation_prompt %}{{ '<seed:bos>assistant\\n' }}{% endif %}"""

# a published template: the arguments are joined to texts, so they have to be text
DEEPSEEK = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}{{ '\\n## Tools\\n' + (tools | tojson) + '\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}{{ '<｜Assistant｜></think>' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- if message.tool_calls %}<｜tool▁calls▁begin｜>
{%- for tool in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] }}
{{- '<｜tool▁call▁end｜>' }}
{%- endfor %}<｜tool▁calls▁end｜>
{%- endif %}<｜end▁of▁sentence｜>
{%- elif message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜></think>' }}{% endif %}"""

MINICPM = """\
{{- bos_token }}
{%- if tools or messages[0].role == 'system' %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}{{ '# Functions\\n' + (tools | tojson) + '\\n<|tool_call_start|>\\n```python\\nf(x=1)\\n```\\n<|tool_call_end|>' }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- if message.tool_calls %}{{ '<|tool_call_start|>\\n```python\\n' }}
{%- for tool_call in message.tool_calls %}{{ tool_call.function.name + '(' }}
{%- for key, value in tool_call.function.arguments.items() %}{{ key + '=' + (value | tojson) }}
{%- if not loop.last %},{% endif %}
{%- endfor %}{{ ')\\n' }}
{%- endfor %}{{ '```\\n<|tool_call_end|>' }}
{%- endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA_4 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' or tools %}<|header_start|>system<|header_end|>

{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}Call functions as [func_name1(params_name1=params_value1), func_name2(params)]

{{ tools | tojson }}
{%- endif %}<|eot|>
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|header_start|>ipython<|header_end|>

{{ message.content | tojson }}<|eot|>
{%- else %}<|header_start|>{{ message.role }}<|header_end|>

{% if message.content %}{{ message.content }}{% endif %}
{%- if message.tool_calls %}[
{%- for tool_call in message.tool_calls %}{{ tool_call.function.name + '(' }}
{%- for key, value in tool_call.function.arguments.items() %}{{ key + '=' + (value | tojson) }}
{%- if not loop.last %}, {% endif %}
{%- endfor %})
{%- if not loop.last %}, {% endif %}
{%- endfor %}]
{%- endif %}<|eot|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}"""
