"""The page in a real Chromium, against a real server and the real model."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from conftest import MODEL, Served, serving
from forcing import force
from playwright import sync_api as playwright
from tiny_gguf import write_tiny

from kukri import LLM
from kukri.loading import ModelOptions
from kukri.server.settings import ServedModel

PROBES = Path(__file__).with_name("page_probes.js").read_text(encoding="utf-8")
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    """The system's Chromium: its absence is a failure where CI is set, a reason to skip elsewhere."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        reason = "no chromium here: on Debian, apt-get install chromium"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(smollm2_path: Path) -> Iterator[Served]:
    with LLM(smollm2_path, max_context=4096, max_requests=4, n_threads=1) as llm, serving(llm) as server:
        yield server


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

    def answers(self) -> list[str]:
        return self.page.locator(".assistant .body").all_inner_texts()

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


@pytest.fixture
def visit(browser, site) -> Iterator[Visit]:
    """The page, open and ready; its console must have stayed silent."""
    with visiting(browser, site.url) as visit:
        yield visit.ready()
        assert visit.said == []


@pytest.fixture
def forced(site, monkeypatch) -> Callable[..., None]:
    """Makes the model say a text, whatever it is asked, one token every `pause_s`."""

    def force_text(text: str, pause_s: float = 0.0) -> None:
        force(site.service, monkeypatch, text, pause_s=pause_s)

    return force_text


# --- a conversation


def test_an_answer_comes_and_a_reload_keeps_it(visit, offline):
    """Catches a page that does not ask what was typed, or forgets it."""
    visit.be_greedy()
    visit.ask("What is the capital of France?")
    visit.wait_done()
    (answer,) = visit.answers()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    expected = offline.chat(question, temperature=0, max_tokens=40)
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
    """Catches half an answer that a reload loses, and an engine that goes on for nobody."""
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
    """Catches a page that waits for ever after an error."""
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
    monkeypatch.setattr(site.service, "settings", replace(site.service.settings, deadline_s=0.5))
    visit.ask("Go")
    visit.page.wait_for_selector("#notice:visible")
    assert "0.5 s" in visit.page.inner_text("#notice")
    assert visit.answers()[0].startswith("tick tock")
    assert "broken off" in visit.page.inner_text(".stats")


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
        page.wait_for_selector("text=This server wants an API key.")
        assert visit.said == []
        page.click("#retry")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=The server does not know this API key.")
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
        for wrong in ({"n": 2}, {"stream": False}, {"seed": -1}, {"temperature": 3}):
            assert http.post("/ui/answers", json=body | wrong).status_code == 400
        assert "/ui" not in http.get("/openapi.json").text


def test_an_answer_that_nobody_opens_is_ended(served, monkeypatch):
    """Catches answers that run, and are kept, for browsers that have left."""
    monkeypatch.setattr("kukri.server.page.OPEN_S", 0.2)
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


# --- hostile output

HOSTILE = """\
<script>window.hit = 1</script><img src=x onerror="window.hit = 1"> <svg/onload=window.hit=1>
<div hx-swap-oob="true" id="notice" hx-on:load="window.hit = 1" hx-get="/metrics" hx-trigger="load">x</div>

[click](javascript:window.hit=1) [click](JaVaScRiPt:window.hit=1) [click](data:text/html,<script>1</script>)
[a](  javascript:window.hit=1) [ok](https://example.com/a"onmouseover="window.hit=1) ![i](https://example.com/x.png)
![i](x" onerror="window.hit=1) [v](vbscript:x) [f](file:///etc/passwd)
<https://example.com> [b](//example.com)

```html "><script>window.hit = 1</script>
</code></pre><script>window.hit = 1</script><img src=x onerror=window.hit=1>
```

| <b onclick="window.hit=1">a</b> | <style>*{display:none}</style> |
| --- | --- |
| <iframe src="javascript:window.hit=1"></iframe> | `<script>window.hit = 1</script>` |

- **<img src=x onerror=window.hit=1>**
# <form action="https://example.com"><button>ok</button></form>
&lt;script&gt;window.hit = 1&lt;/script&gt; </template><base href="https://example.com/">
"""
TAGS = {
    "P", "BR", "A", "CODE", "PRE", "FIGURE", "FIGCAPTION", "SPAN", "BUTTON", "DIV",
    "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "UL", "LI", "STRONG", "H3",
}  # fmt: skip
ATTRIBUTES = {"href", "title", "target", "rel", "class", "type", "tabindex", "data-do"}


