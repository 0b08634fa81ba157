"""The text of an answer as its tokens come: control tokens hidden, whole characters, stop strings held back.

The offline face (`kukri.llm`) and the server use the same `Answer`, so both end a text at the same place.
"""

from __future__ import annotations

from bisect import bisect_right

from kukri.dialects.answer_parser import AnswerBeginning
from kukri.engine import Request
from kukri.sampling import SampledToken
from kukri.tokenizer import StopStrings, TextStream, Tokenizer


class Answer:
    """The growing text of a request. Not thread-safe: one thread at a time pushes and takes.

    `index` is the place of the answer in its call. `continues` says that the text follows other text, so that
    a SentencePiece leading space is kept; `shown` are control tokens that are part of the text. With a
    `beginning` stop strings count from the end of the reasoning on, else from the first token.

    Attributes: n_tokens pushed; cumulative_logprob (nats) of these; finish_reason, None until the answer has
    ended, then "stop", "length", "abort" or "error"; stop_string, the one that ended it, or None;
    has_logprobs, True if the request asked for them.
    """

    __slots__ = (
        "_beginning", "_ends", "_ends_at", "_has_stops", "_min_tokens", "_n_decoded", "_n_shown", "_pending",
        "_pieces", "_stops", "_stream", "_undecoded", "cumulative_logprob", "finish_reason", "has_logprobs",
        "index", "n_tokens", "request", "stop_string",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer,
        *,
        continues: bool = False,
        shown: frozenset[int] = frozenset(),
        beginning: AnswerBeginning | None = None,
    ) -> None:
        self.request, self.index = request, index
        self.n_tokens = 0
        self.cumulative_logprob = 0.0  # the request may have computed tokens beyond a stop string
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self._stream = TextStream(tokenizer, continues=continues, shown=shown)
        self.has_logprobs = request.params.logprobs is not None
        self._has_stops = bool(request.params.stop_strings)
        self._min_tokens = request.params.min_tokens
        self._stops = StopStrings(request.params.stop_strings)
        self._beginning = beginning if self._has_stops else None
        self._undecoded: list[SampledToken] = []  # without stop strings, text is made when it is taken
        self._pieces: list[str] = []  # text not taken yet
        self._n_decoded = 0  # characters of all tokens
        self._n_shown = 0  # how many of these characters no stop string holds back
        self._pending: list[tuple[int, SampledToken]] = []  # (start of its text, token)
        self._ends: list[int] = []  # the end of each token's text, in characters
        self._ends_at: int | None = None  # the length of a text that a stop string cut

    def push(self, token: SampledToken | None, finish_reason: str | None) -> str | None:
        """Adds a step's output for the request; returns the stop string that it completed, or None."""
        stop = None
        if token is not None:
            self.n_tokens += 1
            self.cumulative_logprob += token.logprob or 0.0
            if finish_reason != "stop":  # a stop token is not part of the text
                if self._has_stops:
                    stop = self._add(token)
                else:
                    self._undecoded.append(token)
        if stop is not None:
            self.finish_reason = "stop"
        elif finish_reason is not None:
            self.finish_reason = finish_reason
            self._end()
        return stop

    def take_text(self) -> str:
        """Removes and returns the text since the last call."""
        self._decode()
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def take_tokens(self) -> list[tuple[int, SampledToken]]:
        """Removes and returns the tokens of the text taken so far: (start of its text, token) each.

        Only tokens with log-probabilities are kept for this.
        """
        self._decode()
        is_done = self.finish_reason is not None
        limit = self._ends_at if self._ends_at is not None else self._n_shown
        everything = is_done and self._ends_at is None
        n = len(self._pending) if everything else sum(start < limit for start, _ in self._pending)
        taken = self._pending[:n]
        self._pending = [] if is_done else self._pending[n:]
        return taken

    def n_tokens_within(self, n_characters: int) -> int:
        """Counts the tokens whose text ends within the first `n_characters`."""
        self._decode()
        return bisect_right(self._ends, n_characters)

    def _decode(self) -> None:
        """Decodes the tokens pushed since the last call."""
        for token in self._undecoded:
            self._add(token)
        self._undecoded.clear()

    def _add(self, token: SampledToken) -> str | None:
        text, stop = self._stream.push(token.id), None
        if token.logprob is not None:
            self._pending.append((self._n_decoded, token))
        self._n_decoded += len(text)
        self._ends.append(self._n_decoded)
        before = ""
        if self._beginning is not None:
            before, text = self._beginning.push(text)
        if self._has_stops and self.n_tokens >= self._min_tokens:
            text, stop = self._stops.push(text)
        self._show(before + text)
        if stop is not None:
            self._ends_at, self.stop_string = self._n_shown, stop
        return stop

    def _end(self) -> None:
        """Shows the text held back, up to a stop string that the last bytes may complete."""
        self._decode()
        text = self._stream.flush()
        if self._beginning is not None:
            before, text = self._beginning.push(text)
            more, after = self._beginning.flush()
            self._show(before + more)
            text += after
        text, stop = self._stops.push(text)
        self._show(text if stop is not None else text + self._stops.flush())
        if stop is not None:
            self._ends_at, self.finish_reason, self.stop_string = self._n_shown, "stop", stop

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._n_shown += len(text)
