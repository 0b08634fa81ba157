"""`kukri run`, where it decides something by itself."""

from __future__ import annotations

from tiny_gguf import TEMPLATE, write_tiny

from kukri import LLM
from kukri.terminal import DEFAULT_SYSTEM
from kukri.terminal.run import opening

REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


def test_the_default_system_message_is_left_out_where_the_template_takes_none(tmp_path):
    """Catches `kukri run` failing on models whose template refuses a system message nobody asked for."""
    for template, n_messages in ((TEMPLATE, 1), (REFUSING + TEMPLATE, 0)):
        path = write_tiny(tmp_path / f"{n_messages}.gguf", tokenizer__chat_template=template)
        with LLM(path) as llm:
            assert len(opening(llm, DEFAULT_SYSTEM)) == n_messages
            assert opening(llm, "Be brief.") == [{"role": "system", "content": "Be brief."}]
            assert opening(llm, "") == []
