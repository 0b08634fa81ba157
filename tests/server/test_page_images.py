"""Images on the page: chosen, pasted, dropped, shown, asked about, kept by the browser."""

from __future__ import annotations

import base64

import pytest

from benchmarks.pictures import encoded, picture
from kukri import LLM
from tests.server.browsing import PHONE, visiting
from tests.server.live_server import serving
from tests.vision.seeing import save_seeing

RED, TALL = encoded(picture(40, 50, 1)), encoded(picture(90, 30, 2))
# an event with files, as a browser makes it of what a person drops or pastes
GIVE = """([where, kind, data]) => {
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0))
  const given = new DataTransfer()
  given.items.add(new File([bytes], "a.png", {type: "image/png"}))
  const options = {bubbles: true, cancelable: true}
  const event = kind === "paste" ? new ClipboardEvent(kind, {...options, clipboardData: given})
    : new DragEvent(kind, {...options, dataTransfer: given})
  document.querySelector(where).dispatchEvent(event)
}"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    directory = tmp_path_factory.mktemp("seeing")
    save_seeing(directory)
    with LLM(directory, backend="reference") as llm, serving(llm) as site:
        yield site


def give(visit, where: str, kind: str, data: bytes) -> None:
    visit.page.evaluate(GIVE, [where, kind, base64.b64encode(data).decode()])


def asked_images(request) -> list[bytes]:
    content = request.post_data_json["messages"][-1]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return [base64.b64decode(url.partition(",")[2]) for url in urls]


def test_images_are_chosen_pasted_dropped_and_kept(seeing, browser):
    """Catches an image that is not sent, not shown, taken twice, or forgotten by a reload."""
    with visiting(browser, seeing.url) as visit:
        page = visit.ready().page
        for name, value in (("temperature", "0"), ("max_tokens", "5")):
            page.evaluate("([id, value]) => document.getElementById(id).value = value", [name, value])
        page.set_input_files("#files", {"name": "a.png", "mimeType": "image/png", "buffer": RED})
        page.wait_for_selector("#pending img[src]")
        give(visit, "#prompt", "paste", TALL)
        page.wait_for_selector("#pending figure:nth-child(2) img[src]")
        give(visit, "#messages", "drop", RED)
        page.wait_for_selector("#pending figure:nth-child(3) img[src]")
        page.click("#pending figure:nth-child(3) button")
        with page.expect_request("**/ui/answers") as asked:
            visit.ask("What is it?")
        visit.wait_done()
        assert asked_images(asked.value) == [RED, TALL]
        assert len(visit.answers()) == 1
        assert page.locator("#pending figure").count() == 0
        assert page.locator(".user .images img[src]").count() == 2
        with page.expect_request("**/ui/answers") as asked:
            visit.ask("Sure?")
        visit.wait_done()
        messages = asked.value.post_data_json["messages"]
        kinds = [part["type"] for part in messages[-3]["content"]]
        assert (kinds, messages[-1]["content"]) == (["image_url", "image_url", "text"], "Sure?")
        page.reload()
        visit.ready()
        page.wait_for_selector(".user .images figure:nth-child(2) img[src]")
        assert not [line for line in visit.said if "Content Security Policy" in line]
        page.click("[data-do=delete]")
        count = """() => new Promise((done) => {
          const open = indexedDB.open("kukri", 1)
          open.onsuccess = () => {
            const request = open.result.transaction("images").objectStore("images").count()
            request.onsuccess = () => done(request.result)
          }
        })"""
        page.wait_for_function(f"async () => await ({count})() === 0")


def test_a_phone_shows_images(seeing, browser):
    """Catches a button or a thumbnail that reaches beyond a phone's screen."""
    with visiting(browser, seeing.url, viewport=PHONE) as visit:
        page = visit.ready().page
        files = [{"name": f"{i}.png", "mimeType": "image/png", "buffer": RED} for i in range(5)]
        page.set_input_files("#files", files)
        page.wait_for_selector("#pending figure:nth-child(5) img[src]")
        assert page.is_visible("#add-images")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert page.locator("#send").bounding_box()["x"] < PHONE["width"]


@pytest.mark.full
def test_a_model_of_text_takes_no_images(served, browser):
    """Catches images that are lost in silence."""
    with visiting(browser, served.url) as visit:
        visit.ready()
        assert not visit.page.is_visible("#add-images")
        give(visit, "#messages", "drop", RED)
        assert "does not accept images" in visit.page.inner_text("#notice")
