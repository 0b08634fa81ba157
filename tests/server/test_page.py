"""Conversations on the page in a real Chromium, against a real server and the real model."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from kukri import LLM
from kukri.calls.system_message import opening
from kukri.opening.model_options import ModelOptions
from kukri.server.settings import ModelSpec
from tests.server.browsing import PHONE, visiting
from tests.server.live_server import MODEL, serving
from tests.tiny_gguf import write_tiny

# --- a conversation


@pytest.mark.representative(6)
def test_an_answer_comes_and_a_reload_keeps_it(visit, offline):
    """Catches a page that does not ask what was typed, or forgets it."""
    visit.be_greedy()
    visit.ask("What is the capital of France?")
    visit.wait_done()
    (answer,) = visit.answers()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    expected = offline.chat([*opening(offline.chat_template), *question], temperature=0, max_tokens=40)
    assert "Paris" in answer, "the first question that the page proposes"
    assert visit.chats()[0]["messages"][1]["content"] == expected.text
    assert answer.split() == expected.text.split()
    assert visit.page.locator(".user .body").inner_text() == "What is the capital of France?"
    assert "tokens/s" in visit.page.inner_text(".stats")
    assert "of 4,096 tokens" in visit.page.inner_text("#context-text")
    assert visit.page.evaluate("document.querySelector('#context').value") > 20
    visit.page.reload()
    visit.ready()
    assert visit.answers() == [answer]
    assert visit.page.inner_text("#title") == "What is the capital of France?"


@pytest.mark.full
def test_a_long_prompt_shows_how_far_it_is_read(visit):
    """Catches seconds in which a page says nothing."""
    visit.be_greedy()
    watch = "new MutationObserver(() => said.push(place.textContent)).observe(place, {childList: true})"
    visit.page.evaluate(f"() => {{ place = document.querySelector('#status'); said = []; {watch} }}")
    visit.ask("one two three four " * 700)
    visit.wait_done()
    said = visit.page.evaluate("said")
    told = [re.fullmatch(r"Reading the conversation: (\d+) of (\d+) tokens", text) for text in said]
    counts = [(int(one[1]), int(one[2])) for one in told if one]
    assert counts
    assert counts == sorted(counts)
    assert all(n < total for n, total in counts)
    assert said.index("Answering …") < said.index("Answer complete")


def test_settings_reach_the_model(visit, site, offline):
    """Catches controls that change nothing: greedy, with a system prompt and a limit, it is one answer."""
    visit.page.click("#open-settings")
    visit.page.fill("#system", "You answer in capital letters.")
    for name, value in {"temperature": "0", "top_p": "", "max_tokens": "9", "seed": "7"}.items():
        visit.page.fill(f"#{name}", value)
    visit.page.click("text=Done")
    with visit.page.expect_request("**/ui/answers") as asked:
        visit.ask("Name a fruit.")
    visit.wait_done()
    body = asked.value.post_data_json
    assert body == {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "You answer in capital letters."},
            {"role": "user", "content": "Name a fruit."},
        ],
        "temperature": 0,
        "max_tokens": 9,
        "seed": 7,
    }
    expected = offline.chat(body["messages"], temperature=0, max_tokens=9)
    assert visit.chats()[0]["messages"][1]["content"] == expected.text
    assert "9 tokens" in visit.page.inner_text(".stats")
    assert "cut at the limit" in visit.page.inner_text(".stats")
    visit.page.reload()
    visit.ready()
    assert visit.page.input_value("#max_tokens") == "9"
    visit.page.click("#open-settings")
    visit.page.click("#defaults")
    assert visit.page.input_value("#max_tokens") == ""
    assert visit.page.input_value("#temperature") == "", "the model's own"
    default = offline.default_params
    assert visit.page.get_attribute("#temperature", "placeholder") == str(default.temperature)
    assert visit.page.get_attribute("#frequency_penalty", "placeholder") == str(default.frequency_penalty)


def test_an_answer_streams_and_escape_stops_it(visit, site, forced):
    """Catches text that comes all at once, and a stop that leaves the engine at work."""
    forced("tick tock " * 400, pause_s=0.01)
    visit.ask("Go")
    visit.wait_for_text(len(visit.wait_for_text(20)))
    assert visit.page.get_attribute("#messages", "aria-busy") == "true"
    visit.page.keyboard.press("Escape")
    visit.wait_done()
    assert visit.page.inner_text("#status") == "Stopped"
    site.wait_until(lambda: site.pages_used() == 0)
    stopped = visit.answers()[0]
    assert stopped.startswith("tick tock tick")
    assert "stopped" in visit.page.inner_text(".stats")
    visit.page.reload()
    visit.ready()
    assert visit.answers() == [stopped]


def test_leaving_in_the_middle_keeps_what_came(visit, site, forced):
    """Catches half an answer that a reload loses, and an engine that continues for nobody."""
    forced("tick tock " * 400, pause_s=0.01)
    visit.ask("Go")
    visit.wait_for_text(20)
    visit.page.reload()
    visit.ready()
    assert visit.answers()[0].startswith("tick tock")
    site.wait_until(lambda: site.pages_used() == 0)


def test_thoughts_are_folded_and_not_sent_again(visit, forced):
    """Catches thoughts in the middle of an answer, as HTML, or in the next prompt."""
    forced("<think>Hm, <b>who</b> is it?</think>Hello!")
    visit.ask("Hi")
    visit.wait_done()
    assert visit.answers() == ["Hello!"]
    assert not visit.page.is_visible(".thoughts")
    visit.page.click("summary")
    assert visit.page.inner_text(".thoughts") == "Hm, <b>who</b> is it?"
    with visit.page.expect_request("**/ui/answers") as asked:
        visit.ask("And now?")
    visit.wait_done()
    assert "who" not in asked.value.post_data


def test_regenerate_and_edit_begin_again_from_there(visit, forced):
    """Catches old answers that stay, and a prompt that still has them in it."""
    forced("One.")
    visit.ask("first")
    visit.wait_done()
    forced("Two.")
    visit.page.click("text=Regenerate")
    visit.wait_done()
    assert visit.answers() == ["Two."]
    forced("Three.")
    visit.ask("second")
    visit.wait_done()
    assert visit.answers() == ["Two.", "Three."]
    visit.page.locator("text=Edit").first.click()
    visit.page.fill(".edit textarea", "first, changed")
    forced("Four.")
    with visit.page.expect_request("**/ui/answers") as asked:
        visit.page.press(".edit textarea", "Enter")
    visit.wait_done()
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "first, changed"}]
    assert visit.answers() == ["Four."]
    assert visit.page.locator("article").count() == 2


def test_several_conversations_are_kept_apart(visit, forced):
    """Catches a second conversation that writes into the first, and one that cannot be deleted."""
    forced("Fine.")
    visit.ask("alpha")
    visit.wait_done()
    visit.page.click("#new-chat")
    assert visit.page.locator("article").count() == 0
    visit.ask("beta")
    visit.wait_done()
    assert visit.page.locator("#conversations li").count() == 2
    visit.page.click("#conversations button:has-text('alpha')")
    assert visit.page.locator(".user .body").all_inner_texts() == ["alpha"]
    visit.page.click("[aria-label='Delete alpha']")
    assert visit.page.locator(".user .body").all_inner_texts() == ["beta"]
    assert [chat["title"] for chat in visit.chats()] == ["beta"]


# --- what goes wrong


def test_an_error_is_shown_and_can_be_tried_again(browser, site, forced):
    """Catches a page that waits forever after an error."""
    with visiting(browser, site.url) as visit:
        visit.ready()
        visit.ask("word " * 5000)
        visit.page.wait_for_selector("#notice:visible")
        assert "4096" in visit.page.inner_text("#notice").replace(",", "")
        assert visit.page.locator(".assistant").count() == 0
        visit.page.click("#new-chat")
        visit.page.route("**/ui/answers", lambda route: route.abort())
        visit.ask("Hello")
        visit.page.wait_for_selector("text=The server cannot be reached.")
        visit.page.unroute("**/ui/answers")
        forced("Hello.")
        visit.page.click("#retry")
        visit.wait_done()
        assert visit.answers() == ["Hello."]
        assert not visit.page.is_visible("#notice")


def test_a_failure_in_the_middle_is_said(visit, site, forced, monkeypatch):
    """Catches an answer that ends early and looks whole: a deadline here."""
    forced("tick tock " * 400, pause_s=0.01)
    monkeypatch.setattr(site.served, "settings", replace(site.served.settings, deadline_s=0.5))
    visit.ask("Go")
    visit.page.wait_for_selector("#notice:visible")
    assert "0.5 s" in visit.page.inner_text("#notice")
    assert visit.answers()[0].startswith("tick tock")
    assert "broken off" in visit.page.inner_text(".stats")


@pytest.mark.full
def test_a_key_is_asked_for_and_used(browser, smollm2_path):
    """Catches a page that shows the model to strangers, or cannot be used where keys are needed."""
    with (
        LLM(smollm2_path, max_context=512, max_requests=1) as llm,
        serving(llm, api_keys=("right",)) as server,
        visiting(browser, server.url) as visit,
    ):
        page = visit.page
        page.wait_for_selector("#key-dialog[open]")
        assert MODEL not in page.content()
        page.keyboard.press("Escape")
        page.wait_for_selector("text=This server requires an API key.")
        assert visit.said == []
        page.click("#retry")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=The server does not accept this API key.")
        page.click("#retry")
        page.fill("#key", "right")
        page.keyboard.press("Enter")
        visit.ready()
        visit.be_greedy()
        visit.ask("What is the capital of France?")
        visit.wait_done()
        assert visit.answers()[0]
        page.reload()
        visit.ready()
        assert not page.is_visible("#key-dialog")
        assert "right" not in page.evaluate("JSON.stringify(localStorage)")


@pytest.mark.full
def test_what_needs_a_key_and_what_does_not(smollm2_path, served):
    """Catches a way around the key through the page, and a page that cannot be left out."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with LLM(smollm2_path, max_context=512, max_requests=1) as llm:
        with serving(llm, api_keys=("right",)) as server, server.http() as http:
            assert http.get("/").status_code == 200
            assert MODEL not in http.get("/").text
            assert http.get("/ui/static/page.js").status_code == 200
            assert http.get("/ui/model").status_code == 401
            assert http.post("/ui/answers", json=body).status_code == 401
            assert http.post("/ui/answers/", json=body).status_code == 307
            for path in ("/ui/answers/x", "/ui/answers/../model", "/ui/static/../page.html", "/ui/static/"):
                assert http.get(path).status_code in (401, 404), path
            allowed = {"authorization": "Bearer right"}
            fragment = http.post("/ui/answers", json=body, headers=allowed).text
            path = fragment.split('"')[1]
            assert "event: end" in http.get(f"/{path}").text
            assert http.get(f"/{path}").status_code == 404, "its name is good for once"
        with serving(llm, has_page=False) as server, server.http() as http:
            for path in ("/", "/ui/model", "/ui/static/page.js", "/ui/answers/x"):
                assert http.get(path).status_code == 404
    with served.http() as http:
        for wrong in ({"n": 2}, {"stream": False}, {"seed": -(2**64)}, {"temperature": -1}):
            assert http.post("/ui/answers", json=body | wrong).status_code == 400
        assert "/ui" not in http.get("/openapi.json").text