def test_hostile_output_is_inert(visit, forced):
    """Catches a model, or who feeds it, that gets code into the page, at once or on a reload."""
    asked = []
    visit.page.on("request", lambda request: asked.append(request.url))
    forced(HOSTILE)
    visit.ask(HOSTILE[:300])
    visit.wait_done()
    shown = visit.answers()
    for _ in range(2):
        assert visit.page.evaluate("window.hit") is None
        body = visit.page.locator(".assistant .body")
        tags = set(body.evaluate("e => [...e.querySelectorAll('*')].map(c => c.tagName)"))
        assert tags <= TAGS, tags - TAGS
        assert {"A", "TABLE", "FIGURE", "UL", "H3"} <= tags, "the markdown around it is still read"
        links = body.evaluate("e => [...e.querySelectorAll('a')].map(a => a.href)")
        assert links
        assert all(link.startswith("https://example.com/") for link in links), links
        attributes = set(
            body.evaluate("e => [...e.querySelectorAll('*')].flatMap(c => c.getAttributeNames())")
        )
        assert attributes <= ATTRIBUTES, attributes - ATTRIBUTES
        assert visit.page.locator(".user .body *").count() == 0
        text = body.inner_text()
        for part in (
            "<script>window.hit = 1</script>",
            "javascript:window.hit=1",
            "<iframe",
            "&lt;script&gt;",
        ):
            assert part in text, part
        assert visit.page.is_hidden("#notice")
        visit.page.reload()
        visit.ready()
    assert visit.answers() == shown
    assert not [url for url in asked if "example.com" in url or "metrics" in url]


def test_the_policy_would_stop_what_the_renderer_missed(visit):
    """Catches a content security policy that lets inline script, or requests elsewhere, through."""
    page = visit.page
    with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hit=1\">')")
    page.evaluate(
        "const s = document.createElement('script'); s.text = 'window.hit=1'; document.body.append(s)"
    )
    refused = page.evaluate("fetch('https://example.com/').then(() => false, () => true)")
    assert refused
    assert page.evaluate("window.hit") is None
    assert all("Content Security Policy" in text or "404" in text for text in visit.said), visit.said
    visit.said.clear()


def test_events_hold_no_html(served):
    """Catches an event that would be markup if some script swapped it in unread."""
    from kukri.server.page import _event

    event = _event("delta", content="</script><img src=x>&amp;\r\n\ndata: x\u2028")
    assert event.count(b"\n") == 3
    assert not set(b"<>&\r") & set(event)
    assert (
        json.loads(event.split(b"data: ", 1)[1])["content"] == "</script><img src=x>&amp;\r\n\ndata: x\u2028"
    )


MARKDOWN = [
    ("a\nb", "<p>a<br>b</p>"),
    ("**a *b* c** `x<y` ~~d~~", "<p><strong>a <em>b</em> c</strong> <code>x&lt;y</code> <del>d</del></p>"),
    ("snake_case_name 2 * 3 * 4 \\*x\\*", "<p>snake_case_name 2 * 3 * 4 *x*</p>"),
    ("# A\n## B #\n#x", "<h3>A</h3><h4>B</h4><p>#x</p>"),
    (
        "1. a\n\n2. b\n   - c\n   - d\n\ne",
        '<ol start="1"><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li><li><p>d</p></li></ul></li></ol>'
        "<p>e</p>",
    ),
    ("* a\n\tb\n* c", "<ul><li><p>a<br>b</p></li><li><p>c</p></li></ul>"),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    (
        "a | b\n--|:-:\n1 | 2\n\nx",
        '<div class="table" tabindex="0"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
        "<tbody><tr><td>1</td><td>2</td></tr></tbody></table></div><p>x</p>",
    ),
    ("***\n---", "<hr><hr>"),
    ("", ""),
]


