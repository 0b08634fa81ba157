"""What gradients give: attribution patching, edges between heads, attribution graphs."""

from kukri.interp.gradients.attribution import (
    Metric,
    attribution_patch,
    by_torch,
    integrated_gradients,
    log_probability,
    logit_difference,
    run_with_gradients,
)

__all__ = [
    "Metric", "attribution_patch", "by_torch", "integrated_gradients", "log_probability", "logit_difference",
    "run_with_gradients",
]  # fmt: skip
