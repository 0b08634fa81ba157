"""Tiny random Whisper models as transformers saves them, with a tokenizer of bytes and Whisper's tokens."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as tk

from kukri.sound.bounds import RATE
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch
    import transformers as tr

LANGUAGES = ("en", "de", "fr")
CONTROLS = (
    *("<|endoftext|>", "<|startoftranscript|>", *(f"<|{name}|>" for name in LANGUAGES)),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"),
    "<|notimestamps|>",
)
N_ROWS = 50  # of a window, which lasts a second
TIMES = tuple(f"<|{i * 0.02:.2f}|>" for i in range(N_ROWS + 1))
N_BYTES = 256
N_VOCAB = N_BYTES + len(CONTROLS) + len(TIMES)


def tokenizer():
    """A token for each byte, then Whisper's."""
    symbols = sorted(tk.pre_tokenizers.ByteLevel.alphabet())
    inner = tk.Tokenizer(tk.models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    inner.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tk.decoders.ByteLevel()
    inner.add_special_tokens([tk.AddedToken(text, special=True) for text in CONTROLS])
    around = [(text, inner.token_to_id(text)) for text in (*CONTROLS[:2], CONTROLS[-1])]
    inner.post_processor = tk.processors.TemplateProcessing(
        "<|startoftranscript|> <|notimestamps|> $A <|endoftext|>", None, around
    )
    inner.add_tokens([tk.AddedToken(text, special=False) for text in TIMES])
    return tr.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=CONTROLS[0])


def id_of(text: str) -> int:
    """The id of one of Whisper's tokens."""
    return N_BYTES + (*CONTROLS, *TIMES).index(text)


def tiny_config(**changes):
    """Every size another, on a window of one second."""
    sizes = {
        **{"vocab_size": N_VOCAB, "num_mel_bins": 80, "d_model": 64, "max_source_positions": N_ROWS},
        **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96},
        **{"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 160},
        "max_target_positions": 64,
    }
    ids = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256, "decoder_start_token_id": 257}
    return tr.WhisperConfig(**{**sizes, **ids, **changes})


def tiny_model(seed=0, **changes):
    """A random model whose answers depend on the sound."""
    torch.manual_seed(seed)
    model = tr.WhisperForConditionalGeneration(tiny_config(**changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif parameter.ndim > 1 and "embed_positions" not in name:
                parameter.normal_(0, 0.12)
            elif parameter.ndim > 1 and "decoder" in name:
                parameter.normal_(0, 0.1)
    settings = model.generation_config
    settings.lang_to_id = {f"<|{name}|>": id_of(f"<|{name}|>") for name in LANGUAGES}
    settings.task_to_id = {name: id_of(f"<|{name}|>") for name in ("translate", "transcribe")}
    settings.is_multilingual, settings.no_timestamps_token_id = True, id_of("<|notimestamps|>")
    settings.suppress_tokens = [10, 11, *(id_of(name) for name in CONTROLS[1:])]
    settings.begin_suppress_tokens = [32, id_of("<|endoftext|>")]
    settings.max_initial_timestamp_index = 25
    settings.return_timestamps, settings.max_length = False, 64
    settings.prev_sot_token_id = id_of("<|startofprev|>")
    settings.eos_token_id, settings.decoder_start_token_id = 256, 257
    return model


def save_tiny(directory: Path, model: Any) -> Path:
    """The directory of a model."""
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def noise(seconds: float, seed: int = 0) -> Any:
    """A tone that rises, in noise."""
    random, n = np.random.default_rng(seed), int(seconds * RATE)
    tone = np.sin(np.arange(n) ** 1.2 * (0.01 + 0.02 * seed)) * 0.4
    return (tone + random.normal(0, 0.05, n)).astype(np.float32)


def save_noise(path: Path, seed: int = 0, seconds: float = 0.8) -> Path:
    """A WAV file, of less than a window unless it is told."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((noise(seconds, seed) * 20_000).astype("<i2").tobytes())
    return path
