"""Pre-tokenizers of byte-level BPE models, which cut text into words, by the name in `tokenizer.ggml.pre`.

The names are llama.cpp's, and so is what each stands for: src/llama-vocab.cpp at commit 00ad355e. Where
llama.cpp spells a model's pattern differently because its regex engine lacks classes or case folding, this is
the pattern of the model's own tokenizer.json (as in transformers 5.23,
integrations/gguf/gguf_tokenizer_mapping.py and models/{qwen2,qwen3_5,cohere,gpt_neox}), which is also where
the NFC flags come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from kukri.errors import UnsupportedError

EACH_DIGIT = "each digit alone"  # not a pattern: the `Digits` step knows newer digits than the regex engine


@dataclass(frozen=True)
class PreTokenizer:
    """Cuts text into words: each pattern splits the pieces of the one before; the rest stays."""

    patterns: tuple[str, ...]
    nfc: bool = False  # text is brought to Unicode NFC first
    ignore_merges: bool = False  # a word that is a token is taken whole, even if no merges lead to it
    add_bos: bool = False  # whether prompts start with BOS when the file does not say

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The `tokenizers` object, ending in the byte alphabet."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Digits(individual_digits=True)
            if pattern is EACH_DIGIT
            else pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            for pattern in self.patterns
        ]
        return pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _LINES_AND_SPACES
_QWEN35 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _LINES_AND_SPACES
)
_LLAMA3 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _LINES_AND_SPACES
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _LINES_AND_SPACES
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    + rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _LINES_AND_SPACES
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    + r"| ?[\p{P}\p{S}]+[\r\n]*|"
    + _LINES_AND_SPACES
)

_PRE_TOKENIZERS: dict[tuple[str, ...], PreTokenizer] = {
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("gpt-2", "phi-2", "jais", "mellum", "trillion", "granite-docling"): PreTokenizer((_GPT2,)),
    ("mpt", "olmo"): PreTokenizer((_GPT2,), nfc=True),
    ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"): PreTokenizer((EACH_DIGIT, _GPT2)),
    ("command-r",): PreTokenizer((EACH_DIGIT, _GPT2), nfc=True),
    ("qwen2",): PreTokenizer((_QWEN2,), nfc=True),
    ("deepseek-r1-qwen", "megrez", "hunyuan"): PreTokenizer((_QWEN2,)),
    ("qwen35",): PreTokenizer((_QWEN35,), nfc=True),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"): PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    ("tekken",): PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4"): PreTokenizer((_GPT4O,)),
    ("deepseek-coder",): PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", EACH_DIGIT)
    ),
    ("deepseek-v3", "hunyuan-dense"): PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}
PRE_TOKENIZERS = {name: entry for names, entry in _PRE_TOKENIZERS.items() for name in names}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The entry for a name in `tokenizer.ggml.pre`; raises UnsupportedError listing the known names."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(f"the model wants the pre-tokenizer {name!r}; kukri knows {known}")
    return PRE_TOKENIZERS[name]
