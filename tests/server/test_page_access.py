"""The page for everybody: keyboard, contrast, names that screen readers need, and no long wait."""

from __future__ import annotations

import pytest

from tests.server.browsing import PHONE, visiting


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


@pytest.mark.full
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


@pytest.mark.full
def test_the_first_content_comes_at_once(visit):
    """Catches a page that waits for the model, or for files from elsewhere, before it shows anything."""
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    visit.page.wait_for_timeout(200)
    assert visit.page.evaluate(paint) < 1000
    hosts = "[...new Set(performance.getEntriesByType('resource').map(e => new URL(e.name).host))]"
    assert visit.page.evaluate(hosts) == [visit.page.evaluate("location.host")]
