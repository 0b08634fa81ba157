"""Images in the engine: page keys, kept encodings, preemption, drafts, streams that continue meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM, SamplingParams
from kukri.engine import Engine, Request
from kukri.errors import RequestError
from kukri.models.keys import Keys
from kukri.models.weights import NoWeights
from kukri.vision.config import SIGLIP_DEFAULTS, VisionConfig, siglip_config
from kukri.vision.encoders.lfm2_vl import Lfm2Vision
from kukri.vision.image import ImagePrompt, ImageSpan
from tests.lazy_imports import lazy_imports
from tests.vision.tiny_vision import (
    MODELS,
    SIGLIP,
    image,
    our_logits,
    our_tokens,
    prompt,
    relative,
    save,
    their_inputs,
)

with lazy_imports():
    import torch

NAME = "idefics3"
TEXT = "a prompt that fills some pages before the picture comes: "


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sees")
    save(path, NAME)
    return path


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, max_requests=4, max_prompt_tokens=32) as opened:
        yield opened


@pytest.fixture
def engine(llm: LLM) -> Engine:
    """The engine, which has forgotten all prefixes and images."""
    llm.engine.allocator.forget()
    encodings = llm.engine.encodings
    encodings._kept.clear()
    encodings.n_encoded = encodings.n_found = 0
    return llm.engine


def ask(engine: Engine, asked: Any, n: int = 6, **more: Any) -> Request:
    """A queued request for a greedy answer."""
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **more)
    request = engine.maker.make_request(asked, params)
    engine.add_request(request)
    return request


def finish(engine: Engine, *requests: Request) -> None:
    while not all(request.has_ended for request in requests):
        engine.step()
        engine.check_integrity()
    assert [request.answer.error for request in requests] == [None] * len(requests)


def test_two_images_of_one_size_share_no_page_and_one_shares_all(engine: Engine) -> None:
    """Catches keys of tokens alone: the second image would be answered as the first."""
    first, second = (prompt(NAME, TEXT, image(NAME, 2, seed), " what is in it, and why?") for seed in (1, 2))
    answers = [ask(engine, first)]
    finish(engine, *answers)
    for asked, n_hit in ((second, 48), (first, 80)):
        answers.append(ask(engine, asked))
        finish(engine, answers[-1])
        assert answers[-1].sequence.n_prefix_hit == n_hit
    assert answers[0].output_ids == answers[2].output_ids != answers[1].output_ids
    assert engine.encodings.n_encoded == 2


def test_the_places_of_rows_are_part_of_the_key(engine: Engine) -> None:
    """Catches the first tile's pages found for the second of the same image, and for tokens that are text."""
    whole = prompt(NAME, TEXT, image(NAME, 2, 1), " and so on and on")
    as_text = list(whole.token_ids)
    finish(engine, ask(engine, whole))
    request = ask(engine, as_text)
    finish(engine, request)
    assert request.sequence.n_prefix_hit == 48
    keys = [engine.maker.make_request(asked, SamplingParams()) for asked in (whole, as_text)]
    found = [list(engine.allocator._keys(request.sequence, 0, 5)) for request in keys]
    assert [a == b for a, b in zip(*found)] == [True] * 3 + [False] * 2


def test_a_known_image_is_not_encoded_again(engine: Engine) -> None:
    """Catches an image that is encoded at each turn, or again in another text."""
    seen = image(NAME, 3, 4)
    turn = prompt(NAME, TEXT, seen, " first question")
    request = ask(engine, turn)
    finish(engine, request)
    ids = [*turn.token_ids, *request.output_ids, *b" and a second question"]
    again = ask(engine, ImagePrompt(ids, turn.images, turn.spans))
    finish(engine, again)
    assert again.sequence.n_prefix_hit >= len(turn) - 16
    elsewhere = ask(engine, prompt(NAME, "Another text around ", seen, seen))
    finish(engine, elsewhere)
    assert (engine.encodings.n_encoded, engine.encodings.n_found) == (1, 2)


