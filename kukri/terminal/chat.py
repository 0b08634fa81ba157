"""`kukri chat`: a conversation in a terminal.

Ctrl-C stops the answer and keeps the conversation; Ctrl-D leaves. Lines that start with / are commands.
"""

from __future__ import annotations

import base64
import mimetypes
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from kukri.calls.results import Chunk, Result
from kukri.calls.system_message import DEFAULT_SYSTEM, opening
from kukri.errors import ConfigError, ContextLengthError, KukriError, RequestError, printable
from kukri.host.typed_input import drop_typed, has_typed, input_again, line_editing, marks_pastes, no_echo
from kukri.llm import LLM
from kukri.sampling import SamplingParams
from kukri.terminal.answer_writer import AnswerWriter
from kukri.terminal.clipboard import copy
from kukri.terminal.errors import one_line
from kukri.terminal.output import allow_any_text, describe_timings
from kukri.terminal.progress import loading_bar
from kukri.terminal.remote_model import RemoteModel
from kukri.terminal.saved_chat import Message, SavedChat, last_chat, read_chat, write_chat
from kukri.tokenizer.template_process import start_early
from kukri.vision.decode import file_bytes

PROMPT, CONTINUED = "> ", ". "
BLOCK = '"""'
LEAVING = ("/exit", "/quit")
PASTE_S = 0.05  # the longest pause within a paste
MAX_TOKENS = 1024


def talk(
    *,
    model: str | None,
    system: str,
    sampling: dict[str, Any],
    loading: dict[str, Any],
    resumes: bool = False,
    interventions: Sequence[Mapping[str, Any]] = (),
    url: str | None = None,
    api_key: str | None = None,
    hides_reasoning: bool = False,
) -> None:
    """Holds a conversation on stdin and stdout until Ctrl-D or /exit.

    `sampling` are fields of SamplingParams on top of the model's defaults, `loading` are options of LLM; of
    several adapters the first answers until another is chosen. `interventions` are as in `LLM.stream`. The
    conversation is saved after each answer; with `resumes` it continues the last one, with its model and
    saved prefix unless others are given. Raises RequestError if there is none. With a `url` a server
    answers, and the conversation is saved by /save alone. With `hides_reasoning` answers alone are shown.
    """
    given = {"max_tokens": MAX_TOKENS, **sampling}
    SamplingParams(**given)
    allow_any_text()
    resumed = _last_chat() if resumes else None
    if url is not None and (loading or interventions):
        named = ", ".join(loading) or "control vectors"
        raise ConfigError(f"--url cannot be combined with {named}: the server has its own options")
    if url is None:
        start_early()
        if resumed is not None:
            model = resumed.path if model is None else model
            if resumed.prefix_dir is not None:
                loading = {"prefix_dir": resumed.prefix_dir, **loading}

    def opened(name: str | None) -> tuple[LLM | RemoteModel, SamplingParams]:
        if url is not None:
            return RemoteModel(url, api_key, name, given), SamplingParams(**given)
        llm = _opened(name, loading)
        return llm, llm.default_params.replace(**given)

    llm, params = opened(model)
    messages = [] if resumed is None else resumed.messages
    if resumed is None and isinstance(llm, LLM):
        messages = opening(llm.chat_template, system)
    adapter = next(iter(loading.get("adapters", {})), None)
    own_copy = last_chat() if url is None else None
    chat = Chat(llm, params, messages, own_copy, adapter, interventions, opened, hides_reasoning)
    if system not in ("", DEFAULT_SYSTEM) and (resumed is not None or url is not None):
        chat.set_system(system)
    _converse(chat, resumed)


