"""Servers with the real model, and a browser, for the tests of this folder."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kukri import LLM
from kukri.kernels.cpu.compile.kernel_cache import cache_root
from tests.fake_hub import TINY, Hub, running
from tests.server.live_server import SERVER, TOOL_TEMPLATE, Served, serving
from tests.tiny_gguf import write_tiny


@pytest.fixture(scope="session")
def offline(smollm2_path: Path) -> Iterator[LLM]:
    """The same model without a server: what answers have to be."""
    with LLM(smollm2_path, max_context=1024) as llm:
        yield llm


@pytest.fixture(scope="session")
def served(smollm2_path: Path) -> Iterator[Served]:
    """A server without limits that a test would meet by accident. What a test queues it ends.

    One that runs already, behind replicas for example, can be tested by the same tests if it has the same
    model, names and limits.
    """
    if SERVER in os.environ:
        yield Served(os.environ[SERVER])
        return
    with LLM(smollm2_path, max_context=1024, max_requests=8) as llm, serving(llm, max_waiting=64) as server:
        yield server


@pytest.fixture(scope="session")
def tooled(smollm2_path: Path) -> Iterator[Served]:
    """A server whose model's template takes tools, and may begin thoughts."""
    with LLM(smollm2_path, max_context=1024, max_requests=4) as llm:
        llm.tokenizer.chat_template = TOOL_TEMPLATE
        with serving(llm) as server:
            yield server


@pytest.fixture(scope="package")
def chromium() -> Iterator[tuple[Any, Any]]:
    """The system's Chromium, and Playwright's event loop, which rests outside of `browser`.

    Without Chromium tests fail where CI is set, and are skipped elsewhere. It ends with the folder, because
    counting the processor time of its many threads takes 3 ms for each later test.
    """
    from playwright import sync_api as playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        reason = "no chromium here: on Debian, apt-get install chromium"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        yield browser, loop
        asyncio._set_running_loop(loop)
        browser.close()


@pytest.fixture
def browser(chromium) -> Iterator[Any]:
    """Chromium for one test. Playwright's loop counts as running in it, while others run their own."""
    browser, loop = chromium
    asyncio._set_running_loop(loop)
    yield browser
    asyncio._set_running_loop(None)


@pytest.fixture
def tiny_hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A hub on loopback with a tiny model, for servers and what they start; all caches are empty.

    Its file is longer than the model: huggingface_hub writes ten megabytes at a time.
    """
    data = write_tiny(tmp_path / "tiny.gguf").read_bytes().ljust(25_000_000, b"\0")
    hub = Hub({TINY: {"tiny.gguf": data}})
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "jit").symlink_to(cache_root())  # compiled kernels stay
    with running(hub):
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        for name, value in {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "KUKRI_CACHE_DIR": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        yield hub


@pytest.fixture(scope="module")
def site(smollm2_path: Path) -> Iterator[Served]:
    with LLM(smollm2_path, max_context=4096, max_requests=4, n_threads=1) as llm, serving(llm) as server:
        yield server


@pytest.fixture
def visit(browser, site) -> Iterator[Any]:
    """The page, open and ready; its console must have stayed silent."""
    from tests.server.browsing import visiting

    with visiting(browser, site.url) as visit:
        yield visit.ready()
        assert visit.said == []


@pytest.fixture
def forced(site, monkeypatch) -> Callable[..., None]:
    """Makes the model say a text, whatever it is asked, one token every `pause_s`."""

    from tests.server.forcing import force

    def force_text(text: str, pause_s: float = 0.0) -> None:
        force(site.served, monkeypatch, text, pause_s=pause_s)

    return force_text