def test_markdown_becomes_what_it_means(visit):
    """Catches answers that are harder to read than their source."""

    def markdown(text):
        return visit.page.evaluate("text => probes.markdown(text)", text)[0]

    for text, html in MARKDOWN:
        assert markdown(text) == html
    code = markdown("```python\nx\t= '''`'''\n\n# y\n```\nz")
    assert "<span>python</span>" in code
    assert (
        "<code>x\t= <span class=\"string\">'''`'''</span>\n\n<span class=\"comment\"># y</span>"
        "</code></pre></figure><p>z</p>"
    ) in code
    open_ended = markdown("~~~\n```\nx")
    assert "<code>```\nx</code>" in open_ended


def test_code_is_colored_and_stays_the_same_text(visit):
    """Catches a pattern that loses or doubles a character, and a word taken for a keyword."""

    def colored(code: str, language: str) -> str:
        return visit.page.evaluate("text => probes.markdown(text)", f"```{language}\n{code}\n```")[0]

    returned = '<span class="word">return</span> returned + <span class="number">0x1f</span>'
    assert returned in colored("return returned + 0x1f", "js")
    assert '<span class="comment">-- x</span>' in colored("SELECT 1 -- x", "sql")
    assert '<span class="word">SELECT</span>' in colored("SELECT 1 -- x", "sql")
    assert "<span class=" not in colored("return 1", "unheard-of").partition("<pre")[2]
    for language in ("python", "js", "rust", "bash", "json", "sql", "html"):
        for code in ('"""a', '"a\\', "a + 'b", "/* a", "<a b='c'>&amp;<!--", "0x", "a'b\"c#d//e--f"):
            shown = colored(code, language).partition("<code>")[2].partition("</code>")[0]
            assert unescape(re.sub("</?span[^>]*>", "", shown)) == code


def test_formulas_are_drawn(visit, forced):
    """Catches TeX shown as its source, prices taken for formulas, and a formula that breaks the page."""
    forced(r"Euler: $e^{i\pi} = -1$, it costs $5 or $6. \(a_1\) and \[\frac{a}{b}\] but $$\nothing{$$")
    visit.ask("?")
    visit.wait_done()
    visit.page.wait_for_selector(".maths .katex")
    assert visit.page.locator(".maths .katex-html").count() == 3
    assert visit.page.locator(".maths.display .katex-html").count() == 1
    assert r"\nothing{" in visit.answers()[0]


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
        ServedModel((name,), ModelOptions(model=str(write_tiny(tmp_path / f"{name}.gguf")), max_requests=2))
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


PIECES = (
    "$", "$$", "$a", "\\(", "\\[",
    "[", "![", "[a](", "(", "**", "***", "*a ", "__", "__a", "~~a", "`", "``", "http://", "> ", "- ",
    " - ", "|-", "|-|", "~~~~ ", "# ", "--- ", "\n", "- a\n\n", " - a\n\n",
)  # fmt: skip


def test_no_text_takes_long(visit):
    """Catches a pattern whose time grows with the square of the text, or a list that nests for ever."""
    for piece in PIECES:
        text = (piece * 20_000)[:20_000] + "x"
        assert visit.page.evaluate("text => probes.markdown(text)", text)[1] < 2000, piece


# --- for everybody


def unreached(page) -> set[str]:
    """The visible controls that Tab does not reach, or where nobody sees that it did: below 3 to 1."""
    missing = set(page.evaluate("probes.focusable()"))
    for _ in range(2 * len(missing)):
        page.keyboard.press("Tab")
        if page.evaluate("probes.focusMark()") >= 3:
            missing.discard(page.evaluate("probes.focused()"))
        if not missing:
            break
    return missing


