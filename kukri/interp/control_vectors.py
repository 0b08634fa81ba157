"""See kukri.interp.features.control_vectors."""

from kukri.interp.features.control_vectors import *  # noqa: F403
