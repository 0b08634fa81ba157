"""Each stage against other implementations of it: transformers' processors, llama.cpp's samplers, by hand."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest

from kukri.kernels import sampling_record
from kukri.kernels.reference_sampling import Candidates, Record, ReferenceSampling, edit_row, run_stages
from kukri.kernels.sampling_record import SamplingRecords
from kukri.kernels.sampling_stages import STAGES
from kukri.sampling import RequestSampler, SamplingError, SamplingParams
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch
    from transformers.generation import logits_process as hf

N = 300


def candidates_of(row: np.ndarray, prompt: Any = (), generated: Any = (), **params: Any) -> Candidates:
    """The candidates left of a row before the draw."""
    sampler = RequestSampler(SamplingParams(**params), prompt, len(row), ReferenceSampling())
    for token_id in generated:
        choose = np.zeros(len(row), np.float32)
        choose[token_id] = 1000
        sampler(choose)
    records = SamplingRecords([sampler.settings], [0])
    sampler.prepare(records, 0)
    record = Record(records, 0)
    candidates = Candidates(row)
    edit_row(candidates, record)
    run_stages(candidates, record)
    return candidates


def some_rows(n: int = 20) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    return [rng.normal(0, rng.uniform(0.3, 5), N).astype(np.float32) for _ in range(n)]


# Values that switch each stage on: each of its fields at least once.
ON: dict[str, list[dict[str, Any]]] = {
    "penalties": [{"repetition_penalty": 3.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}],
    "dry": [{"dry_multiplier": 5.0, "dry_sequence_breakers": ()}],
    "top_n_sigma": [{"top_n_sigma": 0.5}],
    "top_k": [{"top_k": 3}],
    "typical_p": [{"typical_p": 0.3}],
    "top_p": [{"top_p": 0.3}],
    "min_p": [{"min_p": 0.5}],
    "xtc": [{"xtc_probability": 1.0, "xtc_threshold": 0.05}],
    "temperature": [{"temperature": 3.0}, {"dynatemp_range": 0.9}],
}


def test_every_stage_does_what_its_fields_say() -> None:
    """Catches a stage whose field every face accepts and nothing obeys, and one that nothing switches off."""
    assert list(ON) == [stage.name for stage in STAGES]
    assert not SamplingParams().active_stages
    switches = {stage.name: set(stage.switches) for stage in STAGES}
    row = np.log(np.linspace(1, 30, 30)).astype(np.float32)
    text = [29, 28], [27, 29, 28]
    plain = candidates_of(row, *text)
    for stage, settings in ON.items():
        assert {name for one in settings for name in one} >= switches[stage], stage
        for given in settings:
            assert SamplingParams(**given).active_stages == (stage,)
            left = candidates_of(row, *text, seed=1, **given)
            is_same = len(left.ids) == len(plain.ids) and np.array_equal(left.depths(), plain.depths())
            assert not is_same, f"{given} changes nothing"
            switched_off = SamplingParams(**given).replace(samplers=[])
            assert not switched_off.active_stages, f"{given} is left on by samplers=[]"


# ---- transformers

WARPERS = [
    ({"top_k": 7}, "TopKLogitsWarper", 7),
    ({"top_p": 0.8}, "TopPLogitsWarper", 0.8),
    ({"min_p": 0.07}, "MinPLogitsWarper", 0.07),
    ({"typical_p": 0.6}, "TypicalLogitsWarper", 0.6),
    ({"typical_p": 0.95}, "TypicalLogitsWarper", 0.95),
]


@pytest.mark.parametrize(("params", "warper", "value"), WARPERS)
def test_filters_keep_what_transformers_keeps(params: dict[str, Any], warper: str, value: float) -> None:
    """Would catch a filter that means something else than elsewhere."""
    for row in some_rows():
        want = getattr(hf, warper)(value)(None, torch.from_numpy(row[None]))[0].numpy()
        assert candidates_of(row, **params).ids.tolist() == np.flatnonzero(want > -np.inf).tolist()


@pytest.mark.parametrize(
    ("names", "params", "warpers"),
    [
        (["temperature", "top_p"], {"temperature": 2.0, "top_p": 0.7}, ["temperature", "top_p"]),
        (["top_p", "temperature"], {"temperature": 2.0, "top_p": 0.7}, ["top_p", "temperature"]),
        (["typical_p", "top_k"], {"typical_p": 0.5, "top_k": 3}, ["typical_p", "top_k"]),
        (["top_k", "typical_p"], {"typical_p": 0.5, "top_k": 3}, ["top_k", "typical_p"]),
        (["temperature", "min_p"], {"temperature": 0.3, "min_p": 0.2}, ["temperature", "min_p"]),
    ],
)
def test_the_order_can_be_set(names: list[str], params: dict[str, Any], warpers: list[str]) -> None:
    """Would catch an order that is stored and not followed."""
    make = {
        "temperature": lambda: hf.TemperatureLogitsWarper(params["temperature"]),
        "top_p": lambda: hf.TopPLogitsWarper(params["top_p"]),
        "top_k": lambda: hf.TopKLogitsWarper(params["top_k"]),
        "min_p": lambda: hf.MinPLogitsWarper(params["min_p"]),
        "typical_p": lambda: hf.TypicalLogitsWarper(params["typical_p"]),
    }
    differ = 0
    for row in some_rows():
        scores = torch.from_numpy(row[None])
        for name in warpers:
            scores = make[name]()(None, scores)
        found = candidates_of(row, samplers=names, **params)
        assert found.ids.tolist() == np.flatnonzero(scores[0].numpy() > -np.inf).tolist()
        differ += found.ids.tolist() != candidates_of(row, samplers=names[::-1], **params).ids.tolist()
    assert differ, "the orders compared are the same here"


def test_repetition_penalty_is_that_of_transformers() -> None:
    """Would catch another arithmetic, or a prompt that is not counted."""
    prompt = [3, 5, 5, 200]
    processor = hf.RepetitionPenaltyLogitsProcessor(1.3)
    for row in some_rows():
        want = processor(torch.tensor([[*prompt, 17]]), torch.from_numpy(row[None]))[0].numpy()
        found = candidates_of(row, prompt, [17], repetition_penalty=1.3)
        np.testing.assert_allclose(found.logits, want, rtol=1e-6)


def test_bad_words_are_those_of_transformers() -> None:
    """Would catch a phrase that is banned too early, too late, or forever."""
    words = [[4], [5, 6], [5, 7, 8], [9, 9]]
    processor = hf.NoBadWordsLogitsProcessor(words)
    row = np.zeros(20, np.float32)
    for prompt, generated in (([5], []), ([1], [5]), ([5, 7], []), ([1], [5, 7]), ([9], [1, 9]), ([2], [6])):
        want = processor(torch.tensor([[*prompt, *generated]]), torch.from_numpy(row[None]))[0].numpy()
        found = candidates_of(row, prompt, generated, bad_words=words)
        np.testing.assert_array_equal(found.logits, want)


# ---- llama.cpp


class LlamaCpp:
    """llama.cpp's samplers, one at a time."""

    def __init__(self) -> None:
        self.lib = pytest.importorskip("llama_cpp", reason="llama.cpp is compared with where it is installed")

    def left(self, name: str, *arguments: Any, row: np.ndarray, accepted: Any = ()) -> dict[int, float]:
        """The ids and logits that a sampler leaves, -inf left out."""
        sampler = getattr(self.lib, f"llama_sampler_init_{name}")(*arguments)
        entries = [self.lib.llama_token_data(i, float(x), 0.0) for i, x in enumerate(row)]
        data = (self.lib.llama_token_data * len(row))(*entries)
        array = self.lib.llama_token_data_array(data, len(row), -1, False)
        for token_id in accepted:
            self.lib.llama_sampler_accept(sampler, token_id)
        self.lib.llama_sampler_apply(sampler, ctypes.byref(array))
        left = {array.data[i].id: array.data[i].logit for i in range(array.size)}
        self.lib.llama_sampler_free(sampler)
        return {i: x for i, x in left.items() if x > -1e30}