@pytest.mark.parametrize("options", [{}, {"viewport": PHONE, "has_touch": True}], ids=["desktop", "phone"])
def test_every_control_is_reached_by_tab(browser, site, forced, options):
    """Catches controls for the mouse alone, and a focus that nobody sees."""
    forced(f"Here:\n\n```python\n{'print(1); ' * 20}\n```\n\n{'long' * 40}")
    with visiting(browser, site.url, **options) as visit:
        page = visit.ready().page
        visit.ask("Some code, please, and a title that is longer than its place")
        visit.wait_done()
        for element in ("html", "main", "#composer", "#send", "article.assistant"):
            edge = page.evaluate("s => document.querySelector(s).getBoundingClientRect().right", element)
            assert edge <= page.viewport_size["width"], element
        visible = page.evaluate("probes.focusable()")
        assert {"prompt", "send", "open-settings", "Edit", "Regenerate", "Copy"} <= set(visible)
        assert ("menu" in visible) == bool(options)
        assert ("new-chat" in visible) != bool(options)
        assert unreached(page) == set()
        page.focus("#open-settings")
        page.keyboard.press("Enter")
        visible = page.evaluate("probes.focusable()")
        assert {"system", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"} <= set(visible)
        assert unreached(page) == set()
        page.keyboard.press("Escape")
        assert not page.is_visible("#settings")
        if options:
            page.focus("#menu")
            page.keyboard.press("Enter")
            assert page.evaluate("document.activeElement.id") == "new-chat"
            assert page.get_attribute("#menu", "aria-expanded") == "true"
            page.keyboard.press("Escape")
            page.wait_for_selector("#new-chat", state="hidden")


def test_shift_enter_is_a_new_line(visit):
    """Catches a message that is sent before it is written."""
    visit.page.focus("#prompt")
    visit.page.keyboard.type("one")
    visit.page.keyboard.press("Shift+Enter")
    visit.page.keyboard.type("two")
    assert visit.page.input_value("#prompt") == "one\ntwo"
    assert visit.page.locator("article").count() == 0


@pytest.mark.parametrize("options", [{}, {"viewport": PHONE, "has_touch": True}], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_has_contrast(browser, site, forced, scheme, options):
    """Catches what is too faint: WCAG AA wants 4.5 to 1 of texts, 3 to 1 of the edges of inputs."""
    forced(
        "# A\n\nb `c` [d](https://example.com)\n\n> e\n\n```\nf\n```\n\n| g | h |\n| --- | --- |\n| i | j |"
    )
    with visiting(browser, site.url, color_scheme=scheme, **options) as visit:
        page = visit.ready().page
        ratios = dict(page.evaluate("probes.contrasts()"))
        edges = dict(page.evaluate("probes.edges()"))
        if options:
            page.click("#menu")
            page.wait_for_selector("#new-chat")
            ratios |= dict(page.evaluate("probes.contrasts()"))
            edges |= dict(page.evaluate("probes.edges()"))
            page.keyboard.press("Escape")
        visit.ask("show")
        visit.wait_done()
        ratios |= dict(page.evaluate("probes.contrasts()"))
        page.evaluate("document.querySelector('#notice').hidden = false")
        page.evaluate("document.querySelector('#notice span').textContent = 'wrong'")
        page.click("#open-settings")
        ratios |= dict(page.evaluate("probes.contrasts()"))
        edges |= dict(page.evaluate("probes.edges()"))
        assert len(ratios) > 30
        assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
        assert {"prompt", "theme", "system", "temperature", "seed"} <= set(edges)
        assert {name: ratio for name, ratio in edges.items() if ratio < 3} == {}
        if options:
            return  # where the theme is changed, the menu is in front of it
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.keyboard.press("Escape")
        page.select_option("#theme", "dark" if scheme == "light" else "light")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background
        page.reload()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background


def test_the_document_says_what_it_is(visit, forced):
    """Catches inputs without labels, headings out of order, and a page that only its looks explain."""
    assert visit.page.evaluate("probes.problems()") == []
    forced("# A\n\n- [b](https://example.com)\n\n```\nc\n```")
    visit.ask("show")
    visit.wait_done()
    visit.page.click("text=Edit")
    assert visit.page.evaluate("probes.problems()") == []


def test_the_first_content_comes_at_once(visit):
    """Catches a page that waits for the model, or for files from elsewhere, before it shows anything."""
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    visit.page.wait_for_timeout(200)
    assert visit.page.evaluate(paint) < 1000
    hosts = "[...new Set(performance.getEntriesByType('resource').map(e => new URL(e.name).host))]"
    assert visit.page.evaluate(hosts) == [visit.page.evaluate("location.host")]