def test_encodings_are_bounded_and_change_nothing(engine: Engine) -> None:
    """Catches a cache without a budget, and a request that loses its rows when others' push them out."""
    encodings = engine.encodings
    asked = [prompt(NAME, f"{seed} ", image(NAME, 2, seed), image(NAME, 1, seed + 9)) for seed in range(4)]
    alone = [our_tokens(engine, one, 6) for one in asked]
    engine.allocator.forget()
    before, encodings._kept.max_bytes = encodings._kept.max_bytes, 3000
    try:
        encodings._kept.clear()
        requests = [ask(engine, one) for one in asked]
        finish(engine, *requests)
        assert 0 < encodings._kept.n_bytes <= 3000
    finally:
        encodings._kept.max_bytes = before
    assert [request.output_ids for request in requests] == alone
    assert all(not request.sequence.spans.rows for request in requests)


@pytest.mark.parametrize("step_tokens", [3, 16, 512])
def test_bits_do_not_depend_on_chunks_or_company(directory: Path, llm: LLM, step_tokens: int) -> None:
    """Catches rows written at wrong places of a chunk, and sums that depend on who shares a step."""
    asked = prompt(NAME, "x", image(NAME, 3, 1), "middle", image(NAME, 1, 2), image(NAME, 1, 1))
    want = our_logits(llm.engine, asked)
    with LLM(directory, max_step_tokens=step_tokens, max_requests=4, n_threads=1) as other:
        company = [
            ask(other.engine, one, 9) for one in ([256, *TEXT.encode()], prompt(NAME, image(NAME, 1, 5)))
        ]
        np.testing.assert_array_equal(our_logits(other.engine, asked), want)
        finish(other.engine, *company)


@pytest.mark.full
def test_embeddings_by_layer_do_not_depend_on_chunks_or_company(tmp_path: Path) -> None:
    """Catches placeholders whose ids are read where an image is cut, and those of others' tokens lost."""
    save(tmp_path, "gemma4")
    asked = prompt("gemma4", "x", image("gemma4", 2, 1), "middle", image("gemma4", 1, 2))
    other, found = prompt("gemma4", image("gemma4", 1, 5), TEXT), []
    for step_tokens in (512, 16, 3, 1):
        with LLM(tmp_path, max_step_tokens=step_tokens, max_requests=4, n_threads=1) as llm:
            company = [ask(llm.engine, one, 9) for one in ([256, *TEXT.encode()], other)]
            found.append(our_logits(llm.engine, asked))
            finish(llm.engine, *company)
            found.append(our_logits(llm.engine, asked))
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])
    with LLM(tmp_path, backend="reference") as llm:
        long = replace(
            image("gemma4"), pixels=np.zeros((3 * 66, 48), np.float32), grid=(1, 3, 66), n_tokens=22
        )
        with pytest.raises(RequestError, match="at most 64 patches a side"):
            llm.generate(prompt("gemma4", long))


def test_slices_change_no_bit_and_streams_continue(engine: Engine) -> None:
    """Catches an image that stops others' tokens, and a cut that loses something between two slices."""
    asked = prompt(NAME, image(NAME, 3, 1), "?")
    want = our_tokens(engine, asked, 6)
    engine.allocator.forget()
    encodings = engine.encodings
    encodings._kept.clear()
    stream = ask(engine, [256, *TEXT.encode()], 60, speculation="off")
    while not stream.n_generated:
        engine.step()
    before, encodings._clock = encodings._clock, iter(range(10**6)).__next__  # each slice takes a second
    try:
        request = ask(engine, asked)
        n_before = stream.n_generated
        while not request.n_generated:
            engine.step()
        n_slices = 3 * 2 * MODELS[NAME].parts["vision_config"]["num_hidden_layers"]
        assert stream.n_generated - n_before >= n_slices
    finally:
        encodings._clock = before
    finish(engine, request, stream)
    assert request.output_ids == want


