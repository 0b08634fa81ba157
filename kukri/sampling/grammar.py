"""Constrained decoding: JSON of a schema, a regular expression, one of several strings, a grammar.

A `Grammar` is the constraint, `compiled` fits it to a model's tokens, and a `Matcher` follows one answer
and has the mask of the tokens allowed next. The automata come from llguidance, the package of the extra
`grammar`; it is imported when the first grammar is compiled.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol
from weakref import WeakKeyDictionary, WeakMethod

from kukri.dataclass import dataclass, field, replace
from kukri.errors import RequestError, UnsupportedError
from kukri.host.installed import needs_package
from kukri.sampling.closed_schema import closed
from kukri.sampling.schema_faults import faulty_place
from kukri.sampling.schema_limits import in_our_words, limited, rounded_number, unknown_formats

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

log = logging.getLogger("kukri.sampling")

MAX_CHARS = 1 << 18  # longest source of a grammar
# between the tokens of JSON: a space, or the end of a line and the next one's indent. A model that is unsure
# could continue with white space forever
_WHITE_SPACE = r"\x20|\x0A[\x20\x09]{0,32}"

Kind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Grammar:
    """A constraint on the text of an answer: use `json`, `regex`, `choice` or `text` to make one.

    `before` are rules in Lark's syntax of what comes before it, such as reasoning; their first is `before`.
    `param` is the field that errors name. Errors in the source show when it is compiled for a model.
    """

    kind: Kind
    source: str  # for json a schema, for choice a JSON list
    before: str = ""
    param: str = field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        """Raises RequestError if the source is too long."""
        if len(self.source) > MAX_CHARS:
            raise self.error(f"it must have at most {MAX_CHARS:,} characters")

    @classmethod
    def json(cls, schema: Mapping[str, Any] | None = None, *, param: str = "grammar") -> Grammar:
        """JSON that a schema accepts, with its properties in the schema's order; by default any object.

        Objects have only the properties that the schema names, unless it has `additionalProperties`.

        Raises RequestError if the schema is not a JSON object.
        """
        wanted = {"type": "object"} if schema is None else schema
        if not isinstance(wanted, Mapping):
            raise RequestError("a JSON schema must be an object", param=param, code="invalid_value")
        try:
            return cls("json", json.dumps(wanted, allow_nan=False), param=param)
        except (TypeError, ValueError, RecursionError):
            message = "a JSON schema must itself be JSON"
            raise RequestError(message, param=param, code="invalid_value") from None

    @classmethod
    def regex(cls, pattern: str, *, param: str = "grammar") -> Grammar:
        """A text that a regular expression matches from beginning to end."""
        return cls("regex", pattern, param=param)

    @classmethod
    def choice(cls, texts: Sequence[str], *, param: str = "grammar") -> Grammar:
        """One of several strings."""
        if not texts or isinstance(texts, str) or not all(isinstance(text, str) and text for text in texts):
            raise RequestError(
                "a choice must be a list of texts, not empty", param=param, code="invalid_value"
            )
        return cls("choice", json.dumps(list(texts)), param=param)

    @classmethod
    def text(cls, source: str, *, param: str = "grammar") -> Grammar:
        """A grammar written in Lark's syntax, or in llama.cpp's GBNF."""
        return cls("grammar", source, param=param)

    def error(self, reason: str) -> RequestError:
        """The error that says why the grammar cannot be served."""
        reason = " ".join(reason.split())
        return RequestError.of(self.param, f"cannot be used: {reason[:500]}", code="invalid_value")


class CompiledGrammar:
    """A grammar fitted to a model's tokens. `notes` say which of its demands are not enforced."""

    def __init__(self, grammar: Grammar, start: Any, n_vocab: int, notes: Sequence[str] = ()) -> None:
        self.grammar, self.notes = grammar, tuple(notes)
        self._start, self._n_vocab = start, n_vocab

    def matcher(self) -> Matcher:
        """A matcher for one answer."""
        return Matcher(self._start.deep_copy(), self._n_vocab)


