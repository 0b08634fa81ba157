"""The chat's own logic, on a model that says what the test wants."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import pytest

from kukri.calls.results import Chunk, Result
from kukri.engine import Timings
from kukri.errors import ConfigError, ContextLengthError, KukriError, RequestError
from kukri.sampling import SamplingParams
from kukri.terminal import chat as chat_module
from kukri.terminal import clipboard, ps, remote_model
from kukri.terminal.chat import Chat, read_message, talk


class FakeLLM:
    """Streams prepared pieces and keeps the messages it was asked about."""

    def __init__(self, *pieces: str, error: Exception | None = None, finish_reason: str = "stop") -> None:
        self.pieces, self.error, self.finish_reason = pieces, error, finish_reason
        self.asked: list[list[dict[str, str]]] = []
        self.n_closed = 0
        self.config = SimpleNamespace(name="fake", max_context=8)
        self.path, self.options = Path("fake.gguf"), SimpleNamespace(prefix_dir=None)
        self.engine_config = SimpleNamespace(max_context=None)
        self.calls = SimpleNamespace(check_generates=lambda: None)

    def stream(self, messages, params, adapter=None, interventions=()):
        self.adapter = adapter
        self.asked.append(list(messages))
        if self.error is not None:
            raise self.error
        try:
            for piece in self.pieces[:-1]:
                yield Chunk(piece)
            yield Chunk(self.pieces[-1], finish_reason=self.finish_reason, result=self._result())
        finally:
            self.n_closed += 1

    def _result(self):
        timings = Timings(
            n_prompt_tokens=3, n_generated=2, queue_s=0.0, prompt_s=0.1, first_token_s=0.1, decode_s=0.1
        )
        return Result("".join(self.pieces), [1, 2], self.finish_reason, None, None, [5, 6, 7], timings)


def make_chat(*pieces: str, system: str = "", **options) -> Chat:
    messages = [{"role": "system", "content": system}] if system else []
    return Chat(FakeLLM(*(pieces or ("Hello.",)), **options), SamplingParams(), messages)


def typed(monkeypatch, text: str) -> None:
    """Makes `text` what the person types."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_the_whole_conversation_is_sent(capsys):
    """Catches a model that is asked the last message alone."""
    chat = make_chat("Hel", "lo.", system="Be brief.")
    chat.take("Hi")
    chat.take("And?")
    assert chat.llm.asked[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And?"},
    ]
    assert capsys.readouterr().out == "Hello.\n\n" * 2


def test_tab_completes_commands():
    """Catches a command that Tab does not know, and text completed to a command."""
    found = [chat_module.complete("/s", i) for i in range(4)]
    assert found == ["/system", "/save", "/stats", None]
    assert chat_module.complete("/ex", 0) == "/exit"
    assert chat_module.complete("", 0) is None
    assert chat_module.complete("s", 0) is None


def test_ctrl_c_keeps_what_was_said(capsys):
    """Catches a stopped answer that is lost to the model, and a request that continues in the engine."""
    chat = make_chat("one ", "two ", "three")
    pieces = chat.llm.stream

    def interrupted_stream(messages, params, adapter=None, interventions=()):
        for i, chunk in enumerate(pieces(messages, params)):
            if i == 1:
                signal.raise_signal(signal.SIGINT)
            yield chunk

    chat.llm.stream = interrupted_stream
    before = signal.getsignal(signal.SIGINT)
    assert chat.take("Count")
    assert chat.messages[-1] == {"role": "assistant", "content": "one two "}
    assert "(stopped)" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before
    assert chat.llm.n_closed == 1


def test_a_second_ctrl_c_interrupts():
    """Catches a step that cannot be left."""
    with chat_module._interrupts() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_full_context_says_what_to_do(capsys):
    """Catches a conversation that can never continue, because the message that did not fit stays in it."""
    chat = make_chat(error=ContextLengthError(9000, 8192))
    assert chat.take("too much")
    shown = capsys.readouterr().out
    assert "9000" in shown
    assert "8192" in shown
    assert "/reset" in shown
    assert chat.messages == []


