"""One conversation in two tabs of a browser: no message is lost, and each tab shows what the other wrote."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.server.browsing import Visit, shoot


@pytest.fixture
def tabs(visit, site) -> Iterator[tuple[Visit, Visit]]:
    """Two tabs with the same conversation of one question and its answer."""
    visit.be_greedy()
    visit.ask("first")
    visit.wait_done()
    other = Visit(visit.page.context, site.url).ready()
    other.be_greedy()
    assert other.questions() == ["first"]
    yield visit, other
    assert visit.said == other.said == []


def wait_until(holds) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def every_text(messages: list[dict]) -> list[str]:
    """The texts of all messages, those of other versions too."""
    tails = [tail for one in messages for tail in one.get("versions", {}).get("tails", []) if tail]
    return [one["content"] for one in messages] + [text for tail in tails for text in every_text(tail)]


def versions(tab: Visit) -> str:
    """The versions that the tab offers, from the top."""
    return "".join(tab.page.locator(".versions:visible").all_inner_texts()).replace("\n", "")


def test_turns_in_two_tabs_follow_one_another(tabs):
    """Catches a tab that asks without what the other was answered, and writes over it."""
    one, two = tabs
    one.ask("second")
    one.wait_done()
    wait_until(lambda: two.questions() == ["first", "second"] and two.answers() == one.answers())
    two.ask("third")
    two.wait_done()
    wait_until(lambda: one.questions() == ["first", "second", "third"] and one.answers() == two.answers())
    (kept,) = one.chats()
    assert [message["role"] for message in kept["messages"]] == ["user", "assistant"] * 3
    one.page.reload()
    assert one.ready().answers() == two.answers()


def test_answers_that_grow_in_two_tabs_are_both_kept(tabs, forced):
    """Catches the last writer that wins: both ask at once, and neither question nor answer is lost."""
    one, two = tabs
    forced("tick tock " * 30, pause_s=0.02)
    one.ask("alpha")
    one.wait_for_text(20)
    two.page.wait_for_selector("text=alpha")
    two.ask("beta")
    two.wait_for_text(20)
    one.wait_done()
    two.wait_done()
    wait_until(lambda: "beta" in str(one.chats()) and "alpha" in str(one.chats()))
    texts = every_text(one.chats()[0]["messages"])
    assert sorted(text for text in texts if text in ("first", "alpha", "beta")) == ["alpha", "beta", "first"]
    assert len([text for text in texts if text.startswith("tick tock")]) == 2
    for tab in tabs:
        tab.page.reload()
        tab.ready()
        assert tab.questions() == ["first", "alpha", "beta"]
        # the second asks after the first one's question, or after what it has seen of the answer
        assert versions(tab) in ("‹1/2›", "")
        assert tab.answers()[-1].startswith("tick tock")
    shoot(one, "tabs")


def test_tabs_that_did_not_hear_of_one_another_lose_nothing(tabs, forced):
    """Catches a conversation that is written from memory: a frozen tab hears of others too late."""
    one, two = tabs
    two.page.add_init_script("addEventListener('storage', (event) => event.stopImmediatePropagation())")
    two.page.reload()
    two.ready()
    forced("Of one.")
    one.ask("alpha")
    one.wait_done()
    one.page.locator("text=Regenerate").last.click()
    one.wait_done()
    forced("Of two.")
    two.ask("beta")
    two.wait_done()
    texts = every_text(two.chats()[0]["messages"])
    first = one.answers()[0]
    assert sorted(texts) == sorted(["first", first, "alpha", "Of one.", "Of one.", "beta", "Of two."])
    wait_until(lambda: one.questions() == ["first", "beta"])
    assert versions(one) == "‹1/2›"
    one.page.locator("[aria-label='Later version']:visible").first.click()
    assert one.questions() == ["first", "alpha"]
    assert versions(one) == "‹2/2›‹2/2›"


def test_what_a_late_writer_dropped_comes_back(tabs):
    """Catches two tabs that write at the same moment, each without having read what the other wrote."""
    one, two = tabs
    stale = two.page.evaluate("({ ...localStorage })")
    one.ask("second")
    one.wait_done()
    whole = every_text(one.chats()[0]["messages"])
    two.page.evaluate("(stale) => Object.assign(localStorage, stale)", stale)
    wait_until(lambda: every_text(two.chats()[0]["messages"]) == whole)
    assert one.questions() == ["first", "second"]
    wait_until(lambda: two.questions() == ["first", "second"])


def test_an_edit_a_name_and_a_removal_reach_the_other_tab(tabs, forced):
    """Catches a tab that brings back what the other has changed, and one that closes what is being typed."""
    one, two = tabs
    two.page.locator(".user").get_by_text("Edit", exact=True).click()
    two.page.fill(".edit textarea", "first, as two has it")
    forced("Edited.")
    one.page.locator(".user").get_by_text("Edit", exact=True).click()
    one.page.fill(".edit textarea", "first, as one has it")
    one.page.press(".edit textarea", "Enter")
    one.wait_done()
    assert two.page.input_value(".edit textarea") == "first, as two has it"
    two.page.press(".edit textarea", "Enter")
    two.wait_done()
    wait_until(lambda: one.questions() == ["first, as two has it"])
    assert versions(one) == "‹3/3›"
    one.page.evaluate("window.prompt = () => 'A name'")
    one.page.click("[aria-label^='Rename']")
    wait_until(lambda: two.page.inner_text("#title") == "A name")
    two.page.click("#open-settings")
    two.page.fill("#system", "Be brief.")
    two.page.click("text=Done")
    wait_until(lambda: one.page.input_value("#system") == "Be brief.")
    assert one.chats()[0]["title"] == "A name"
    one.page.click("[aria-label='Delete A name']")
    wait_until(lambda: two.questions() == [])
    assert two.chats() == []
