"""Questions about activations: what an oracle is told, and what it reads at its placeholders."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import HookError, RequestError
from kukri.interp import OracleForm
from kukri.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
WORDS = ("music", "seven", "doctor", "water")
# a patchscope: the model says again which word it is shown
SAYS_AGAIN = OracleForm(
    template="cat -> cat\nhouse -> house\nblue -> blue\n{activations} ->",
    placeholder=" x",
    is_chat=False,
    after_block=8,
    op="replace",
    match_norm=False,
)


@pytest.fixture(scope="module")
def llm() -> Any:
    """SmolLM2-135M."""
    with LLM(max_context=512, max_requests=8) as opened:
        yield opened


def activations(llm: LLM, text: str, n: int = 1) -> np.ndarray:
    """The stream at the last n tokens, after block 8: [n, D]."""
    _, cache = llm.run_with_cache(text, names="blocks.8.hook_resid_post")
    return cache["resid_post", 8][0, -n:]


@pytest.mark.full
def test_a_model_says_what_an_activation_is_about(llm: LLM) -> None:
    """Catches activations at another position, at another layer, or of another length."""
    for word in WORDS:
        shown = activations(llm, f"They talked about {word}")
        assert llm.ask_about(shown, "", form=SAYS_AGAIN, temperature=0, max_tokens=1).text == f" {word}"


@pytest.mark.full
def test_vectors_are_added_at_the_length_of_their_rows() -> None:
    """Catches a vector at another's placeholder, a length that is not the row's, and a question that has
    placeholders of its own.
    """
    question = "What is it about ? ? ?"
    messages = [{"role": "user", "content": f"Layer: 8\n ? ? ?\n{question}"}]
    with LLM(max_context=512, backend="reference") as llm:
        vectors = activations(llm, "The weather in Paris was fine", 3)
        told = llm.ask_about(vectors, question, layer=8, params=GREEDY, max_tokens=1)
        ids = list(llm.calls.answer_prompt(messages))
        mark = llm.tokenizer.encode(" ?", add_special=False)
        places = [i for i in range(len(ids)) if ids[i : i + 1] == mark][:3]

        def inject(value: np.ndarray, hook: Any) -> None:
            for place, vector in zip(places, vectors, strict=True):
                row = value[0, place]
                row += np.linalg.norm(row) * vector / np.linalg.norm(vector)

        logits = llm.run_with_hooks(ids, fwd_hooks=[("blocks.1.hook_resid_post", inject)])[0, -1]
        logprob = logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert told.logprobs[0].id == int(logits.argmax())
        assert told.logprobs[0].logprob == pytest.approx(float(logprob), abs=1e-4)
        assert abs(llm.chat(messages, GREEDY, max_tokens=1).logprobs[0].logprob - logprob) > 0.01


@pytest.mark.full
def test_oracles_run_in_the_batch_of_others(llm: LLM) -> None:
    """Catches an answer that depends on who else asks, and vectors that reach another request."""
    shown = [activations(llm, f"They talked about {word}") for word in WORDS]

    def ask(vector: np.ndarray) -> tuple[int, ...]:
        return tuple(llm.ask_about(vector, "", form=SAYS_AGAIN, params=GREEDY).token_ids)

    def plain(word: str) -> tuple[int, ...]:
        return tuple(llm.generate(f"They talked about {word}", GREEDY).token_ids)

    alone = [*map(ask, shown), *map(plain, WORDS)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, vector) for vector in shown] + [pool.submit(plain, word) for word in WORDS]
        assert [one.result() for one in asked] == alone


@pytest.mark.full
def test_another_model_can_be_the_oracle(llm: LLM) -> None:
    """Catches a question that the model asks itself, whoever was named."""
    shown = activations(llm, "They talked about music")
    with LLM(max_context=256) as other:
        told = llm.ask_about(shown, "", oracle=other, form=SAYS_AGAIN, params=GREEDY)
        assert told.token_ids == llm.ask_about(shown, "", form=SAYS_AGAIN, params=GREEDY).token_ids
        assert other.calls.engine.scheduler.n_computed > 0


@pytest.mark.parametrize(
    ("vectors", "options", "message"),
    [
        (np.zeros((0, 576)), {}, "n from 1 to 256"),
        (np.ones((2, 3, 576)), {}, "n from 1 to 256"),
        (np.ones((257, 576)), {}, "n from 1 to 256"),
        (np.ones((2, 575)), {}, "a list of 576"),
        (np.zeros((1, 576)), {}, "must not be zero"),
        (np.full((1, 576), np.nan), {}, "finite"),
        (np.ones((3, 576)), {"placeholder": " xyzzyplugh"}, "3 for 1?[0-9] positions"),
        (np.ones((1, 576)), {"template": "{thing}"}, "'form' must have"),
        (np.ones((1, 576)), {"template": "{question}"}, "was not found in the prompt"),
        (np.ones((1, 576)), {"after_block": 99}, "hook_resid_post"),
    ],
)
def test_wrong_questions(llm: LLM, vectors: np.ndarray, options: dict[str, Any], message: str) -> None:
    """Catches a raw exception, or an oracle that answers about nothing."""
    with pytest.raises((RequestError, HookError), match=message):
        llm.ask_about(vectors, "What?", form=OracleForm(**options))
    with pytest.raises(RequestError, match="missing"):
        llm.ask_about(np.ones(576), "What?", oracle="missing")