def _opened(name: str | None, loading: dict[str, Any]) -> LLM:
    """The model. Raises RequestError if it has no chat template."""
    with loading_bar() as progress:
        llm = LLM(name, progress=progress, fit=True, **loading)
    try:
        llm.calls.check_generates()
        if llm.chat_template.source is None:
            raise RequestError(
                f"{llm.path.name} does not support chat, as it has no chat template: continue a text "
                'with `kukri run -m MODEL --raw "…"`, or use the instruct version'
            )
    except KukriError:
        llm.close()
        raise
    return llm


def _converse(chat: Chat, resumed: SavedChat | None) -> None:
    """Read lines until Ctrl-D or /exit, and close the model."""
    try:
        with _line_editing():
            if resumed is not None:
                print(f"(resumed a conversation of {len(resumed.messages)} messages)")
            if sys.stdin.isatty():
                print(printable(chat.llm.path.stem))
                print("/help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.")
            while (text := read_message()) is not None:
                if not chat.take(text):
                    break
    finally:
        chat.llm.close()


class Chat:
    """A conversation and its commands. `messages` holds the system message, if any, first.

    After each answer it is saved in `own_copy`, unless that is None. `open_model` opens another model by its
    name, for /model. The chat closes the one that it leaves.
    """

    def __init__(
        self,
        llm: LLM | RemoteModel,
        params: SamplingParams,
        messages: Sequence[Message] = (),
        own_copy: Path | None = None,
        adapter: str | None = None,
        interventions: Sequence[Mapping[str, Any]] = (),
        open_model: Callable[[str | None], tuple[LLM | RemoteModel, SamplingParams]] | None = None,
        hides_reasoning: bool = False,
    ) -> None:
        self._open_model, self._hides_reasoning = open_model, hides_reasoning
        self.llm, self.params, self.adapter, self._own_copy = llm, params, adapter, own_copy
        self.interventions = interventions
        self.messages: list[Message] = list(messages)
        self.last: Result | None = None
        self.images: list[Message] = []  # parts of the next message
        self.own_file: Path | None = None  # saved or loaded before, so that /save may overwrite it

    def take(self, text: str) -> bool:
        """Runs a command or answers a message. Returns False to leave."""
        if not text.strip():
            return True
        if "\n" not in text and text.startswith("//"):
            text = text[1:]
        elif _is_command(text):
            return self._command(text)
        try:
            self.answer(text)
        except KukriError as error:
            print(f"error: {self._explain(error)}")
        return True

    def answer(self, text: str) -> None:
        """Prints the model's answer and keeps both in the conversation. On an error nothing is kept."""
        images, self.images = self.images, []
        content = [*images, {"type": "text", "text": text}] if images else text
        self._answer([*self.messages, {"role": "user", "content": content}])

    def _answer(self, messages: list[Message]) -> None:
        """Prints the answer to these messages, which become the conversation with it."""
        pieces: list[Chunk] = []
        result = None
        writer = AnswerWriter(shows_reasoning=not self._hides_reasoning, has_markdown=True)
        with _no_echo(), _interrupts() as interrupted:
            stream = self.llm.stream(
                messages, self.params, adapter=self.adapter, interventions=self.interventions
            )
            for chunk in stream:
                pieces.append(chunk)
                writer.push(chunk)
                result = chunk.result
                if interrupted():
                    break
            close = getattr(stream, "close", None)
            if close is not None:
                close()
        writer.end(2)
        if result is None:
            print("(stopped)")
        else:
            self.last = result
            self._note_length(result)
        answer = "".join(piece.text for piece in pieces)
        reasoning = "".join(piece.reasoning for piece in pieces)
        if answer or reasoning:
            # the template decides whether the next prompt shows it
            thoughts = {"reasoning_content": reasoning} if reasoning else {}
            self.messages = [*messages, {"role": "assistant", "content": answer, **thoughts}]
            self._keep()

    def _keep(self) -> None:
        """Saves the conversation, to be resumed. A disk that is full does not end it."""
        if self._own_copy is not None:
            with suppress(OSError, RequestError):
                self._own_copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_chat(self._own_copy, self._saved(), replaces=True)

    def _saved(self) -> SavedChat:
        """The conversation that a file holds."""
        prefix_dir = self.llm.options.prefix_dir
        return SavedChat(
            self.messages,
            name=self.llm.config.name,
            path=str(self.llm.path.resolve()),
            prefix_dir=None if prefix_dir is None else str(Path(prefix_dir).expanduser().resolve()),
        )

    def _note_length(self, result: Result) -> None:
        if result.finish_reason != "length":
            return
        n_tokens = result.timings.n_prompt_tokens + result.timings.n_generated
        if n_tokens >= self._max_context:
            print(f"(the context of {self._max_context} tokens is full: /reset starts over)")
        else:
            print(f"(stopped after {result.timings.n_generated} tokens: raise --max-tokens)")

    @property
    def _max_context(self) -> int:
        """Tokens of the longest conversation."""
        own = self.llm.config.max_context
        return min(own, self.llm.engine_config.max_context or own)

    @property
    def system(self) -> str | None:
        """The system message's text."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    def set_system(self, text: str) -> None:
        """Replaces the system message; the rest of the conversation stays."""
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = [{"role": "system", "content": text}, *rest]

    def _explain(self, error: KukriError) -> str:
        if isinstance(error, ContextLengthError):
            return (
                f"the conversation has {error.n_tokens} tokens and the context holds {error.max_context}: "
                "/reset forgets it, /save keeps it first"
            )
        return one_line(error)

    def _command(self, text: str) -> bool:
        """Runs a / command. False to leave."""
        name, argument = [*text.split(maxsplit=1), ""][:2]
        if name in LEAVING:
            return False
        if name not in COMMANDS:
            print(
                f"error: the command {name!r} is not supported: /help lists commands (// starts a message "
                "with a /)"
            )
            return True
        try:
            COMMANDS[name][0](self, argument.strip())
        except KukriError as error:
            print(f"error: {one_line(error)}")
        except OSError as error:
            print(f"error: {error.filename}: {error.strerror}")
        return True

    def show_help(self, _: str) -> None:
        """Lists the commands."""
        for name, (_run, arguments, what) in COMMANDS.items():
            print(f"{name + ' ' + arguments:<16}{what}")
        print(f"{'/exit':<16}leave, as Ctrl-D does")
        print(f"{BLOCK:<16}starts and ends a message of several lines, or paste them, or end lines with a \\")

    def show_or_set_system(self, text: str) -> None:
        """Shows the system message, or replaces it."""
        if text:
            self.set_system(text)
        print("no system message" if self.system is None else f"system: {self.system}")

    def reset(self, _: str) -> None:
        """Forgets everything but the system message."""
        self.messages = self.messages[:1] if self.system is not None else []
        self.last, self.images = None, []
        print("(forgotten)")

    def save(self, name: str) -> None:
        """Writes the conversation as JSON. Does not replace a file that is not its own."""
        path = _path(name, "/save")
        write_chat(path, self._saved(), replaces=path == self.own_file)
        self.own_file = path
        print(f"(saved {len(self.messages)} messages to {path})")

    def load(self, name: str) -> None:
        """Continues a saved conversation."""
        path = _path(name, "/load")
        loaded = read_chat(path)
        self.messages, self.own_file = loaded.messages, path
        print(f"(loaded {len(self.messages)} messages from {path})")
        if loaded.prefix_dir is not None and self.llm.options.prefix_dir is None:
            print(f"(--prefix-dir {loaded.prefix_dir} has what it computed)")

    def show_or_choose_adapter(self, name: str) -> None:
        """Shows the adapter and the available ones, or chooses one; `off` for no adapter."""
        if name and name != "off" and name not in self.llm.adapters:
            known = ", ".join(self.llm.adapters) or "none: start with --adapter NAME=PATH"
            raise RequestError(f"the adapter {name!r} was not found: {known}")
        if name:
            self.adapter = None if name == "off" else name
        print(f"adapter: {self.adapter or 'off'}")

    def add_image(self, name: str) -> None:
        """Shows an image to the model with the next message; several come in order."""
        path = _path(name, "/image")
        data = file_bytes(path, "/image")
        kind = mimetypes.guess_type(path)[0] or "image/png"
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        self.images.append({"type": "image_url", "image_url": {"url": url}, "param": f"/image {path}"})
        print(f"({path.name} goes with the next message)")

    def show_stats(self, _: str) -> None:
        """Shows counts and speeds of the last answer."""
        if self.last is None:
            print("nothing has been answered yet")
            return
        timings, most = self.last.timings, self._max_context
        n_tokens = timings.n_prompt_tokens + timings.n_generated
        limit = "" if most >= 1 << 62 else f" of {most}"
        print(f"{describe_timings(timings)} · context {n_tokens}{limit} tokens")

    def show_or_choose_model(self, name: str) -> None:
        """Shows the model and others that it can be changed to, or changes it; the conversation stays."""
        if name and self._open_model is not None:
            llm, params = self._open_model(name)
            self.llm.close()
            self.llm, self.params, self.adapter = llm, params, next(iter(llm.adapters), None)
        print(f"model: {printable(self.llm.path.stem)}")
        if not name:
            others = self.llm.names() if isinstance(self.llm, RemoteModel) else _cached_names()
            print(f"others: {printable(', '.join(others))}")

    def regenerate(self, _: str) -> None:
        """Answers the last message again."""
        self._answer(self.messages[: self._last_question() + 1])

    def edit(self, text: str) -> None:
        """Answers another message in the place of the last one, typed over it if none is given."""
        i = self._last_question()
        content = self.messages[i]["content"]
        images = [part for part in content if "text" not in part] if isinstance(content, list) else []
        text = text or read_again(content[-1]["text"] if isinstance(content, list) else content)
        if text.strip():
            edited = [*images, {"type": "text", "text": text}] if images else text
            self._answer([*self.messages[:i], {"role": "user", "content": edited}])

    def copy(self, _: str) -> None:
        """Copies the last answer to the clipboard."""
        answers = [m["content"] for m in self.messages if m["role"] == "assistant"]
        if not answers:
            raise RequestError("/copy requires an answer")
        print(f"(copied {len(answers[-1])} characters by {copy(answers[-1])})")

    def _last_question(self) -> int:
        """The place of the user's last message. Raises RequestError if there is none."""
        places = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            raise RequestError("this requires a message")
        return places[-1]


COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str, str]] = {
    "/help": (Chat.show_help, "", "this list"),
    "/system": (Chat.show_or_set_system, "[TEXT]", "show the system message, or set it"),
    "/reset": (Chat.reset, "", "forget the conversation, except the system message"),
    "/save": (Chat.save, "FILE", "write the conversation to a JSON file"),
    "/load": (Chat.load, "FILE", "continue a saved conversation"),
    "/image": (Chat.add_image, "FILE", "show an image with the next message"),
    "/adapter": (Chat.show_or_choose_adapter, "[NAME]", "show the LoRA adapter, or choose one; off for none"),
    "/model": (Chat.show_or_choose_model, "[NAME]", "show the model, or continue with another"),
    "/regenerate": (Chat.regenerate, "", "answer the last message again"),
    "/edit": (Chat.edit, "[TEXT]", "change the last message, and answer that"),
    "/copy": (Chat.copy, "", "copy the last answer to the clipboard"),
    "/stats": (Chat.show_stats, "", "counts and speeds of the last answer"),
}


def _is_command(text: str) -> bool:
    """Return whether a text is a command. Several lines are one only if its argument is a text."""
    if not text.startswith("/") or "\n" not in text:
        return text.startswith("/")
    return COMMANDS.get(text.split(maxsplit=1)[0], ("", "", ""))[1] == "[TEXT]"