@pytest.fixture(scope="module")
def llama() -> LlamaCpp:
    return LlamaCpp()


@pytest.mark.parametrize(
    ("params", "name", "arguments"),
    [
        ({"top_n_sigma": 1.0}, "top_n_sigma", (1.0,)),
        ({"top_n_sigma": 2.3}, "top_n_sigma", (2.3,)),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.1}, "xtc", (1.0, 0.1, 1, 1)),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.02}, "xtc", (1.0, 0.02, 1, 1)),
        ({"typical_p": 0.7}, "typical", (0.7, 1)),
    ],
)
def test_filters_keep_what_llama_cpp_keeps(
    llama: LlamaCpp, params: dict[str, Any], name: str, arguments: Any
) -> None:
    """Would catch a filter that llama.cpp's users would not know again."""
    for row in some_rows():
        found = candidates_of(row, **params)
        assert found.ids[found.logits > -np.inf].tolist() == sorted(llama.left(name, *arguments, row=row))


@pytest.mark.parametrize(("span", "exponent"), [(0.5, 1.0), (1.0, 2.5), (3.0, 0.7)])
def test_dynamic_temperature_is_that_of_llama_cpp(llama: LlamaCpp, span: float, exponent: float) -> None:
    """Would catch an entropy in other units, or a range taken from the wrong end."""
    for row in some_rows():
        found = candidates_of(row, temperature=1.2, dynatemp_range=span, dynatemp_exponent=exponent)
        left = llama.left("temp_ext", 1.2, span, exponent, row=row)
        want = np.array([left[i] for i in range(N)])
        np.testing.assert_allclose((row - row.max()) * found.scale, want - want.max(), rtol=2e-3, atol=2e-3)