class Matcher:
    """Goes along with one answer. `allowed` are the tokens that may come next: a bit each, in int32 words."""

    def __init__(self, automaton: Any, n_vocab: int) -> None:
        self._automaton = automaton
        import numpy as np  # here, as the command line reads this file at each start

        self.allowed: npt.NDArray[np.int32] = np.zeros(-(-n_vocab // 32), np.int32)
        self._address, self._n_bytes = self.allowed.__array_interface__["data"][0], self.allowed.nbytes

    def update(self) -> str:
        """Sets `allowed`: only end-of-text if nothing may follow. Returns an error message, or ""."""
        self._automaton.unsafe_compute_mask_ptr(self._address, self._n_bytes)
        return " ".join(self._automaton.get_error().split()) if self._automaton.is_error() else ""

    def accepts(self, token_id: int) -> bool:
        """True if the token is allowed next."""
        return bool(self._automaton.validate_tokens([token_id]))

    def take(self, token_id: int) -> None:
        """Advances by a token; one that was not allowed is an error at the next `update`."""
        self._automaton.consume_token(token_id)


class GrammarTokenizer(Protocol):
    """The methods of a tokenizer that grammars need."""

    n_vocab: int
    eos_ids: frozenset[int]
    special_ids: frozenset[int]

    def encode_inside(self, text: str) -> list[int]:
        """The token ids of a text in the middle of another."""

    def token_bytes(self, token_id: int) -> bytes:
        """The text of a token, in UTF-8."""


def compiled(grammar: Grammar, tokenizer: GrammarTokenizer) -> CompiledGrammar:
    """The grammar over a tokenizer's tokens. Safe to call from any thread.

    Raises RequestError, naming the grammar's `param`, if the source is wrong or needs what cannot be
    enforced, and UnsupportedError if llguidance is not installed.
    """
    llguidance = _llguidance()
    tokens = _tokens_of(tokenizer, grammar)
    try:
        wrong, messages = _fault(grammar, tokens, llguidance)
        source = _source(grammar, llguidance)
    except (ValueError, RecursionError) as error:
        raise grammar.error(str(error)) from None
    if wrong:
        raise grammar.error(f"{_place(grammar, tokens, llguidance)}{wrong}")
    start = llguidance.LLMatcher(tokens, source, log_level=0)
    if start.is_error():
        raise grammar.error(start.get_error())
    if grammar.kind == "json":
        messages += unknown_formats(json.loads(grammar.source))
    return CompiledGrammar(grammar, start, tokenizer.n_vocab, messages)


def _fault(grammar: Grammar, tokens: Any, llguidance: Any) -> tuple[str, list[str]]:
    """Return the fault of a grammar, "" without a fault, and the parts that are not enforced."""
    if grammar.kind == "json" and (reason := rounded_number(json.loads(grammar.source))):
        return reason, []
    source = _source(grammar, llguidance)
    is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source, tokens)
    return (in_our_words(messages[0]), []) if is_wrong else ("", messages)


def _place(grammar: Grammar, tokens: Any, llguidance: Any) -> str:
    """The place in a JSON schema that is at fault, as the beginning of a message; "" without one."""
    if grammar.kind != "json":
        return ""

    def is_good(part: Mapping[str, Any]) -> bool:
        return not _fault(replace(grammar, source=json.dumps(part), before=""), tokens, llguidance)[0]

    place = faulty_place(json.loads(grammar.source), is_good)
    return f"at {place}: " if place else ""


def json_rule(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """JSON that a schema accepts, as the body of a rule in Lark's syntax.

    If `lenient`, keywords that cannot be enforced are left out, where they would be errors.
    """
    if lenient and (reason := rounded_number(schema)):
        log.warning("a tool's schema is enforced only in part: %s", reason)
    return f"%json {json.dumps(_with_options(schema, lenient=lenient))}"


def lark_string(text: str) -> str:
    """A text as Lark's syntax quotes it."""
    return json.dumps(text, ensure_ascii=False)


def lark_error(rules: str) -> str:
    """What is wrong with a grammar in Lark's syntax; "" if nothing is."""
    source = json.dumps({"grammars": [{"lark_grammar": rules}]})
    is_wrong, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(source, None)
    return in_our_words(messages[0]) if is_wrong else ""


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UnsupportedError(needs_package("a grammar", "llguidance", "grammar")) from None
    return llguidance


def _source(grammar: Grammar, llguidance: Any) -> str:
    """The grammar in llguidance's form."""
    body = _body(grammar, llguidance)
    if not grammar.before:
        return json.dumps({"grammars": [body]})
    rules = f"start: before @answer\n{grammar.before}\n"
    return json.dumps({"grammars": [{"lark_grammar": rules}, {"name": "answer", **body}]})


def _body(grammar: Grammar, llguidance: Any) -> dict[str, Any]:
    if grammar.kind == "json":
        return {"json_schema": _with_options(json.loads(grammar.source))}
    if grammar.kind == "regex":
        return {"lark_grammar": f"start: /{llguidance.regex_to_lark(grammar.source, '')}/"}
    if grammar.kind == "choice":
        return {"lark_grammar": "start: " + " | ".join(map(lark_string, json.loads(grammar.source)))}
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return {"lark_grammar": any_to_lark(grammar.source)}
    except Exception as error:  # it has errors of its own, and fails in other ways
        raise ValueError(f"it is neither Lark nor GBNF: {error}") from None


def _with_options(schema: Mapping[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {"whitespace_pattern": _WHITE_SPACE}
    if lenient:
        options |= {"lenient": True, "coerce_one_of": True}
    return {**limited(closed(schema), lenient=lenient), "x-guidance": options}


_TOKENS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # llguidance's form of a vocabulary
_TOKENS_LOCK = threading.Lock()


def _tokens_of(tokenizer: GrammarTokenizer, grammar: Grammar) -> Any:
    if not tokenizer.eos_ids:
        raise grammar.error("the model has no token that ends a text")
    with _TOKENS_LOCK:
        tokens = _TOKENS.get(tokenizer)
        if tokens is None:
            tokens = _TOKENS[tokenizer] = _make_tokens(tokenizer)
    return tokens


def _make_tokens(tokenizer: GrammarTokenizer) -> Any:
    llguidance = _llguidance()
    eos_ids = sorted(tokenizer.eos_ids)
    specials = tokenizer.special_ids | tokenizer.eos_ids
    encode = WeakMethod(tokenizer.encode_inside)  # what is kept for a tokenizer must not keep the tokenizer

    vocabulary = tuple(tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab))
    ids_of_bytes = {text[0]: i for i, text in enumerate(vocabulary) if len(text) == 1 and i not in specials}

    class Vocabulary:
        """The tokenizer in the form that llguidance needs."""

        eos_token_id, bos_token_id = eos_ids[0], None
        tokens = vocabulary
        special_token_ids = tuple(sorted(specials))

        def __call__(self, text: bytes | str) -> list[int]:
            """The token ids of a text, which spell exactly that; of a part of a character, its bytes'."""
            data = text.encode() if isinstance(text, str) else text
            method = encode()
            assert method is not None, "the tokenizer is in use"
            ids = method(data.decode("utf-8", "replace"))
            if b"".join(self.tokens[i] for i in ids) == data:
                return ids
            return [ids_of_bytes[byte] for byte in data if byte in ids_of_bytes]

    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(Vocabulary()), n_vocab=tokenizer.n_vocab, eos_token=eos_ids
    )
