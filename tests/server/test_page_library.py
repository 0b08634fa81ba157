"""The page's model library in a real Chromium, with downloads from a hub on loopback."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest

from kukri.opening.model_options import ModelOptions
from kukri.server.settings import ModelSpec
from tests.fake_hub import TINY
from tests.server.browsing import LOOKS, shoot, visiting
from tests.server.live_server import serving
from tests.tiny_gguf import write_tiny


@contextmanager
def library(browser, look=LOOKS[1], **settings):
    """The page of a server without a model, its library open."""
    with serving(None, **settings) as served, visiting(browser, served.url, **look) as visit:
        visit.page.click("#open-settings")
        visit.page.click("#open-library")
        visit.page.wait_for_selector("#others li")
        yield visit


def spec_of(folder: Path) -> ModelSpec:
    return ModelSpec(("red",), ModelOptions(model=str(write_tiny(folder / "red.gguf"))))


def row(visit, name: str):
    return visit.page.locator(f"#library li[data-name='{name}']").first


@pytest.mark.full
@pytest.mark.parametrize(
    "look", [LOOKS[0], pytest.param(LOOKS[1], marks=pytest.mark.slow)], ids=["phone", "desktop"]
)
def test_a_model_is_downloaded_and_used(browser, tiny_hub, look):
    """Catches a download without progress, one that cannot be cancelled, or a model that nobody can use."""
    tiny_hub.stall_at = 21_000_000
    with library(browser, look, manages_models=True) as visit:
        page = visit.page
        assert page.inner_text("#here") == "No model yet."
        known = row(visit, "qwen3-0.6b").inner_text()
        assert "4 GB of memory" in known
        assert "1.2 GB to download" in known
        assert "apache-2.0" in known
        for element in ("#library", "#pull", "#others li button"):
            edge = page.evaluate("s => document.querySelector(s).getBoundingClientRect().right", element)
            assert edge <= look["viewport"]["width"], element
        page.fill("#pull input", TINY)
        page.keyboard.press("Enter")
        page.wait_for_selector("text=21.0 MB of 25.0 MB")
        assert page.locator("#library progress").evaluate("bar => bar.value / bar.max") == 20 * 2**20 / 25e6
        visit.check_access()
        shoot(visit, "library")
        row(visit, TINY).get_by_text("Cancel", exact=True).click()
        page.wait_for_selector("text=Cancelled.")
        assert page.locator("#library progress").count() == 0
        tiny_hub.released.set()
        row(visit, TINY).get_by_text("Download", exact=True).click()
        row(visit, TINY).get_by_text("Use", exact=True).click()
        page.wait_for_selector(f"#sampling[data-model='{TINY}']", state="attached")
        assert not page.is_visible("#library")
        visit.said.clear()  # a server without a model answers 404 at first
        page.evaluate("document.querySelector('#max_tokens').value = 4")
        visit.ask("Hi")
        visit.wait_done()
        assert "4 tokens" in page.inner_text(".stats")
        page.click("#open-settings")
        page.click("#open-library")
        page.wait_for_selector("#here li[data-name]")
        assert row(visit, TINY).get_by_text("Use", exact=True).count() == 1
        assert visit.said == []


@pytest.mark.full
def test_what_cannot_be_downloaded_is_said_in_a_line(browser, tiny_hub):
    """Catches an error that nobody sees, or a traceback in its place."""
    with library(browser, manages_models=True) as visit:
        tiny_hub.gated.add(TINY)
        for name, why in (
            (TINY, f"{TINY} is gated"),
            ("org/none", "the repository org/none or its file was not found"),
            ("a b", "the model 'a b' was not found"),
        ):
            visit.page.fill("#pull input", name)
            visit.page.keyboard.press("Enter")
            row(visit, name).locator(".wrong").get_by_text(why).wait_for()
        visit.check_access()
        shoot(visit, "library-errors")


@pytest.mark.full
def test_the_library_names_what_stands_in_the_way(tiny_hub, tmp_path, monkeypatch):
    """Catches downloads by keys without the scope, and a hub that is asked although it must not be."""
    keys = ("user plain", "chief boss scope=manage")
    with serving(None, manages_models=True, api_keys=keys) as served, served.http() as http:

        def seen(key: str) -> str:
            response = http.get("/ui/library", headers={"authorization": f"Bearer {key}"})
            return response.text if response.status_code == 200 else ""

        assert seen("wrong") == ""
        assert "does not have the scope &#39;manage&#39;" in seen("plain")
        assert 'data-do="pull"' not in seen("plain")
        assert 'data-do="pull"' in seen("boss")
        assert "HF_HUB_OFFLINE" not in seen("boss")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE is set" in seen("boss")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        allowed = {"authorization": "Bearer boss"}
        last = http.post("/api/pull", json={"model": TINY}, headers=allowed).text.splitlines()[-1]
        assert "unset HF_HUB_OFFLINE" in last
    with serving(None, [spec_of(tmp_path)]) as served, served.http() as http:
        seen_here = http.get("/ui/library").text
        assert "start the server with --manage-models" in seen_here
        assert '<li data-name="red">' in seen_here