@pytest.mark.parametrize(("max_context", "words"), [(5, "context of 5 tokens is full"), (8, "--max-tokens")])
def test_a_cut_answer_says_why(capsys, max_context, words):
    """Catches half a sentence that looks like the model's own choice."""
    chat = make_chat("Half a", finish_reason="length")
    chat.llm.config.max_context = max_context
    chat.take("Go")
    assert words in capsys.readouterr().out


def test_an_empty_answer_is_not_kept(capsys):
    """Catches an empty assistant message, which some templates refuse from then on."""
    chat = make_chat("")
    chat.take("Hi")
    assert chat.messages == []


def test_system_replaces_and_reset_keeps_it(capsys):
    """Catches a second system message, and a /reset that forgets the first."""
    chat = make_chat()
    chat.take("Hi")
    chat.take("/system Be brief.")
    chat.take("/system Be very brief.")
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    chat.take("/reset")
    assert chat.messages == [{"role": "system", "content": "Be very brief."}]
    chat.take("/system")
    assert "Be very brief." in capsys.readouterr().out


def test_save_and_load_are_inverse(tmp_path, capsys):
    """Catches a conversation that comes back changed."""
    chat = make_chat("Grüße\n", system="Ä")
    chat.take("Hi\nthere")
    chat.take(f"/save {tmp_path}/a talk.json")
    other = make_chat()
    other.take(f"/load {tmp_path}/a talk.json")
    assert other.messages == chat.messages
    assert "error" not in capsys.readouterr().out


def test_save_replaces_only_its_own_file(tmp_path, capsys):
    """Catches /save over a file that the person did not mean."""
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    chat = make_chat()
    chat.take(f"/save {path}")
    assert "exists" in capsys.readouterr().out
    assert path.read_text() == "precious"
    chat.take(f"/save {tmp_path}/own.json")
    chat.take("Hi")
    chat.take(f"/save {tmp_path}/own.json")
    assert len(json.loads((tmp_path / "own.json").read_text())["messages"]) == 2


def test_the_last_conversation_is_kept_and_resumed(tmp_path, monkeypatch, capsys):
    """Catches a conversation that is lost, that others may read, or that continues with another model."""
    own = tmp_path / "state" / "last.json"
    monkeypatch.setattr(chat_module, "last_chat", lambda: own)
    opened = []

    class Opened(FakeLLM):
        default_params = SamplingParams()
        chat_template = SimpleNamespace(source="x", takes_system_message=lambda: True)

        def __init__(self, model, *, prefix_dir=None, progress=None, fit=False):
            super().__init__("Hello.")
            self.path, self.options = tmp_path / "some.gguf", SimpleNamespace(prefix_dir=prefix_dir)
            opened.append((model, prefix_dir, self))

        def close(self):
            pass

    monkeypatch.setattr(chat_module, "LLM", Opened)
    with pytest.raises(RequestError, match="a saved conversation was not found"):
        talk(model=None, system="Be kind.", sampling={}, loading={}, resumes=True)
    typed(monkeypatch, "Hi\n")
    talk(model="m", system="Be kind.", sampling={}, loading={"prefix_dir": str(tmp_path)})
    assert own.stat().st_mode & 0o777 == 0o600
    typed(monkeypatch, "And?\n")
    talk(model=None, system="", sampling={}, loading={}, resumes=True)
    model, prefix_dir, llm = opened[-1]
    assert (model, prefix_dir) == (str(tmp_path / "some.gguf"), str(tmp_path))
    assert [m["content"] for m in llm.asked[0]] == ["Be kind.", "Hi", "Hello.", "And?"]
    assert "resumed a conversation of 3 messages" in capsys.readouterr().out
    own.parent.chmod(0o500)
    typed(monkeypatch, "More?\n")
    talk(model=None, system="", sampling={}, loading={}, resumes=True)  # a disk that cannot be written to
    own.parent.chmod(0o700)


