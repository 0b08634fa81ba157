"""See kukri.interp.gradients.image_gradients."""

from kukri.interp.gradients.image_gradients import *  # noqa: F403