def test_an_answer_that_nobody_opens_is_ended(served, monkeypatch):
    """Catches answers that run, and are kept, for browsers that have left."""
    monkeypatch.setattr("kukri.server.page.endpoints.OPEN_S", 0.2)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count to a thousand."}],
        "temperature": 2,
    }
    with served.http() as http:
        path = http.post("/ui/answers", json=body).text.split('"')[1]
        time.sleep(0.5)
        assert http.get(f"/{path}").status_code == 404
    served.wait_until(lambda: served.pages_used() == 0)


def test_conversations_are_renamed_found_and_exported(visit, forced):
    """Catches a name that a reload loses, a search in titles alone, an export that leaves something out."""
    forced("An answer about llamas.")
    for question in ("First question", "Second question"):
        visit.page.click("#new-chat")
        visit.ask(question)
        visit.wait_done()
    page, items = visit.page, visit.page.locator("#conversations li")
    page.fill("#search", "first q")
    assert items.count() == 1
    page.evaluate("window.prompt = () => 'A new name'")
    items.locator("[data-do=rename]").click()
    assert items.count() == 1, "its message is found still"
    page.fill("#search", "LLAMAS")
    assert items.count() == 2
    page.fill("#search", "")
    page.reload()
    visit.ready()
    items.filter(has_text="A new name").locator("[data-do=open]").click()
    with page.expect_download() as saving:
        page.click("#export")
    assert saving.value.suggested_filename == "A-new-name.md"
    text = saving.value.path().read_text()
    assert text == "# A new name\n\n## You\n\nFirst question\n\n## Answer\n\nAn answer about llamas.\n"


