"""Model output on the page: hostile text is inert, Markdown, code and formulas are shown."""

from __future__ import annotations

import json
import re
from html import unescape

import pytest

from tests.server.browsing import LOOKS, shoot, visiting
from tests.server.forcing import force

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


@pytest.mark.full
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
    from kukri.server.page.endpoints import _event

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
        '<div class="table" tabindex="0"><table><thead><tr><th>a</th><th class="center">b</th></tr></thead>'
        '<tbody><tr><td>1</td><td class="center">2</td></tr></tbody></table></div><p>x</p>',
    ),
    (  # bars after a backslash, in code too; a backslash that is escaped itself; a row that is short
        "\n".join([r"| a \| b | c |", "| :--- | ---: |", r"| `x \| y` \\| 1 |", r"| z\\ |"]),
        '<div class="table" tabindex="0"><table>'
        '<thead><tr><th>a | b</th><th class="right">c</th></tr></thead>'
        '<tbody><tr><td><code>x | y</code> \\</td><td class="right">1</td></tr>'
        '<tr><td>z\\</td><td class="right"></td></tr></tbody></table></div>',
    ),
    ("a | b\n---\n||\n|", "<p>a | b</p><hr><p>||<br>|</p>"),
    ("a | b\n|", "<p>a | b<br>|</p>"),
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


TABLE = """\
| Model | Parameters | Context | Download | Memory | Throughput | Licence |
| :--- | ---: | ---: | ---: | ---: | ---: | :---: |
| SmolLM2-135M-Instruct | 134,515,008 | 8192 | 0.14 GB | 0.31 GB | 1,234.5 tokens/s | Apache-2.0 |
| Multilingual_Representation | 7,615,616,512 | 131072 | 15.23 GB | 16.04 GB | 12.25 tokens/s | Community |
"""
PROSE = """\
| Aspect | Description | Recommendation |
| --- | --- | :-: |
| Internationalization | What a long sentence says about translations, numbers and dates | `use_it` |
| Responsibility \\| ownership | Another sentence about characteristics of such organizations | maybe |
"""


@pytest.mark.parametrize("look", LOOKS, ids=["phone", "desktop"])
def test_tables_cut_no_word_and_scroll_in_their_own_box(browser, site, monkeypatch, look):
    """Catches cut words and numbers, a page wider than the screen, and columns that are not aligned."""
    force(site.served, monkeypatch, f"Two tables:\n\n{TABLE}\nand\n\n{PROSE}\nSo.")
    with visiting(browser, site.url, **look) as visit:
        visit.ready().ask("Compare them")
        visit.wait_done()
        assert visit.page.evaluate("probes.brokenWords('.body :is(td, th)')") == []
        assert visit.page.evaluate("probes.brokenWords('.body .right', /.+/g)") == [], "a number and its unit"
        assert visit.page.locator("td, th").count() == 7 * 3 + 3 * 3
        wide, narrow = visit.page.locator(".table").all()
        edges = visit.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert edges[0] <= edges[1]
        for box in (wide, narrow):
            place = box.bounding_box()
            assert place["x"] >= 0
            assert place["x"] + place["width"] <= edges[1]
        assert wide.evaluate("e => e.scrollWidth > e.clientWidth"), "the widest scrolls"
        row = "row => [...row.cells].map((cell) => getComputedStyle(cell).textAlign)"
        sides = f"(table) => [...table.querySelectorAll('tr')].map({row})"
        assert wide.evaluate(sides) == [["left", *["right"] * 5, "center"]] * 3
        assert narrow.evaluate(sides) == [["left", "left", "center"]] * 3
        assert narrow.locator("td").nth(3).inner_text() == "Responsibility | ownership"
        shoot(visit, "tables")
        wide.evaluate("e => e.scrollLeft = 1e6")
        right = wide.bounding_box()
        last = wide.locator("th").last.bounding_box()
        assert abs(last["x"] + last["width"] - right["x"] - right["width"]) < 2
        shoot(visit, "tables-scrolled")


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


PIECES = (
    "$", "$$", "$a", "\\(", "\\[",
    "[", "![", "[a](", "(", "**", "***", "*a ", "__", "__a", "~~a", "`", "``", "http://", "> ", "- ",
    " - ", "|-", "|-|", "~~~~ ", "# ", "--- ", "\n", "- a\n\n", " - a\n\n",
)  # fmt: skip


@pytest.mark.full
def test_no_text_takes_long(visit):
    """Catches a pattern whose time grows with the square of the text, or a list that nests forever."""
    for piece in PIECES:
        text = (piece * 20_000)[:20_000] + "x"
        assert visit.page.evaluate("text => probes.markdown(text)", text)[1] < 2000, piece
