"""`kukri circuit`: the attribution graph of a prompt in a file."""

from __future__ import annotations

import json
from typing import Any

from kukri.errors import ConfigError
from kukri.host.files import write_text
from kukri.interp import plots
from kukri.interp.features.transcoders import Transcoders
from kukri.interp.plots.graph_page import add_written_tokens, graph_page
from kukri.llm import LLM
from kukri.terminal.options import CircuitOptions
from kukri.terminal.progress import counting_bar, loading_bar


def write_circuit(
    prompt: str, model: str | None, options: CircuitOptions, loading: dict[str, Any], *, as_json: bool
) -> None:
    """Write the graph of a prompt, and print its size. See `LLM.attribute`."""
    if options.transcoders is None or options.out is None:
        raise ConfigError("--transcoders and --out are required: --transcoders DIR --out graph.json")
    with loading_bar() as progress:
        llm = LLM(model, progress=progress, **loading)
    with llm, counting_bar("targets") as advance:
        transcoders = Transcoders.load(options.transcoders)
        graph = llm.attribute(
            prompt,
            transcoders,
            max_features=options.max_features,
            max_logits=options.max_logits,
            progress=advance,
        )
        ending = options.out.suffix.lower()

        def token_text(token: int) -> str:
            return llm.tokenizer.decode([token], continues=True)

        found = graph.as_json(token_text, options.out.stem, options.node_threshold, options.edge_threshold)
        if ending in (".png", ".svg"):
            plots.attribution_graph(found, options.out)
        else:
            add_written_tokens(llm.interp, transcoders, found, token_text)
            is_page = ending in (".html", ".htm")
            text = graph_page(found) if is_page else json.dumps(found, ensure_ascii=False)
            write_text(options.out, text)
    nodes, n_links = found["nodes"], len(found["links"])
    logits = [node["clerp"] for node in nodes if node["feature_type"] == "logit"]
    n_traced = len(graph.features)
    if as_json:
        counts = {"active_features": graph.n_active, "traced_features": n_traced}
        counts |= {"nodes": len(nodes), "links": n_links}
        print(json.dumps({"file": str(options.out), **counts, "logits": logits}, ensure_ascii=False))
        return
    print(f"{options.out}: {len(nodes):,} nodes and {n_links:,} links")
    print(f"{n_traced:,} of {graph.n_active:,} active features traced")
    print(", ".join(logits))