def test_a_model_is_chosen_among_several(browser, tmp_path):
    """Catches questions that go to the first model, whichever is chosen."""
    models = [
        ModelSpec((name,), ModelOptions(model=str(write_tiny(tmp_path / f"{name}.gguf")), max_requests=2))
        for name in ("red", "blue")
    ]
    with serving(None, models) as served, visiting(browser, served.url) as visit:
        visit.ready()
        visit.page.click("#open-settings")
        visit.page.select_option("#choose-model", "blue")
        visit.page.wait_for_selector("#sampling[data-model=blue]")
        visit.page.fill("#max_tokens", "4")
        visit.page.keyboard.press("Escape")
        visit.ask("Hi")
        visit.wait_done()
        with served.http() as http:
            assert 'kukri_requests_total{model="blue"' in http.get("/metrics").text
        visit.page.reload()
        visit.page.wait_for_selector("#sampling[data-model=blue]", state="attached")


def test_a_phone_shows_the_state_whole(browser, site):
    """Catches "Answer complete" cut to a letter next to the counts."""
    with visiting(browser, site.url, viewport=PHONE) as visit:
        visit.ready().be_greedy()
        visit.ask("Hi!")
        visit.wait_done()
        assert visit.page.inner_text("#status") == "Answer complete"
        assert visit.page.evaluate("(s => s.scrollWidth <= s.clientWidth)(document.querySelector('#status'))")


