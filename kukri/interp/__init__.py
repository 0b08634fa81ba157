"""Interpretability: TransformerLens' names, shapes and tools on the engine that serves, on packed weights.

Start at `LLM.run_with_cache`, which is `session.py`. The names, weights and values of hooks (`hooks/`) follow
from a trace of the model's own code (`models/trace.py`). `interventions/` has edits, captures and readouts as
data instead of code. `features/` reads probes, autoencoders and transcoders. `tapes/` runs a model with
gradients, from which `gradients/` computes estimates of patches and attribution graphs. `plots/` draws them.
`patching.py` sweeps patches, `store.py` stores the activations of many texts, and `images.py` runs prompts
with images.

`atp_star`, `control_vectors`, `edges`, `graph_effects` and `image_gradients` are the names by which users
import modules that have moved into folders.
"""

from kukri.interp.cache import ActivationCache
from kukri.interp.features.control_vectors import ControlVector
from kukri.interp.features.readers import Probe, SparseAutoencoder
from kukri.interp.hooks.listening import HookPoint
from kukri.interp.hooks.weights import Weights
from kukri.interp.interventions.intervention import Intervention
from kukri.interp.interventions.oracles import OracleForm
from kukri.interp.interventions.request_taps import Readout
from kukri.interp.session import Session

__all__ = [
    "ActivationCache", "ControlVector", "HookPoint", "Intervention", "OracleForm", "Probe", "Readout",
    "Session", "SparseAutoencoder", "Weights",
]  # fmt: skip
