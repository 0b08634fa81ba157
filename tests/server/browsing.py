"""The page in a browser: what tests do on it, and what its console says."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright import sync_api as playwright

PROBES = Path(__file__).with_name("page_probes.js").read_text(encoding="utf-8")
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1440, "height": 900}
LOOKS = [  # of a phone and a desktop, as `visiting` takes them
    {"viewport": PHONE, "color_scheme": "dark"},
    {"viewport": DESKTOP, "color_scheme": "light"},
]
SHOTS = os.environ.get("KUKRI_SHOTS")  # a directory for pictures of the page, to be looked at


class Visit:
    """A page that is open, and what its console said."""

    def __init__(self, context: playwright.BrowserContext, url: str) -> None:
        context.add_init_script(PROBES)
        self.page = context.new_page()
        self.said: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: dialog.accept())
        self.page.goto(url)

    def ready(self) -> Visit:
        self.page.wait_for_selector("#sampling", state="attached")
        return self

    def be_greedy(self) -> None:
        for name, value in (("temperature", "0"), ("max_tokens", "40")):
            self.page.evaluate("([id, value]) => document.getElementById(id).value = value", [name, value])

    def ask(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def wait_done(self) -> None:
        self.page.wait_for_selector("#send:visible")

    def wait_for_text(self, n: int) -> str:
        """The last answer, once it has more than n characters."""
        deadline = time.monotonic() + 60
        while len(text := (self.answers() or [""])[-1]) <= n:
            assert time.monotonic() < deadline, text
            time.sleep(0.01)
        return text

    def check_access(self) -> None:
        """What can be read is not too faint (WCAG AA), and everything has a name."""
        faint = {name: ratio for name, ratio in self.page.evaluate("probes.contrasts()") if ratio < 4.5}
        assert faint == {}
        assert self.page.evaluate("probes.problems()") == []

    def answers(self) -> list[str]:
        return self.page.locator(".assistant .body").all_inner_texts()

    def questions(self) -> list[str]:
        return self.page.locator(".user .body").all_inner_texts()

    def chats(self) -> list[dict]:
        script = "Object.entries(localStorage).filter(([k]) => k.startsWith('kukri.chat.')).map(([, v]) => v)"
        return [json.loads(text) for text in self.page.evaluate(script)]


@contextmanager
def visiting(browser, url: str, **options) -> Iterator[Visit]:
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    context.set_default_timeout(60_000)
    try:
        yield Visit(context, url)
    finally:
        context.close()


def shoot(visit: Visit, name: str) -> None:
    """Takes a picture of the page, if somebody wants to look at it."""
    if SHOTS:
        width = visit.page.evaluate("innerWidth")
        visit.page.screenshot(path=Path(SHOTS) / f"{name}-{width}.png")