def test_an_edited_turn_keeps_what_was_there(visit, forced):
    """Catches an edit or another answer that loses the one before, and versions that a reload forgets."""
    page = visit.page

    def versions(kind: str) -> str:
        return page.locator(f".{kind} .versions").last.inner_text().replace("\n", "")

    forced("First.")
    visit.ask("One?")
    visit.wait_done()
    assert page.locator(".versions:visible").count() == 0
    forced("Second.")
    page.click("text=Regenerate")
    visit.wait_done()
    assert visit.answers() == ["Second."]
    assert versions("assistant") == "‹2/2›"
    visit.ask("More?")
    visit.wait_done()
    forced("Third.")
    page.locator(".user").first.get_by_text("Edit", exact=True).click()
    page.fill(".edit textarea", "Two?")
    page.press(".edit textarea", "Enter")
    visit.wait_done()
    assert visit.answers() == ["Third."]
    assert versions("user") == "‹2/2›"
    page.reload()
    visit.ready()
    page.get_by_label("Earlier version").first.click()
    assert visit.answers() == ["Second.", "Second."]
    assert page.locator(".user .body").all_inner_texts() == ["One?", "More?"]
    page.locator(".assistant").first.get_by_label("Earlier version").click()
    assert visit.answers() == ["First."]
    page.locator(".assistant").first.get_by_label("Later version").click()
    assert visit.answers() == ["Second.", "Second."]
    page.get_by_label("Later version").first.click()
    assert visit.answers() == ["Third."]
    assert not visit.said, visit.said


@pytest.mark.full
def test_an_answer_that_does_not_come_brings_the_one_before_back(visit, forced):
    """Catches a version of nothing, and an answer that is lost because the next one failed."""
    forced("First.")
    visit.ask("One?")
    visit.wait_done()
    visit.page.route("**/ui/answers", lambda route: route.abort())
    visit.page.click("text=Regenerate")
    visit.page.wait_for_selector("#notice:visible")
    assert visit.answers() == ["First."]
    assert visit.page.locator(".versions:visible").count() == 0
    assert "versions" not in visit.chats()[0]["messages"][1]
    visit.said.clear()  # the request that failed
