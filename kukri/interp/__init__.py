"""Interpretability: TransformerLens' names, shapes and tools on the engine that serves, on packed weights.

Start at `LLM.run_with_cache`. A trace of the model's own code (`trace.py`) gives the names (`names.py`), the
weights (`weights.py`) and the values of names from what taps saw (`values.py`); `texts.py` runs whole texts,
`listening.py` calls hooks. `interventions.py` has edits, captures and readouts that are data, not code, at
the places of `places.py`; `catalog.py` has what they use by name, `edits.py` what they do to rows.
`circuits.py` makes attribution graphs over the features of `transcoders.py`, `graph_effects.py` measures what
interventions on their nodes do, `oracles.py` asks a model about activations. `images.py` runs prompts with
images, and shows the encoder that reads these.
"""

from kukri.interp.cache import ActivationCache
from kukri.interp.control_vectors import ControlVector
from kukri.interp.generation import Readout
from kukri.interp.interventions import Intervention
from kukri.interp.listening import HookPoint
from kukri.interp.oracles import OracleForm
from kukri.interp.readers import Probe, SparseAutoencoder
from kukri.interp.session import Session
from kukri.interp.weights import Weights

__all__ = [
    "ActivationCache", "ControlVector", "HookPoint", "Intervention", "OracleForm", "Probe", "Readout",
    "Session", "SparseAutoencoder", "Weights",
]  # fmt: skip
