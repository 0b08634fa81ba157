"""What clients send back: calls without text, and system messages where a template has no place for them.

The templates have what matters of published ones, each by the way in which it reads a message.
"""

import itertools
from functools import cache

import pytest

from kukri.tokenizer import ChatTemplate
from kukri.tokenizer.system_messages import placed
from tests.stopwatch import within

CALL = {"id": "CALL00000", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
QUESTION = {"role": "user", "content": "Question"}
CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>"
    "{% endfor %}"
)


def _template(content: str) -> str:
    return f"{{% for m in messages %}}<{{{{ m.role }}}}>{content}{CALLS}{{% endfor %}}"


# how templates read the content of a call: those in the first group fail on null or print it
READINGS = {
    "adds": "{{ '' + m['content'] }}",  # Granite 3.3, Phi-3.5
    "looks for thoughts": "{% if '</think>' in m.content %}{% endif %}{{ m.content }}",  # Qwen3, gpt-oss
    "cuts": "{{ m.content.split('</think>')[-1].lstrip('\\n') }}",  # QwQ
    "measures": "{% if m.content | length > 0 %}{{ m.content }}{% endif %}",  # Ministral 3
    "trims": "{{ m.content | trim }}",  # None is trimmed to a word
    "prints": "{{ m.content }}",
    "trims what it has": "{% if m.content is defined %}{{ m.content.strip() }}{% endif %}",  # LFM2.5
}
NULL_READINGS = {
    "tests": "{{ '(none)' if m.content is none else m.content }}",
    "tests truth": "{% if m.content %}{{ m.content }}{% endif %}",
}


def _history(call: dict, result: dict) -> list[dict]:
    return [QUESTION, {"role": "assistant", **call, "tool_calls": [CALL]}, {"role": "tool", **result}]


CONTENTS = [{"content": ""}, {"content": None}, {}, {"content": []}]
RESULTS = [
    {"content": "Result", "tool_call_id": "CALL00000", "name": "f"},
    {"content": "Result", "tool_call_id": "CALL00000"},
    {"content": [{"type": "text", "text": "Result"}], "tool_call_id": "CALL00000"},
]


@pytest.mark.parametrize("reading", READINGS)
def test_a_call_without_text_is_one_with_an_empty_text(reading):
    """Catches a 400, or the word None, for what the OpenAI client sends back of a call."""
    template = ChatTemplate(_template(READINGS[reading]))
    want = '<user>Question<assistant><call>f{"x": 1}</call><tool>Result'
    for call, result in itertools.product(CONTENTS, RESULTS):
        assert template.render(_history(call, result)) == want
    for empty in ({"content": None}, {"content": []}, {}):
        assert template.render(_history({"content": None}, empty)) == want.removesuffix("Result")


@pytest.mark.parametrize("reading", NULL_READINGS)
def test_a_template_that_reads_null_gets_it(reading):
    """Catches a template told that there is a text, which prints an empty one as such."""
    template = ChatTemplate(_template(NULL_READINGS[reading]))
    null = "(none)" if reading == "tests" else ""
    for call in ({"content": None}, {}):
        expected = f'<user>Question<assistant>{null}<call>f{{"x": 1}}</call><tool>Result'
        assert template.render(_history(call, RESULTS[0])) == expected


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Zü', '{"_raw": "{\\"city\\": \\"Zü"}'),
        ("[1]", '{"_raw": "[1]"}'),
        ("nonsense", '{"_raw": "nonsense"}'),
        ("null", '{"_raw": "null"}'),
        ("", "{}"),
    ],
)
def test_arguments_that_were_cut_off_stay_in_the_history(arguments, shown):
    """Catches a conversation that can never continue, after an answer that ended at its limit."""
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert f"<call>f{shown}</call>" in ChatTemplate(_template("{{ m.content }}")).render(messages)


def test_arguments_are_json_where_a_template_adds_them():
    """Catches the loops of a template that takes arguments as text alone, as functionary's and DeepSeek's."""
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    source += "{{ '<call>' + c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
    call = {**CALL, "function": {"name": "f", "arguments": '{"city":"Köln"}'}}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(source).render(messages) == 'Question<call>f{"city": "Köln"}'


def test_an_answer_without_anything_is_empty():
    """Catches a 400 for an answer that was all thoughts, or that ended at once."""
    template = ChatTemplate(_template("{{ m.content }}"))
    for message in ({"role": "assistant"}, {"role": "assistant", "content": None, "tool_calls": []}):
        assert template.render([QUESTION, message, QUESTION]) == "<user>Question<assistant><user>Question"