def _cached_names() -> list[str]:
    from kukri.formats.model_cache import cached_models

    return [model.name for model in cached_models()]


def read_again(text: str) -> str:
    """A message that was typed, typed over; "" if it cannot be. Raises RequestError without a terminal."""
    if not sys.stdin.isatty() or "\n" in text:
        raise RequestError("/edit requires the whole new message")
    try:
        again = input_again(PROMPT, text)
    except (EOFError, KeyboardInterrupt):
        print()
        return ""
    if again is None:
        raise RequestError("/edit requires the whole new message")
    return again


def _path(name: str, command: str) -> Path:
    if not name:
        raise RequestError(f"{command} requires the name of a file")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~ of somebody unknown
        raise RequestError(f"{name} cannot be used: {error}") from None


def _last_chat() -> SavedChat:
    try:
        return read_chat(last_chat())
    except OSError:
        raise RequestError("a saved conversation was not found") from None


def read_message() -> str | None:
    """Reads the next message; several lines if pasted, between triple quotes or after a backslash.

    None at the end. Ctrl-C drops the text typed so far.
    """
    while True:
        try:
            text = _read_lines()
            text.encode()  # an ASCII terminal hands other bytes on as halves of characters
            return text
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            drop_typed(sys.stdin.fileno(), PASTE_S)  # the rest of a paste with a Ctrl-C in it
            print("\n(Ctrl-D or /exit leaves)")
        except UnicodeError:
            print("error: that was not UTF-8")


