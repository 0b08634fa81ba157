"""See kukri.interp.gradients.atp_star."""

from kukri.interp.gradients.atp_star import *  # noqa: F403