SYSTEMS = {
    # any role, anywhere: ChatML, Granite, Llama 3
    "any": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    # the system's, anywhere; other roles are left out: Qwen, Phi-3
    "system": "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}",
    # the first alone, or its own: Qwen 2.5's default
    "first": "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}"
    "{% else %}<system>Default{% endif %}"
    "{% for m in messages if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    # the first, which may be the developer's; a second one and later ones vanish: gpt-oss
    "either": "{% if messages[0].role in ['system', 'developer'] %}<dev>{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    # the last one is put in front: DeepSeek R1
    "last": "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.s = m.content %}{% endif %}{% endfor %}{{ ns.s }}"
    "{% for m in messages if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    # refused: Gemma 2, and turns have to alternate
    "refused": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    # only at the beginning: Qwen3.5, Mistral
    "beginning": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "{% if m.role != 'developer' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}",
    # before the last question: Mistral v3
    "before the last": "{% for m in messages if m.role in ['user', 'assistant'] %}<{{ m.role }}>"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}, {% endif %}{{ m.content }}"
    "{% endfor %}",
    # no system at all, which is simply left out: Orion
    "dropped": "{% for m in messages if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}",
}
ORDERS = [
    "s u", "d u", "s s u", "s d u", "d s u", "d d d u", "s d s d s u", "s", "d", "s s",
    "s u a s u", "s u a d u", "u a s u", "u a d u", "u s", "u a u s", "u a s", "u s a u", "s u a s s u",
    "s u a s u a s u", "u a s u a d u", "s u s a u", "d u a s u", "s a u",
]  # fmt: skip
_ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}


@cache
def _chat_template(name: str) -> ChatTemplate:
    """One template for all conversations: what it can do is found out once."""
    return ChatTemplate(SYSTEMS[name])


def _conversation(order: str) -> list[dict]:
    return [{"role": _ROLES[letter], "content": f"{letter}{i}."} for i, letter in enumerate(order.split())]


@pytest.mark.parametrize("template", SYSTEMS)
@pytest.mark.parametrize("order", ORDERS)
def test_no_message_vanishes(template, order):
    """Catches a system or developer message that is dropped, replaced or refused, wherever it stands."""
    messages = _conversation(order)
    prompt = _chat_template(template).render(messages, False)
    places = [prompt.count(message["content"]) for message in messages]
    assert places == [1] * len(messages), prompt
    if template not in ("last", "before the last"):  # which move it themselves
        assert sorted(messages, key=lambda m: prompt.index(m["content"])) == messages, prompt


@pytest.mark.parametrize(
    ("template", "order", "want"),
    [
        ("any", "s d u a s u", "<system>s0.<developer>d1.<user>u2.<assistant>a3.<system>s4.<user>u5."),
        ("system", "d u", "<system>d0.<user>u1."),
        ("first", "d u", "<system>d0.<user>u1."),
        ("first", "u", "<system>Default<user>u0."),
        ("first", "s d u", "<system>s0.\n\nd1.<user>u2."),
        ("first", "s u a s u", "<system>s0.<user>u1.<assistant>a2.<user>s3.\n\nu4."),
        ("first", "s u a s", "<system>s0.<user>u1.<assistant>a2.<user>s3."),
        ("first", "s u s", "<system>s0.<user>u1.\n\ns2."),
        ("refused", "s s u a d u", "<user>s0.\n\ns1.\n\nu2.<assistant>a3.<user>d4.\n\nu5."),
        ("dropped", "s", "<user>s0."),
        ("dropped", "s u", "<user>s0.\n\nu1."),
        ("last", "s u a s u", "s0.<user>u1.<assistant>a2.<user>s3.\n\nu4."),
    ],
)
def test_messages_go_where_the_template_has_a_place(template, order, want):
    """Catches messages that change places, and merging where the template needs none."""
    assert _chat_template(template).render(_conversation(order), False) == want


def test_turns_of_one_role_are_joined_where_a_template_wants_turns():
    """Catches two questions in a row refused by a template whose turns alternate."""
    messages = _conversation("u u a a u u")
    prompt = ChatTemplate(SYSTEMS["refused"]).render(messages, False)
    assert prompt == "<user>u0.\n\nu1.<assistant>a2.\n\na3.<user>u4.\n\nu5."


@pytest.mark.full
def test_many_messages_are_placed_in_linear_time():
    """Catches texts that are copied for each message, and a search of all of them for each."""
    filler = "x" * 190
    for order in ("u " + "s " * 9000, "u s a " * 3000):
        messages = [{**one, "content": one["content"] + filler} for one in _conversation(order)]
        with within(1):
            found = placed(messages, lambda roles: "system" not in roles)
        assert sum(len(one["content"]) for one in found) >= sum(len(one["content"]) for one in messages)


def test_probes_are_few_and_rendered_once(monkeypatch):
    """Catches a rendering for each message or each request, and a client that fills memory with orders."""
    template = ChatTemplate(SYSTEMS["first"])
    render, n_rendered = template._process.render, itertools.count()
    monkeypatch.setattr(template._process, "render", lambda v: (next(n_rendered), render(v))[1])
    for order in itertools.product("sdua", repeat=4):
        template.render(_conversation(" ".join(order)), False)
    template.render(_conversation("s d " * 500 + "u"), False)
    assert len(template._probes._shown) < 100
    before = next(n_rendered)
    template.render(_conversation("s u a s u"), False)
    assert next(n_rendered) == before + 2
