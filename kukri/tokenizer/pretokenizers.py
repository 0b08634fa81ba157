"""Pre-tokenizers of byte-level BPE models, which cut text into words, by the name in `tokenizer.ggml.pre`.

The names are llama.cpp's, and so is what each stands for: src/llama-vocab.cpp at commit 00ad355e. Where
llama.cpp spells a model's pattern differently because its regex engine lacks classes or case folding, this is
the pattern of the model's own tokenizer.json (as in transformers 5.23,
integrations/gguf/gguf_tokenizer_mapping.py and models/{qwen2,qwen3_5,cohere,gpt_neox}), which is also where
the NFC flags come from.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

from kukri.dataclass import dataclass
from kukri.errors import UnsupportedError, brief

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

_DEEPSEEK_LETTERS = (  # as its tokenizer.json lists them: cased letters, as Unicode had them then
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370"
    "-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-"
    "\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-"
    "\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a"
    "-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-"
    "\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-"
    "\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-"
    "\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_PRE_TOKENIZERS: dict[tuple[str, ...], PreTokenizer] = {
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("gpt-2", "phi-2", "jais", "mellum", "trillion", "granite-docling"): PreTokenizer((_GPT2,)),
    ("mpt", "olmo"): PreTokenizer((_GPT2,), nfc=True),
    ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"): PreTokenizer((EACH_DIGIT, _GPT2)),
    ("command-r",): PreTokenizer((EACH_DIGIT, _GPT2), nfc=True),
    ("qwen2",): PreTokenizer((_QWEN2,), nfc=True),
    ("deepseek-r1-qwen", "megrez", "hunyuan", "bailingmoe", "bailingmoe2"): PreTokenizer((_QWEN2,)),
    ("qwen35",): PreTokenizer((_QWEN35,), nfc=True),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"): PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    ("glm4", "glm5"): PreTokenizer((_LLAMA3,), ignore_merges=True),
    ("tekken",): PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4"): PreTokenizer((_GPT4O,)),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("deepseek-llm",): PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-\ud7ff]+",
            EACH_DIGIT,
        )
    ),
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
        raise UnsupportedError(f"the pre-tokenizer {brief(name)} is not supported: use {known}")
    return PRE_TOKENIZERS[name]
