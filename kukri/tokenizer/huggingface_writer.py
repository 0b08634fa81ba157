"""tokenizer.json and its companions for the tokenizer in a GGUF file."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import decoders

from kukri.errors import reading
from kukri.formats.gguf.reader import GGUFFile
from kukri.tokenizer.tokenizer import Tokenizer, ends
from kukri.tokenizer.vocabulary import FLAG_KEYS, SPACE_MARK, UNUSED, USER_DEFINED


def tokenizer_files(gguf: GGUFFile) -> dict[str, Any]:
    """The contents of each file by its name: objects for JSON, text for the chat template."""
    with reading(gguf.path):
        return _files(Tokenizer.from_gguf(gguf))


def _files(tokenizer: Tokenizer) -> dict[str, Any]:
    text, vocabulary = tokenizer.text, tokenizer.vocabulary
    made = json.loads(text.to_str())
    unused = {i for i, kind in enumerate(vocabulary.types) if kind == UNUSED}
    if vocabulary.kind == "t5":
        scores = [score for _, score in made["model"]["vocab"]]
        tokens = ["" if i in unused else token for i, token in enumerate(vocabulary.tokens)]
        made["model"]["vocab"] = list(zip(tokens, scores))
    else:
        made["model"]["vocab"] = {token: i for token, i in vocabulary.id_of.items() if i not in unused}
    defined = {i for i, kind in enumerate(vocabulary.types) if kind == USER_DEFINED}
    among_marks = vocabulary.kind == "llama" and not tokenizer.drops_leading_space
    made["added_tokens"] = [
        {
            **{"id": i, "content": vocabulary.tokens[i], "special": i in vocabulary.special_ids},
            **{name: i in vocabulary.flags.get(name, ()) for name in FLAG_KEYS},
            **({"normalized": True} if among_marks and i in defined else {}),
        }
        for i in sorted(vocabulary.special_ids | defined)
        if vocabulary.tokens[i]
    ]
    whole = tokenizers.Tokenizer.from_str(json.dumps(made))
    whole.decoder = decoders.ByteLevel() if vocabulary.kind == "gpt2" else _spaced(tokenizer)
    around = ends(tokenizer)
    if around is not None:
        whole.post_processor = around
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    named = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id, "unk_token": vocabulary.unk_id}
    settings |= {name: vocabulary.tokens[i] for name, i in named.items() if i is not None}
    files: dict[str, Any] = {
        "tokenizer.json": whole.to_str(),
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": sorted(vocabulary.eos_ids)},
    }
    if tokenizer.chat_template is not None:
        files["chat_template.jinja"] = tokenizer.chat_template
    return files


def _spaced(tokenizer: Tokenizer) -> Any:
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(
        [*steps, *([decoders.Strip(" ", 1, 0)] if tokenizer.drops_leading_space else [])]
    )
