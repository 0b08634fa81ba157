"""The probabilities of an answer's tokens on the page, and versions of a turn, on a phone and a desktop."""

from __future__ import annotations

import json
import math

import pytest

from kukri.calls.system_message import opening
from tests.server.browsing import LOOKS, shoot, visiting
from tests.server.live_server import MODEL

QUESTION = "What is the capital of France?"
BOTH = pytest.mark.parametrize("look", LOOKS, ids=["phone", "desktop"])


@BOTH
def test_tokens_show_what_else_could_have_stood_there(browser, site, offline, look):
    """Catches probabilities of other tokens, ones that nobody can see, and a cost for those who want none."""
    with visiting(browser, site.url, **look) as visit:
        page = visit.ready().page
        visit.be_greedy()
        visit.ask(QUESTION)
        visit.wait_done()
        assert page.locator("[data-do=tokens]:visible").count() == 0
        page.evaluate("document.querySelector('#new-chat').click()")  # on a phone it is in the menu
        page.click("#open-settings")
        page.check("#probabilities")
        page.keyboard.press("Escape")
        with page.expect_request("**/ui/answers") as asked:
            visit.ask(QUESTION)
        visit.wait_done()
        assert asked.value.post_data_json["top_logprobs"] == 5
        messages = [*opening(offline.chat_template), {"role": "user", "content": QUESTION}]
        expected = offline.chat(messages, temperature=0, max_tokens=40, logprobs=5)
        spans = page.locator(".tokens span")
        assert "".join(spans.all_text_contents()) == expected.text
        assert spans.count() == len(expected.logprobs) - 1, "the end has no text"
        spans.nth(1).hover()
        page.wait_for_selector("#odds:visible")
        shown = page.locator("#odds div").all_inner_texts()
        wanted = [f"{100 * math.exp(logprob):.1f} %" for _, logprob in expected.logprobs[1].top_logprobs]
        assert [text.split("\n")[1] for text in shown] == wanted
        assert page.locator("#odds .chosen code").inner_text() == spans.nth(1).inner_text().replace(" ", "␣")
        box = page.locator("#odds").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= look["viewport"]["width"]
        visit.check_access()
        shoot(visit, "tokens")
        page.focus(".tokens")
        page.keyboard.press("ArrowRight")
        assert page.locator("#odds:visible").count() == 1
        page.click("text=Formatted")
        assert page.locator(".tokens").count() == 0
        assert visit.answers()[-1].split() == expected.text.split()
        assert "tokens" not in visit.chats()[0]["messages"][1], "the browser's storage is small"
        assert visit.said == []


@BOTH
def test_an_edited_turn_is_turned_back_to(browser, site, forced, look):
    """Catches buttons of versions that a phone has no room for."""
    with visiting(browser, site.url, **look) as visit:
        page = visit.ready().page
        forced("Paris is the capital of France.")
        visit.ask(QUESTION)
        visit.wait_done()
        forced("Rome is the capital of Italy.")
        page.locator(".user").get_by_text("Edit", exact=True).click()
        shoot(visit, "edit")
        page.fill(".edit textarea", "What is the capital of Italy?")
        page.press(".edit textarea", "Enter")
        visit.wait_done()
        assert visit.answers() == ["Rome is the capital of Italy."]
        shoot(visit, "edited")
        page.get_by_label("Earlier version").first.click()
        assert visit.answers() == ["Paris is the capital of France."]
        assert page.locator(".versions:visible").inner_text().replace("\n", "") == "‹1/2›"
        assert page.get_by_label("Earlier version").first.is_disabled()
        right = page.locator(".versions:visible").bounding_box()
        assert right["x"] + right["width"] <= look["viewport"]["width"]


@pytest.mark.full
def test_pieces_of_a_character_and_control_tokens_are_shown(site, forced):
    """Catches a character of several tokens that is shown as question marks, and text taken for HTML."""
    text = "A 🦙 <b>"
    forced(text)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "top_logprobs": 2}
    with site.http() as http:
        assert http.post("/ui/answers", json=body | {"top_logprobs": 21}).status_code == 400
        path = http.post("/ui/answers", json=body).text.split('"')[1]
        events = [line[6:] for line in http.get(f"/{path}").text.splitlines() if line.startswith("data: ")]
    assert not any("<" in event for event in events)
    told = [token for event in events for token in json.loads(event).get("tokens", [])]
    assert "".join(token[0] for token in told) == text
    assert all(0 <= p <= 1 for token in told for _, p in token[2])
