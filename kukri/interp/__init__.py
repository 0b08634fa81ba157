"""Interpretability: TransformerLens' names, shapes and tools on the engine that serves, on packed weights.

Start at `LLM.run_with_cache`. A trace of the model's own code (`trace.py`) gives the names (`names.py`), the
weights (`weights.py`) and the values of names from what taps saw (`values.py`); `texts.py` runs whole texts,
`listening.py` calls hooks.
"""

from kukri.interp.cache import ActivationCache
from kukri.interp.listening import HookPoint
from kukri.interp.session import Session
from kukri.interp.weights import Weights

__all__ = ["ActivationCache", "HookPoint", "Session", "Weights"]