def _read_lines() -> str:
    line = _read_line(PROMPT)
    if line.startswith(BLOCK):
        lines = [line.removeprefix(BLOCK)]
        while not lines[-1].endswith(BLOCK) or (len(lines) == 1 and line == BLOCK):
            lines.append(_read_line(CONTINUED))
        lines[-1] = lines[-1].removesuffix(BLOCK)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while (is_pasted := _has_pasted_more(line)) or lines[-1].endswith("\\"):
        lines[-1] = lines[-1] if is_pasted else lines[-1][:-1]
        lines.append(_read_line(CONTINUED))
    return "\n".join(lines).strip("\n")


def _read_line(prompt: str) -> str:
    return input(prompt if sys.stdin.isatty() else "")


def _has_pasted_more(line: str) -> bool:
    """Return whether what waits on the terminal belongs to a message that begins with this line."""
    if not sys.stdin.isatty() or marks_pastes() or line.split(" ")[0] in (*COMMANDS, *LEAVING):
        return False
    return has_typed(sys.stdin.fileno(), PASTE_S)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Within the block Ctrl-C only makes the given function true, so a step is never torn.

    A second Ctrl-C interrupts as usual, should a step take too long.
    """
    count = 0

    def note(signal_number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _no_echo() -> Iterator[None]:
    """Within the block a terminal does not echo typed-ahead input, which the next prompt reads.

    Pastes are marked here too, because readline has that end with its prompt.
    """
    if not sys.stdin.isatty():
        yield
        return
    marks = ("\x1b[?2004h", "\x1b[?2004l") if marks_pastes() else ("", "")
    with no_echo(sys.stdin.fileno()):
        print(marks[0], end="", flush=True)
        try:
            yield
        finally:
            print(marks[1], end="", flush=True)


def complete(text: str, state: int) -> str | None:
    """The `state`-th command that starts with `text`, for readline; None if there is no such command."""
    names = [name for name in (*COMMANDS, "/exit") if text.startswith("/") and name.startswith(text)]
    return names[state] if state < len(names) else None


@contextmanager
def _line_editing() -> Iterator[None]:
    """Within the block a terminal's input has editing, history across chats, and Tab for commands."""
    if not sys.stdin.isatty():
        yield
        return
    from platformdirs import user_state_path

    with line_editing(user_state_path("kukri") / "chat_history", complete):
        yield