def test_preempted_requests_see_their_images_again(directory: Path, llm: LLM) -> None:
    """Catches rows that are gone when a prompt is computed a second time."""
    asked = [prompt(NAME, f"{seed}", image(NAME, 3, seed), "?") for seed in range(3)]
    want = [our_tokens(llm.engine, one, 40) for one in asked]
    # room for two whole requests
    page_bytes = 4 * 2 * 2 * 16 * 16 * 2
    with LLM(directory, max_requests=3, kv_bytes=9 * page_bytes, max_context=128) as small:
        requests = [ask(small.engine, one, 40) for one in asked]
        finish(small.engine, *requests)
        assert small.engine.scheduler.n_preemptions > 0
        assert [request.output_ids for request in requests] == want


def test_drafts_are_right_around_images(engine: Engine) -> None:
    """Catches a draft that takes a placeholder's token for text that was there."""
    asked = prompt(NAME, "abcabcabc", image(NAME, 1, 3), "abcabcabc", image(NAME, 1, 3), "abc")
    plain = our_tokens(engine, asked, 30, speculation="off")
    drafted = ask(engine, asked, 30, speculation="ngram", prediction=tuple(plain))
    finish(engine, drafted)
    assert drafted.output_ids == plain
    assert drafted.sequence.n_accepted > 0


def test_saved_pages_know_their_images(directory: Path, tmp_path: Path) -> None:
    """Catches another image's pages read from disk, and a saved image that is encoded all the same."""
    first, second = (prompt(NAME, TEXT, image(NAME, 2, seed), " what is in it, and why?") for seed in (1, 2))
    answers = []
    for asked, n_encoded in ((first, 1), (second, 1), (first, 0)):
        with LLM(directory, prefix_dir=str(tmp_path / "saved")) as opened:
            answers.append(our_tokens(opened.engine, asked, 6))
            assert opened.engine.encodings.n_encoded == n_encoded
    assert answers[0] == answers[2] != answers[1]


def test_several_answers_share_an_image(engine: Engine) -> None:
    """Catches answers after the first, which begin at the prompt's last token: a row of an image."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, n=3)
    requests = engine.maker.make_requests(prompt(NAME, "last: ", image(NAME, 1, 3)), params)
    for request in requests:
        engine.add_request(request)
    finish(engine, *requests)
    assert len({tuple(request.output_ids) for request in requests}) == 1
    assert engine.encodings.n_encoded == 1


def test_images_of_another_form_are_refused(llm: LLM) -> None:
    """Catches tiles of another model's size, which would be cut into patches of nonsense."""
    with pytest.raises(RequestError, match=r"must be tiles of \[3, 32, 32\] with 4 tokens each"):
        llm.generate(prompt("smolvlm", image("smolvlm")))
    short = ImagePrompt([1, 2, 3], (replace(image(NAME), n_tokens=3),), (ImageSpan(0, 3, 0),))
    with pytest.raises(RequestError, match="must be tiles"):
        llm.generate(short)