@pytest.mark.parametrize(
    "content",
    [
        b"not json",
        b'{"messages": [], "path": 3}',
        b"\xff\xfe",
        b"[]",
        b'{"messages": 3}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "wizard", "content": "hi"}]}',
        b'{"messages": [{"role": "user", "content": 3}]}',
        b'{"messages": [{"role": ["user"], "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}',
    ],
)
def test_load_refuses_other_files(tmp_path, capsys, content):
    """Catches a chat broken by a file that is no conversation."""
    path = tmp_path / "x.json"
    path.write_bytes(content)
    chat = make_chat()
    chat.take("Hi")
    before = list(chat.messages)
    assert chat.take(f"/load {path}")
    assert "must be a saved conversation" in capsys.readouterr().out
    assert chat.messages == before


@pytest.mark.parametrize(
    "command", ["/save", "/load", "/load /no/such/file", "/save /no/such/file", "/dance"]
)
def test_wrong_commands_are_explained(capsys, command):
    """Catches a chat that ends with a traceback over a slip of the finger."""
    assert make_chat().take(command)
    assert capsys.readouterr().out.startswith("error: ")


def test_two_slashes_start_a_message(capsys):
    """Catches text that cannot be said because it starts with a slash."""
    chat = make_chat()
    chat.take("//etc/passwd is a file")
    assert chat.llm.asked[0][0]["content"] == "/etc/passwd is a file"


def test_help_lists_every_command(capsys):
    """Catches a command that nobody can find."""
    chat = make_chat()
    chat.take("/help")
    shown = capsys.readouterr().out
    for name in (*chat_module.COMMANDS, "/exit"):
        assert name in shown
    assert not chat.take("/exit")


def test_the_adapter_can_be_chosen(capsys):
    """Catches an answer by another adapter than the one that is shown."""
    chat = make_chat("one")
    chat.llm.adapters = ("sql", "poem")
    for command, adapter in (("/adapter poem", "poem"), ("/adapter", "poem"), ("/adapter off", None)):
        assert chat.take(command)
        assert capsys.readouterr().out == f"adapter: {adapter or 'off'}\n"
        assert chat.take("Hi")
        assert chat.llm.adapter == adapter
        capsys.readouterr()
    assert chat.take("/adapter other")
    assert "the adapter 'other' was not found: sql, poem" in capsys.readouterr().out


def test_stats_before_an_answer(capsys):
    """Catches None.timings."""
    chat = make_chat()
    chat.take("/stats")
    chat.take("Hi")
    chat.take("/stats")
    shown = capsys.readouterr().out
    assert "nothing has been answered yet" in shown
    assert "context 5 of 8 tokens" in shown


def test_an_error_in_an_answer_does_not_end_the_chat(capsys):
    """Catches a chat lost to one bad message."""
    chat = make_chat(error=RequestError("bad"))
    assert chat.take("Hi")
    assert capsys.readouterr().out == "error: bad\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one line\n", "one line"),
        ("ends without a line end", "ends without a line end"),
        ('"""first\nsecond"""\n', "first\nsecond"),
        ('"""\nfirst\n\nsecond\n"""\n', "first\n\nsecond"),
        ('"""all in one"""\n', "all in one"),
        ('""""""\n', ""),
        ("first\\\nsecond\\\nthird\n", "first\nsecond\nthird"),
    ],
)
def test_several_lines_make_one_message(monkeypatch, text, message):
    """Catches a pasted program sent line by line, and a block that never ends."""
    typed(monkeypatch, text)
    assert read_message() == message


def test_the_end_of_input_ends_the_chat(monkeypatch):
    """Catches an endless loop on Ctrl-D, in the middle of a block too."""
    typed(monkeypatch, "")
    assert read_message() is None
    typed(monkeypatch, '"""never closed\n')
    assert read_message() is None


def test_the_last_message_is_answered_again_or_edited(capsys):
    """Catches an old answer that stays in the conversation, and an edit of the wrong message."""
    chat = make_chat("Yes.", system="Be brief.")
    chat.take("/regenerate")
    chat.take("/copy")
    assert "this requires a message" in capsys.readouterr().out
    chat.take("One?")
    chat.take("Two?")
    chat.take("/regenerate")
    assert chat.llm.asked[2] == chat.llm.asked[1]
    chat.take("/edit Three?")
    assert [message["content"] for message in chat.llm.asked[3]] == ["Be brief.", "One?", "Yes.", "Three?"]
    assert len(chat.messages) == 5
    chat.llm.error = RequestError("no")
    chat.take("/regenerate")
    assert len(chat.messages) == 5


