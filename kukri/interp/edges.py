"""See kukri.interp.gradients.edges."""

from kukri.interp.gradients.edges import *  # noqa: F403
