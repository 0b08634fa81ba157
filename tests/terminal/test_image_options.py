"""Images on the command line: `kukri run --image`, /image in a chat, attachments of the program llm."""

from __future__ import annotations

import json

import pytest

from benchmarks.pictures import encoded, picture
from kukri import LLM
from kukri.calls.system_message import opening
from kukri.errors import RequestError
from kukri.sampling import SamplingParams
from kukri.terminal.chat import Chat
from kukri.terminal.run import answer_prompt
from kukri.terminal.saved_chat import read_chat
from tests.lazy_imports import lazy_imports
from tests.vision.seeing import N_TILE, save_seeing

with lazy_imports():
    import llm

    from kukri.llm_plugin import Kukri

LIKELIEST = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    directory = tmp_path_factory.mktemp("seeing")
    save_seeing(directory)
    return directory


@pytest.fixture(scope="module")
def model(seeing):
    with LLM(seeing, backend="reference") as opened:
        yield opened


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "a photo.png"
    path.write_bytes(encoded(picture(40, 50)))
    return path


def content(photo, text):
    return [{"type": "image", "image": photo}, {"type": "text", "text": text}]


def test_run_shows_an_image(seeing, model, photo, capsys):
    """Catches an image that is left out, or that comes after the prompt."""
    want = model.chat([{"role": "user", "content": content(photo, "What?")}], **LIKELIEST)
    given = {"model": str(seeing), "system": "", "sampling": LIKELIEST, "loading": {"backend": "reference"}}
    answer_prompt("What?", raw=False, images=[photo], as_json=True, with_stats=False, **given)
    said = json.loads(capsys.readouterr().out)
    assert (said["token_ids"], said["image_tokens"]) == (want.token_ids, [5 * N_TILE])
    for options, words in (
        ({"images": [photo.with_name("gone.png")], "raw": False}, "gone.png.* was not found"),
        ({"images": [photo], "raw": True}, "--image cannot be combined with --raw"),
    ):
        with pytest.raises(RequestError, match=words):
            answer_prompt("What?", as_json=True, with_stats=False, **options, **given)


def test_a_chat_shows_an_image_once(model, photo, capsys, tmp_path):
    """Catches an image that comes with every message, is lost with the next, or cannot be saved."""
    chat = Chat(model, SamplingParams(**LIKELIEST))
    assert chat.take(f"/image {photo}")
    chat.take("What?")
    chat.take("Sure?")
    first, _, second, *_ = chat.messages
    assert [part["type"] for part in first["content"]] == ["image_url", "text"]
    assert second["content"] == "Sure?"
    want = model.chat([{"role": "user", "content": content(photo, "What?")}], **LIKELIEST)
    assert chat.messages[1]["content"] == want.text
    saved = tmp_path / "chat.json"
    chat.take(f"/save {saved}")
    assert read_chat(saved).messages == chat.messages
    chat.take("/edit Who?")
    chat.take(f"/image {photo.with_name('gone.png')}")
    assert "No such file" in capsys.readouterr().out
    assert chat.images == []


def test_llm_attaches_images(seeing, model, photo):
    """Catches attachments that llm does not offer, or that are not seen."""
    asked = [*opening(model.chat_template), {"role": "user", "content": content(photo, "What?")}]
    want = model.chat(asked, **LIKELIEST)
    plugin = Kukri()
    plugin._loaded[str(seeing)] = model
    attachment = llm.Attachment(path=str(photo))
    response = plugin.prompt("What?", attachments=[attachment], model=str(seeing), **LIKELIEST)
    assert response.text() == want.text
