"""Odd but legal configurations of the families that kukri has, compared with transformers.

`python -m tests.models.odd_configurations [KIND …]` prints what became of each case that is not right, and
the share of cases that are.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kukri.errors import FormatError, KukriError, UnsupportedError
from tests.lazy_imports import lazy_imports
from tests.test_llm_safetensors import RUN, TINY, byte_tokenizer, config_of, exact_logits, theirs

with lazy_imports():
    import torch
    import transformers as tr

PER_KIND = 18  # cases
N_TOKENS = 24
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu", "sigmoid", "tanh")
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
)  # fmt: skip
# Fields that are left out, and why
LEFT_OUT = {
    "is no fact of the model": """
        architectures model_type transformers_version dtype torch_dtype name_or_path return_dict
        output_hidden_states output_attentions output_router_logits problem_type id2label label2id num_labels
        use_cache chunk_size_feed_forward is_encoder_decoder auto_map attn_implementation
        experts_implementation use_mamba_kernels pretraining_tp tokenizer_class prefix task_specific_params
        cross_attention_hidden_size use_bidirectional num_logits_to_keep use_kernel_forward_from_hub
        logits_to_keep mamba_chunk_size chunk_size
    """,
    "is for training alone": """
        initializer_range attention_dropout hidden_dropout hidden_dropout_prob embd_pdrop resid_pdrop
        residual_dropout embedding_dropout classifier_dropout router_jitter_noise router_aux_loss_coef
        aux_loss_alpha seq_aux input_jitter_noise attention_probs_dropout_prob output_dropout expert_dropout
        activation_dropout mlp_dropout layerdrop rescale_prenorm_residual time_step_min time_step_max
        time_step_init_scheme time_step_scale z_loss_coefficient
    """,
    "is about tokens": """
        pad_token_id bos_token_id eos_token_id sep_token_id decoder_start_token_id image_token_id
        audio_token_id vocab_size
    """,
    "is a limit that these texts do not reach": "max_position_embeddings model_max_length",
    "makes other files, not another model": "quantization_config",
}
_NAMES = {name for names in LEFT_OUT.values() for name in names.split()}


class Case(NamedTuple):
    """One field of a kind's configuration with another value."""

    kind: str
    field: str
    value: Any

    def __str__(self) -> str:
        return f"{self.kind}: {self.field} = {self.value!r}"


class Outcome(NamedTuple):
    """What became of a case: "right", "refused", "wrong", "crashed", or "not run" by transformers itself."""

    what: str
    why: str = ""


def cases(kind: str, n: int = PER_KIND) -> list[Case]:
    """The cases of a kind, drawn by its name."""
    config_class, facts = config_of(kind)
    config = config_class(**{**TINY, **facts})
    defaults = config_class().to_dict()
    found = [
        Case(kind, name, value)
        for name, own in sorted(config.to_dict().items())
        if name not in _NAMES and not name.startswith("_")
        for value in _near(name, own, defaults.get(name))
    ]
    Random(kind).shuffle(found)
    by_field: dict[str, list[Case]] = {}
    for case in found:
        by_field.setdefault(case.field, []).append(case)
    in_turn = [case for turn in range(8) for its in by_field.values() for case in its[turn : turn + 1]]
    return in_turn[:n]


def _near(name: str, own: Any, default: Any) -> Iterator[Any]:
    """Values next to a field's own, odd ones, and the default of its class."""
    values: list[Any] = []
    if isinstance(own, bool):
        values = [not own]
    elif isinstance(own, int):
        values = [own + 1, own - 1, 2 * own, 1]
    elif isinstance(own, float):
        values = [1.5 * own, 0.5, 1.0, 0.0]
    elif isinstance(own, str):
        values = list(ACTIVATIONS) if own in ACTIVATIONS or "act" in name else []
    elif own is None:
        values = [True, 3, 0.5]
    elif name == "rope_parameters" and "rope_type" in own:
        values = [{**own, **more} for more in ROPES]
    elif isinstance(own, list) and own:
        values = [own[::-1], own[1:] + own[:1], [own[0]] * len(own), [own[-1]] * len(own)]
    is_small = not isinstance(default, int) or isinstance(default, bool) or abs(default) <= 256
    if is_small and not isinstance(default, dict | list):
        values.append(default)
    seen: list[Any] = [own]
    for value in values:
        if not any(value == one and type(value) is type(one) for one in seen):
            seen.append(value)
            yield value


def outcome(case: Case, directory: Path) -> Outcome:
    """Makes a case's model by transformers, and compares the logits of a text."""
    try:
        model = _made(case, directory)
        ids = np.random.default_rng(0).integers(0, 256, N_TOKENS).tolist()
        want = theirs(model, ids)
        assert np.isfinite(want).all()
    except Exception as error:
        return Outcome("not run", f"{type(error).__name__}: {error}")
    try:
        found = exact_logits(
            directory, ids, N_TOKENS
        )  # transformers has longrope's factors by the text's length
        assert found.shape == want.shape, f"logits {found.shape} where transformers has {want.shape}"
    except (FormatError, UnsupportedError, KukriError) as error:
        return Outcome("refused", str(error).replace(str(directory), "").lstrip("/: "))
    except Exception as error:
        return Outcome("crashed", f"{type(error).__name__}: {error}")
    most = float(np.abs(found - want).max())
    if most > 1e-4:  # which of both has rounded more
        want = theirs(model.double(), ids)
        most = float(np.abs(found - want).max())
    limit = 2e-4 * max(1.0, float(np.abs(want).max()) / 7)
    return Outcome("right") if most <= limit else Outcome("wrong", f"logits are {most:.2g} off")


def _made(case: Case, directory: Path) -> Any:
    config_class, facts = config_of(case.kind)
    torch.manual_seed(3)
    config = config_class(**{**TINY, **facts, case.field: case.value})
    model = tr.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )  # kernels for grouped products take no float64 and no odd widths
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "act_fn" in name or name.endswith("scale"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.float().eval().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return model


def main(kinds: Sequence[str]) -> None:
    """Prints the cases that are not right, and counts."""
    tr.logging.set_verbosity_error()
    tr.logging.disable_progress_bar()
    counts: Counter[str] = Counter()
    for kind in kinds or RUN:
        for case in cases(kind):
            with tempfile.TemporaryDirectory() as folder:
                found = outcome(case, Path(folder))
            counts[found.what] += 1
            if found.what not in ("right", "not run"):
                print(f"{found.what}: {case}: {found.why}"[:300], flush=True)
    n_run = sum(counts.values()) - counts["not run"]
    share = counts["right"] / n_run
    print(f"{sum(counts.values())} cases, {n_run} run by transformers: {dict(counts)}, right {share:.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