def test_mirostat_1_keeps_as_many_as_llama_cpp(llama: LlamaCpp) -> None:
    """Would catch a Zipf exponent that is estimated otherwise."""
    for row in some_rows():
        for tau in (0.5, 1.5, 3.0, 5.0):
            left = llama.left("mirostat", N, 1, tau, 0.1, sampling_record.MIROSTAT_TOKENS, row=row)
            found = candidates_of(row, mirostat=1, mirostat_tau=tau)
            assert found.ids.tolist() == sorted(left)


def test_mirostat_2_keeps_as_many_as_llama_cpp(llama: LlamaCpp) -> None:
    """Would catch surprise in other units than bits, or mu starting elsewhere than at 2 tau."""
    for row in some_rows():
        for tau in (0.1, 1.5, 3.0):
            left = llama.left("mirostat_v2", 1, tau, 0.1, row=row)
            assert candidates_of(row, mirostat=2, mirostat_tau=tau).ids.tolist() == sorted(left)


# ---- by hand


@pytest.mark.full
def test_mirostat_comes_near_its_surprise() -> None:
    """Would catch a correction with the wrong sign, or a mu that is not kept."""
    row = np.random.default_rng(3).normal(0, 2, 2000).astype(np.float32)
    logprobs = row - np.log(np.exp(row.astype(np.float64)).sum())
    for version in (1, 2):
        surprises = []
        for tau in (2.0, 6.0):
            params = SamplingParams(mirostat=version, mirostat_tau=tau, seed=1, max_tokens=None)
            sampler = RequestSampler(params, [], len(row), ReferenceSampling())
            surprises.append(np.mean([-logprobs[sampler(row).id] / math.log(2) for _ in range(400)][100:]))
        assert surprises[0] + 1 < surprises[1]