def test_an_edit_needs_a_terminal_or_a_text(capsys):
    """Catches input that is read from a pipe as the new message."""
    chat = make_chat()
    chat.take("Hi")
    chat.take("/edit")
    assert "/edit requires" in capsys.readouterr().out


def test_the_answer_is_copied(monkeypatch, capsys):
    """Catches a copy of the whole conversation, and an escape sequence in a file."""
    chat = make_chat("Yes.")
    chat.take("Hi")
    copied = []
    monkeypatch.setattr(clipboard.shutil, "which", lambda name: name if name == "xclip" else None)
    run = lambda command, input, **_: copied.append(input) or SimpleNamespace(returncode=0)  # noqa: E731
    monkeypatch.setattr(clipboard.subprocess, "run", run)
    chat.take("/copy")
    assert copied == [b"Yes."]
    monkeypatch.setattr(clipboard.shutil, "which", lambda name: None)
    chat.take("/copy")
    shown = capsys.readouterr().out
    assert "a clipboard was not found" in shown
    assert "\x1b" not in shown


def test_the_model_can_be_changed(capsys):
    """Catches a model that stays open, and a conversation that is lost with it."""
    chat = make_chat("Yes.")
    chat.take("Hi")
    old, new = chat.llm, FakeLLM("No.")
    closed = []
    old.close = lambda: closed.append(old)
    new.path, new.adapters = Path("new.gguf"), ()

    def opened(name):
        if name != "new":
            raise RequestError(f"no model {name}")
        return new, SamplingParams(top_k=3)

    chat._open_model = opened
    chat.take("/model other")
    assert (chat.llm, closed) == (old, [])
    chat.take("/model new")
    assert (chat.llm, closed, chat.params.top_k) == (new, [old], 3)
    chat.take("And?")
    assert len(new.asked[0]) == 3
    assert "model: new" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "sent"),
    [("one", "one"), ("one,two", "one"), ("ann one priority=5, bob two", "one"), ("", None), (None, None)],
)
def test_a_client_sends_one_of_a_servers_keys(keys, sent, monkeypatch):
    """Catches a 401 where $KUKRI_API_KEY holds several keys, names or options, as a server's does."""
    seen = []

    def opened(request, timeout):
        seen.append(request.get_header("Authorization"))
        raise URLError("nobody")

    for module in (ps, remote_model):
        monkeypatch.setattr(module, "urlopen", opened)
    with pytest.raises(KukriError):
        ps.fetched("http://localhost", "/v1/models", keys)
    with pytest.raises(KukriError):
        remote_model.RemoteModel("http://localhost", keys, None, {})
    assert seen == [sent and f"Bearer {sent}"] * 2


def test_a_chat_with_a_server(tiny_path, monkeypatch, capsys):
    """Catches a URL that loads a model here, fields that the server refuses, and errors with a traceback."""
    from kukri import LLM
    from tests.server.live_server import MODEL, serving

    with LLM(tiny_path, backend="reference") as llm, serving(llm) as server:
        url = server.url
        typed(monkeypatch, f"Hi\n/stats\n/model\n/model nothing\nAnd?\n/model {MODEL}\n" + "a" * 500)
        sampling = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "top_k": 5}
        talk(model=None, system="", sampling=sampling, loading={}, url=url + "/v1", api_key="none")
        shown = capsys.readouterr().out
        assert "answer 4 tokens" in shown
        assert "raise --max-tokens" in shown
        assert f"others: {MODEL}" in shown
        assert "answered 404" in shown
        assert "answered 400" in shown
        with pytest.raises(ConfigError, match="--url"):
            talk(model=None, system="", sampling={}, loading={"kv_type": "q8_0"}, url=url)
    with pytest.raises(KukriError, match="check that the server is running"):
        talk(model=None, system="", sampling={}, loading={}, url=url)
    with pytest.raises(ConfigError, match="http"):
        talk(model=None, system="", sampling={}, loading={}, url="localhost:8000")
