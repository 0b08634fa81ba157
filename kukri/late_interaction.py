"""The name by which users import MaxSim: see kukri.tasks.late_interaction."""

from kukri.tasks.late_interaction import max_sim

__all__ = ["max_sim"]