@pytest.mark.full
def test_xtc_happens_as_often_as_asked() -> None:
    """Would catch a probability that is ignored, or a draw that shares its random number with it."""
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    params = SamplingParams(xtc_probability=0.4, xtc_threshold=0.2, seed=2, max_tokens=None)
    sampler = RequestSampler(params, [], 4, ReferenceSampling())
    counts = np.bincount([sampler(row).id for _ in range(6000)], minlength=4)
    # with XTC 0 is out: 0.6, 0.3, 0.1 of the rest
    want = 6000 * (0.6 * np.array([0.5, 0.3, 0.15, 0.05]) + 0.4 * np.array([0, 0.6, 0.3, 0.1]))
    assert (((counts - want) ** 2) / want).sum() < 16.3  # p = 0.001 with 3 degrees of freedom


def losses(prompt: list[int], generated: list[int] = (), **params: Any) -> dict[int, float]:  # type: ignore[assignment]
    """DRY's penalties by token."""
    row = np.zeros(50, np.float32)
    options: dict[str, Any] = {"dry_multiplier": 1.0, "dry_base": 2.0, "dry_sequence_breakers": ()} | params
    found = candidates_of(row, prompt, generated, **options)
    return {int(i): float(-x) for i, x in zip(found.ids, found.logits, strict=True) if x}


@pytest.mark.parametrize(
    ("tokens", "params", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], {}, {3: 1.0}),
        ([1, 2, 3, 4, 9, 1, 2, 3], {}, {4: 2.0}),
        ([1, 2, 9, 2], {}, {}),
        ([1, 2, 9, 2], {"dry_allowed_length": 1}, {9: 1.0}),
        ([0, 1, 2, 3, 9, 1, 2, 4, 0, 1, 2], {}, {3: 2.0, 4: 1.0}),
        ([1, 2, 3, 7, 9, 7, 2, 3], {"dry_sequence_breakers": [[9]]}, {7: 1.0}),
        ([1, 2, 3, 4, 9, 1, 8, 2, 3], {"dry_sequence_breakers": [[1, 8]]}, {4: 1.0}),
        ([1, 2, 3, 4, 9, 8, 3], {"dry_sequence_breakers": [[8]], "dry_allowed_length": 2}, {}),
        ([1, 2, 3, 4, 9, 1, 2, 3], {"dry_penalty_last_n": 7}, {4: 1.0}),
        ([1, 2, 3, 4, 9, 1, 2, 3], {"dry_penalty_last_n": 4}, {}),
        ([6, 6, 6, 6], {}, {6: 2.0}),
        ([1, 2, 3, 9, 1, 2], {"dry_sequence_breakers": [[3]]}, {}),  # a breaker itself is exempt
        ([1, 2, 3, 9, 1, 2], {"dry_sequence_breakers": [[3, 4]]}, {3: 1.0}),
    ],
)
def test_dry_penalizes_repetitions(tokens: list[int], params: dict[str, Any], expected: dict) -> None:
    """Would catch a length off by one, a breaker passed over, or a state that generated tokens break."""
    assert losses(tokens, **params) == pytest.approx(expected)
    assert losses(tokens[:2], tokens[2:], **params) == pytest.approx(expected)
    assert losses(tokens[:-1], tokens[-1:], **params) == pytest.approx(expected)


def test_dry_finds_what_looking_everywhere_finds() -> None:
    """Would catch lengths that drift from the text over many tokens."""
    rng = np.random.default_rng(6)
    tokens = rng.integers(0, 3, 700).tolist()
    best: dict[int, int] = {}
    for j in range(len(tokens) - 1):
        length = 0
        while length <= j and tokens[j - length] == tokens[-1 - length]:
            length += 1
        if length >= 2:
            best[tokens[j + 1]] = max(best.get(tokens[j + 1], 0), length)
    want = {i: 2.0 ** (length - 2) for i, length in best.items()}
    assert losses(tokens) == pytest.approx(want)
    assert losses(tokens[:40], tokens[40:]) == pytest.approx(want)


