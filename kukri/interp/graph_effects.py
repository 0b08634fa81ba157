"""See kukri.interp.gradients.graph_effects."""

from kukri.interp.gradients.graph_effects import *  # noqa: F403
