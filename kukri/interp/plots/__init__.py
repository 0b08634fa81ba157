"""Pictures of activations and attribution graphs, as PNG, SVG and HTML pages."""

from kukri.interp.plots.figures import (
    Picture,
    attention_heads,
    attention_page,
    attention_text,
    attribution_graph,
    feature_timeline,
    heat_map,
    image_attention,
    logit_lens,
    require_format,
)

__all__ = [
    "Picture", "attention_heads", "attention_page", "attention_text", "attribution_graph", "feature_timeline",
    "heat_map", "image_attention", "logit_lens", "require_format",
]  # fmt: skip