def test_penalties_look_back_as_far_as_asked() -> None:
    """Would catch tokens that are never forgotten, or counted once they are."""
    row = np.full(10, 4.0, np.float32)
    found = candidates_of(row, [1, 2, 3], [4, 5], repetition_penalty=2.0, repeat_last_n=3)
    assert np.flatnonzero(found.logits != 4).tolist() == [3, 4, 5]
    found = candidates_of(row, [1, 2, 3], [4, 5, 4], frequency_penalty=1.0, repeat_last_n=2)
    assert found.logits.tolist() == [4, 4, 4, 4, 3, 3, 4, 4, 4, 4]


def test_logits_processors_see_the_tokens_and_edit_the_row() -> None:
    """Would catch a processor that is not called, sees stale tokens, or edits the engine's own row."""
    seen = []

    def forbid_last(token_ids: np.ndarray, row: np.ndarray) -> None:
        seen.append(token_ids.tolist())
        row[token_ids[-1]] = -np.inf

    def double(token_ids: np.ndarray, row: np.ndarray) -> np.ndarray:
        return row * 2

    row = np.array([1.0, 3.0, 2.0], np.float32)
    params = SamplingParams(temperature=0, logits_processors=[forbid_last, double], logprobs=1)
    sampler = RequestSampler(params, [1], 3, ReferenceSampling())
    tokens = [sampler(row) for _ in range(3)]
    assert [token.id for token in tokens] == [2, 1, 2]
    assert seen == [[1], [1, 2], [1, 2, 1]]
    assert row.tolist() == [1.0, 3.0, 2.0]
    assert [[i for i, _ in token.top_logprobs or ()] for token in tokens] == [[1]] * 3  # from the raw row


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda ids, row: 1 / 0, "fault failed: ZeroDivisionError"),
        (lambda ids, row: row[:-1], "must return .5,. or None, not"),
        (lambda ids, row: "no", "fault failed: ValueError"),
        (lambda ids, row: row * np.nan, "left nan in the logits"),
        (lambda ids, row: row + np.inf, "left inf in the logits"),
        (lambda ids, row: row - np.inf, "left no token"),
        (lambda ids, row: row.resize(2, refcheck=False), "fault failed: ValueError"),
    ],
)
def test_a_failing_processor_is_named(returned: Any, message: str) -> None:
    """Would catch an exception of the caller's code that ends the engine."""

    def fault(token_ids: Any, row: Any) -> Any:
        return returned(token_ids, row)

    sampler = RequestSampler(SamplingParams(logits_processors=[fault]), [1], 5, ReferenceSampling())
    with pytest.raises(SamplingError, match=message):
        sampler(np.zeros(5, np.float32))


def test_a_processor_that_reshapes_its_row_changes_no_length() -> None:
    """Would catch a kernel that reads V logits of a row that the caller's function made shorter."""

    def reshape(token_ids: np.ndarray, row: np.ndarray) -> None:
        row[3] = 9
        row.shape = (5, 2)

    sampler = RequestSampler(
        SamplingParams(temperature=0, logits_processors=[reshape]), [1], 10, ReferenceSampling()
    )
    assert sampler(np.zeros(10, np.float32)).id == 3


def test_dry_is_that_of_llama_cpp(llama: LlamaCpp) -> None:
    """Would catch a window, a length or a power that differs from the original's."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        tokens = rng.integers(0, 4, int(rng.integers(3, 60))).tolist()
        allowed, reach = int(rng.integers(1, 4)), int(rng.choice([5, 20, 4096]))
        no_breakers = (ctypes.c_char_p * 1)()
        arguments = (None, 1.0, 1.5, allowed, reach, no_breakers, 0)
        left = llama.left("dry", *arguments, row=np.zeros(50, np.float32), accepted=tokens)
        found = losses(tokens, dry_base=1.5, dry_allowed_length=allowed, dry_penalty_last_n=reach)
        assert found == pytest.approx({i: -x for i, x in left.items() if x}, rel=1e-5)
