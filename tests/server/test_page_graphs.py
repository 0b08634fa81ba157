"""The page of attribution graphs in a real Chromium: one that the server makes, and dropped files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from kukri import LLM
from tests.server.browsing import LOOKS, Visit, shoot, visiting
from tests.server.live_server import Served, serving
from tests.server.test_neuronpedia import PROMPT, arrays
from tests.tiny_gguf import write_tiny

DROP = """([name, text]) => {
  const data = new DataTransfer()
  data.items.add(new File([text], name))
  document.querySelector("#place").dispatchEvent(new DragEvent("drop", {bubbles: true, dataTransfer: data}))
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("graphs")
    path = write_tiny(folder / "tiny.gguf")
    (folder / "mlps").mkdir()
    for layer in (0, 1):
        save_file(arrays(layer), folder / "mlps" / f"layer_{layer}.safetensors")
    with (
        LLM(path, backend="reference", max_requests=4, transcoders={"mlps": folder / "mlps"}) as llm,
        serving(llm, has_interp=True, api_keys=("alice researcher scope=interp",)) as server,
    ):
        yield server


def small_graph() -> dict[str, Any]:
    """Three tokens, two features of the last one, an error and a logit."""

    def node(name: str, kind: str, layer: str, position: int, **more: Any) -> dict[str, Any]:
        return {
            "node_id": name,
            "feature_type": kind,
            "layer": layer,
            "ctx_idx": position,
            "clerp": "",
            **more,
        }

    feature = "cross layer transcoder"
    nodes = [
        node("E_1_0", "embedding", "E", 0),
        node("0_7_2", feature, "0", 2, influence=0.4, activation=2.5, top_tokens=[" Paris", "<b>x</b>"]),
        node("3_9_2", feature, "3", 2, influence=0.6, clerp="say a capital"),
        node("1_-1_1", "mlp reconstruction error", "1", 1, influence=0.7),
        node("5_2_2", "logit", "5", 2, clerp='Output " Paris" (p=0.9)', token_prob=0.9),
    ]
    links = [
        ("E_1_0", "0_7_2", 1.25),
        ("0_7_2", "3_9_2", -2.5),
        ("1_-1_1", "5_2_2", 0.5),
        ("3_9_2", "5_2_2", 3.0),
    ]
    return {
        "metadata": {
            "slug": "s",
            "scan": "m",
            "prompt": "in <i>it</i>",
            "prompt_tokens": ["in", " <i>", "it"],
        },
        "nodes": nodes,
        "links": [{"source": a, "target": b, "weight": w} for a, b, w in links],
    }


def kinds_of(page: Any) -> dict[str, int]:
    """How many nodes of each kind are drawn."""
    return {kind: page.locator(f".map .{kind}").count() for kind in ("feature", "error", "token", "logit")}


def drop(visit: Visit, graph: Any, name: str = "graph.json") -> None:
    text = graph if isinstance(graph, str) else json.dumps(graph)
    visit.page.evaluate(DROP, [name, text])


@pytest.mark.full
@pytest.mark.parametrize("look", LOOKS, ids=["phone", "desktop"])
def test_a_graph_is_made_and_kept(browser: Any, site: Served, look: dict[str, Any], tmp_path: Path) -> None:
    """Catches a graph that nobody can ask for, look at or save, at the width of a phone and of a desk."""
    with visiting(browser, f"{site.url}/ui/graph", **look) as visit:
        page = visit.page
        page.fill("#prompt", PROMPT)
        page.press("#prompt", "Enter")
        page.locator("#notice").get_by_text("API key").wait_for()
        page.evaluate("sessionStorage.setItem('kukri.key', 'researcher')")
        page.fill("#features", "60")
        page.click("#make")
        page.wait_for_selector(".graph:visible")
        with page.expect_download() as saved:
            page.click("#save")
        saved.value.save_as(tmp_path / "graph.json")
        graph = json.loads((tmp_path / "graph.json").read_text())
        assert page.locator("path.node").count() == len(graph["nodes"]) + 4, "four are the legend's"
        logit = max(graph["nodes"], key=lambda node: node["token_prob"])
        assert page.inner_text(".facts h2") == logit["clerp"]
        into = [link["weight"] for link in graph["links"] if link["target"] == logit["node_id"]]
        shown = [
            float(text.replace("−", "-"))
            for text in page.locator(".facts li span:last-child").all_inner_texts()
        ]
        expected = sorted(into, key=abs, reverse=True)[:15]
        assert shown[: len(expected)] == pytest.approx(expected, rel=0.01)
        for element in ("#save", "#open", ".facts", "#make", "#features"):
            edge = page.evaluate("s => document.querySelector(s).getBoundingClientRect().right", element)
            assert edge <= look["viewport"]["width"], element
        visit.check_access()
        shoot(visit, "graph")
        assert visit.said == []


def test_nodes_are_reached_by_mouse_and_keys(browser: Any, site: Served) -> None:
    """Catches weights of other links, tokens that nobody sees, a text taken for HTML, a node out of reach."""
    with visiting(browser, f"{site.url}/ui/graph") as visit:
        page = visit.page
        drop(visit, small_graph())
        page.wait_for_selector(".graph:visible")
        assert page.inner_text("#title") == "in <i>it</i>"
        assert page.inner_text(".facts h2") == 'Output " Paris" (p=0.9)'
        assert page.locator(".facts li").all_inner_texts() == [
            'say a capital 3/9 on "it"\n+3.00',
            'error of layer 1 on " <i>"\n+0.500',
        ]
        assert kinds_of(page) == {"feature": 2, "error": 1, "token": 1, "logit": 1}
        at = [
            box["y"]
            for box in (
                page.locator(f".map .{kind}").first.bounding_box() for kind in ("logit", "error", "token")
            )
        ]
        assert at == sorted(at), "rows go up with layers"
        page.fill("#share", "0.5")
        assert kinds_of(page) == {"feature": 1, "error": 0, "token": 1, "logit": 1}
        page.fill("#share", "1")
        page.focus(".map")
        for key, name in (
            ("ArrowDown", "say a capital 3/9"),
            ("ArrowDown", "error of layer 1"),
            ("ArrowDown", "feature 0/7"),
        ):
            page.keyboard.press(key)
            assert page.inner_text(".facts h2").startswith(name)
        assert "activation 2.50" in page.inner_text(".facts")
        assert page.locator(".facts li").all_inner_texts() == [
            'token "in"\n+1.25',
            'say a capital 3/9 on "it"\n−2.50',
        ]
        assert page.locator(".map line").count() == 2
        shape = page.locator(".map .feature").first
        shape.hover()
        assert page.inner_text(".hint").split("\n") == ['feature 0/7 on "it"', '" Paris" "<b>x</b>"']
        page.locator(".facts li button").first.click()
        assert page.inner_text(".facts h2") == 'token "in"'
        shape.click()
        assert page.inner_text(".facts h2") == 'feature 0/7 on "it"'
        assert page.evaluate("document.querySelectorAll('.facts b, .hint b, #title i').length") == 0
        assert visit.said == []


@pytest.mark.full
def test_wrong_files_are_one_line_each(browser: Any, site: Served) -> None:
    """Catches a page that stands still, or that shows half of a file."""
    graph = small_graph()

    def changed(**fields: Any) -> dict[str, Any]:
        return {**graph, "nodes": [*graph["nodes"], {**graph["nodes"][1], **fields}]}

    with visiting(browser, f"{site.url}/ui/graph") as visit:
        for wrong, words in (
            ("{", "graph.json is not JSON."),
            ("[]", "it has no nodes and links."),
            ({**graph, "metadata": {}}, "its metadata have no prompt_tokens."),
            ({**graph, "nodes": []}, "it has no node."),
            ({**graph, "nodes": [None]}, "a node has no node_id"),
            (changed(ctx_idx=3), "the node 0_7_2 is at position 3 of 3 tokens."),
            (changed(layer="1e9"), "the node 0_7_2 is in no layer."),
            ({**graph, "nodes": graph["nodes"] * 5000}, "it has 25000 nodes"),
        ):
            drop(visit, wrong)
            visit.page.locator("#notice").get_by_text(words).wait_for()
            assert visit.page.is_visible(".welcome")
        links = [
            *graph["links"],
            {"source": "x", "target": "0_7_2", "weight": 1},
            {"source": "E_1_0", "target": "0_7_2", "weight": "1"},
        ]
        drop(visit, {**graph, "links": links})
        visit.page.wait_for_selector(".graph:visible")
        assert not visit.page.is_visible("#notice")
        drop(visit, "[]")
        visit.page.locator("#notice").get_by_text("no nodes").wait_for()
        assert visit.page.is_visible(".graph"), "what is shown stays"
        assert visit.said == []
