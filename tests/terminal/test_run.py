"""`kukri run`, where it decides something by itself."""

from __future__ import annotations

import json

import numpy as np
from tiny_gguf import TEMPLATE, write_tiny

from kukri import LLM
from kukri.interp import ControlVector
from kukri.system_message import DEFAULT_SYSTEM, opening
from kukri.terminal.options import SteeringOptions
from kukri.terminal.run import answer_prompt

REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


def test_the_default_system_message_is_left_out_where_the_template_takes_none(tmp_path):
    """Catches `kukri run` failing on models whose template refuses a system message nobody asked for."""
    for template, n_messages in ((TEMPLATE, 1), (REFUSING + TEMPLATE, 0)):
        path = write_tiny(tmp_path / f"{n_messages}.gguf", tokenizer__chat_template=template)
        with LLM(path) as llm:
            assert len(opening(llm.chat_template, DEFAULT_SYSTEM)) == n_messages
            assert opening(llm.chat_template, "Be brief.") == [{"role": "system", "content": "Be brief."}]
            assert opening(llm.chat_template, "") == []


def test_a_control_vector_steers_the_answer(tmp_path, capsys):
    """Catches options that never reach the model."""
    path = write_tiny(tmp_path / "tiny.gguf")
    vector = np.random.default_rng(0).standard_normal(64).astype(np.float32) * 8
    ControlVector({1: vector}).save(tmp_path / "v.gguf")
    texts = []
    for strength in (None, 0, 3):
        options = SteeringOptions(None if strength is None else [f"{tmp_path / 'v.gguf'}:{strength}"])
        files, interventions = options.files_and_interventions()
        answer_prompt(
            "Hello",
            model=str(path),
            system="",
            raw=True,
            sampling={"temperature": 0.0, "max_tokens": 8, "ignore_eos": True},
            loading={"backend": "reference"} | files,
            interventions=interventions,
            as_json=True,
            with_stats=False,
        )
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1] != texts[2]