def test_generate_takes_a_prompt_with_images(llm: LLM) -> None:
    """Catches a face that takes a prompt with images for a list of prompts, or forgets its images."""
    asked = [prompt(NAME, image(NAME, 1, seed), " is") for seed in (1, 2)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    one, many = llm.generate(asked[0], params), llm.generate(asked, params)
    assert one.token_ids == many[0].token_ids == our_tokens(llm.engine, asked[0], 6)
    assert many[0].token_ids != many[1].token_ids
    *_, last = llm.stream(asked[1], params)
    assert last.result is not None
    assert last.result.token_ids == many[1].token_ids


@pytest.fixture(scope="module", params=["gemma3", "gemma4-whole", "gemma4-unified"])
def whole(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A model whose images see all of themselves: its name, its directory, and transformers' model."""
    path = tmp_path_factory.mktemp("whole")
    return request.param, path, save(path, request.param)


def test_an_image_that_sees_itself_is_never_cut(whole: tuple[str, Path, Any]) -> None:
    """Catches an image cut over two steps, whose first half does not see the second, a mask that is causal,
    and an image found in part, the rest of which is computed later.
    """
    name, directory, theirs = whole
    first = image(name, 3 if name == "gemma3" else 1, 1)  # a whole picture and two crops
    asked = prompt(name, "some text " * 3, first, "middle", image(name, 1, 2))
    types = "token_type_ids" if name == "gemma3" else "mm_token_type_ids"
    with torch.no_grad():
        want = theirs(**their_inputs(name, asked)).logits[0].numpy()
        causal = theirs(**{**their_inputs(name, asked), types: None}).logits[0].numpy()
    assert relative(causal, want) > 0.05
    runs = {(start, start + n) for start, n, _ in asked.spans}
    found = []
    for step_tokens in (3, 20, 512):
        with LLM(directory, max_step_tokens=step_tokens, max_requests=4, n_threads=1) as llm:
            chunks: list[tuple[int, int]] = []
            record_chunks(llm.engine, chunks)
            stream = ask(llm.engine, [256, *TEXT.encode()], 30)
            found.append(our_logits(llm.engine, asked))
            assert runs <= set(chunks)
            finish(llm.engine, stream)
            # a prefix that ends within the first image: pages are of 16 tokens, and it begins at the 33rd
            longer = ImagePrompt([*asked.token_ids, 65, 66], asked.images, asked.spans)
            again = our_tokens(llm.engine, longer, 6)
            llm.engine.allocator.forget()
            assert our_tokens(llm.engine, longer, 6) == again
    assert relative(found[0], want) < 3e-3
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_an_image_that_no_step_has_room_for_is_refused(tmp_path: Path) -> None:
    """Catches rows that a window or a step does not hold, of an image that sees itself in all layers."""
    save(tmp_path, "gemma4-unified")
    large = image("gemma4-unified", 5)
    with (
        LLM(tmp_path, backend="reference") as llm,
        pytest.raises(RequestError, match="at most 25 tokens each, not 30"),
    ):
        llm.generate(prompt("gemma4-unified", large))


@pytest.mark.full(but=["cpu"])
@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
def test_an_image_larger_than_a_window_sees_all_of_itself(backend: str, tmp_path: Path) -> None:
    """Catches rows that see no further ahead than back, that see text before the window, and text after the
    image that sees more than its window; and patterns that are not those of the step.
    """
    theirs = save(tmp_path, "gemma4-whole")
    theirs.set_attn_implementation("eager")
    large = image("gemma4-whole", 7, 1)  # 42 rows, and windows of 25
    asked = prompt("gemma4-whole", "some text ", large, "between them", image("gemma4-whole", 1, 2), TEXT)
    with torch.no_grad():
        found = theirs(**their_inputs("gemma4-whole", asked), output_attentions=True)
    want = found.logits[0].numpy()
    with LLM(tmp_path, backend=backend, max_step_tokens=20, max_requests=4, n_threads=1) as llm:
        logits = our_logits(llm.engine, asked)
        assert relative(logits, want) < (3e-3 if backend == "cpu" else 1e-4)
        if backend == "reference":
            _, cache = llm.run_with_cache(asked, names=lambda point: point.endswith("pattern"))
            for layer, pattern in enumerate(found.attentions):
                np.testing.assert_allclose(cache["pattern", layer][0], pattern[0].numpy(), atol=1e-4)


def record_chunks(engine: Engine, chunks: list[tuple[int, int]]) -> None:
    """Notes the (start, stop) of each chunk that the engine's requests for rows compute."""
    schedule = engine.scheduler.schedule

    def noting() -> Any:
        step = schedule()
        chunks.extend(
            (chunk.start, chunk.start + chunk.n_tokens)
            for chunk in step.chunks
            if chunk.request.output == "logits"
        )
        return step

    engine.scheduler.schedule = noting  # type: ignore[method-assign]


def test_rows_of_an_image_are_counted(whole: tuple[str, Path, Any]) -> None:
    """Catches a request for more rows of logits of one image than a step has room for."""
    name, directory, _ = whole
    with LLM(directory, max_requests=1) as llm:
        request = llm.engine.maker.make_request(prompt(name, image(name, 1, 1)), SamplingParams())
        assert request.sequence.spans.most_rows(0, 99) == (16 if name == "gemma3" else 6)
        assert request.sequence.spans.most_rows(request.first_row, request.stop_row) == 1


def test_hybrids_find_images_in_snapshots(tmp_path: Path) -> None:
    """Catches a recurrent state of one image taken for another's, and an image encoded at each turn."""
    save(tmp_path, "lfm2_vl")
    first, second = (
        prompt("lfm2_vl", TEXT, image("lfm2_vl", 1, seed), " and what is in it?") for seed in (1, 2)
    )
    with LLM(tmp_path, max_requests=2) as llm:
        answers, hits = [], []
        for asked in (first, second, first):
            request = ask(llm.engine, asked)
            finish(llm.engine, request)
            answers.append(request.output_ids)
            hits.append(request.sequence.n_prefix_hit)
        assert llm.engine.encodings.n_encoded == 2
        # a prefix that ends within the image, whose state is there before its rows are
        short = prompt("lfm2_vl", "What is ", image("lfm2_vl", 1, 1), "?")
        alone, again = (our_tokens(llm.engine, short, 12) for _ in range(2))
        assert alone == again
    assert answers[0] == answers[2]
    assert hits[1] < len(TEXT) < hits[2]


def test_a_larger_image_makes_room(tmp_path: Path) -> None:
    """Catches a program compiled for the first image's size, and bits that depend on the room."""
    save(tmp_path, "lfm2_vl")
    small = image("lfm2_vl", 1, 1)
    pixels = np.concatenate([small.pixels] * 3)
    large = replace(small, pixels=pixels, grid=(1, 1, 8, 12), n_tokens=24, digest=bytes(32))
    with LLM(tmp_path) as llm:
        want = our_logits(llm.engine, prompt("lfm2_vl", small, "?"))
        our_logits(llm.engine, prompt("lfm2_vl", large, "?"))
        llm.engine.allocator.forget()
        llm.engine.encodings._kept.clear()
        np.testing.assert_array_equal(our_logits(llm.engine, prompt("lfm2_vl", small, "?")), want)


@pytest.mark.parametrize(
    "change",
    [
        {"grid": (1, 1, 3, 8)},
        {"grid": (1, 1, 8, 4), "n_tokens": 9},
        {"grid": (1, 1, 0, 0)},
        {"grid": (10**9, 10**9, 4, 8)},
        {"grid": (-1, -1, 4, 8)},
        {"grid": (1, 1)},
        {"pixels": np.zeros((32, 47), np.float32)},
        {"pixels": np.zeros((1, 3, 4, 4), np.float32)},
    ],
    ids=str,
)
def test_a_grid_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    """Catches a grid by which patches would be read from elsewhere, or for hours."""
    config = VisionConfig(
        "lfm2_vl",
        siglip_config(
            Keys(
                {**SIGLIP_DEFAULTS, **SIGLIP, "patch_size": 4},
                Path("config.json"),
            ),
            "lfm2_vl",
        ),
        image_size=32,
        patch_size=4,
        merge=2,
        d_text=64,
        image_token_id=271,
        d_projector=56,
    )
    eyes = Lfm2Vision(config, NoWeights(10**6))
    eyes.check(image("lfm2_vl", 1, 1))
    with pytest.raises(RequestError, match="'images' must be patches of 48 numbers"):
        eyes.check(replace(image("lfm2_vl", 1, 1), **change))
