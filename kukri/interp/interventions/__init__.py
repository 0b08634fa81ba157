"""Edits, captures and readouts of a request's activations, said in data and not in code."""

from kukri.interp.interventions.intervention import Intervention

__all__ = ["Intervention"]
