"""The `kukri` command: in this process where a function call will do, as a real process where it matters."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kukri
from kukri.cli import app
from kukri.formats.hub import DEFAULT_MODEL, MODELS
from tests.terminal.pty_process import Terminal

pytestmark = pytest.mark.usefixtures("compiled_kernels")

QUESTION = "What is the capital of France?"
GREEDY = ("-t", "0", "--frequency-penalty", "0")  # the likeliest tokens, as they are


def call(*arguments: str):
    """Runs a command in this process."""
    return CliRunner().invoke(app, list(arguments))


def start(*arguments: str, **options) -> subprocess.Popen[bytes]:
    """Starts a command as a process with pipes."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "kukri", *arguments], **(pipes | options))


def run(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Runs a command as a process to its end; `stdin` None is /dev/null."""
    command = [sys.executable, "-m", "kukri", *arguments]
    given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(command, capture_output=True, timeout=120, **given)


def assert_one_line_error(done, *words: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that starts with `error: ` and has these words."""
    is_process = isinstance(done, subprocess.CompletedProcess)
    code = done.returncode if is_process else done.exit_code
    errors = done.stderr.decode() if is_process else done.stderr
    assert code == 2
    assert not done.stdout
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert errors.endswith("\n")
    for word in words:
        assert word in errors


@pytest.fixture
def not_a_model(tmp_path) -> Path:
    """A safetensors file under a name that ends in .gguf."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "renamed.gguf"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return path


# --- running a prompt


@pytest.mark.representative(3)
def test_run_answers(smollm2_path):
    """Catches the first thing anybody tries not working."""
    done = run("run", QUESTION, "-m", str(smollm2_path), "-n", "16", "-t", "0")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout.decode()
    assert done.stdout.endswith(b"\n")
    assert not done.stderr


@pytest.mark.full
def test_run_streams(smollm2_path):
    """Catches an answer that is held back until it is complete."""
    process = start("run", "Count to one hundred.", "-m", str(smollm2_path), "-n", "150", "--ignore-eos")
    first = os.read(process.stdout.fileno(), 1 << 16)
    assert process.poll() is None
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert len(first) < len(rest)


@pytest.mark.full
def test_run_reads_a_pipe(smollm2_path):
    """Catches piped text being ignored, or replacing the prompt instead of following it."""
    done = run("run", "-m", str(smollm2_path), "-n", "4", "--json", stdin=QUESTION.encode() + b"\n")
    assert json.loads(done.stdout)["prompt"] == QUESTION
    done = run(
        "run", "Answer briefly:", "-m", str(smollm2_path), "-n", "4", "--json", stdin=QUESTION.encode()
    )
    assert json.loads(done.stdout)["prompt"] == f"Answer briefly:\n\n{QUESTION}"


@pytest.mark.full
def test_run_json_is_one_object(smollm2_path):
    """Catches text, progress or a warning mixed into what a program parses."""
    done = run("run", QUESTION, "-m", str(smollm2_path), "-t", "0", "-n", "4", "--json")
    answer = json.loads(done.stdout)
    assert answer["text"] == "The capital of France"
    assert answer["finish_reason"] == "length"
    assert answer["n_generated"] == len(answer["token_ids"]) == 4
    assert answer["timings"]["decode_tokens_per_s"] > 0


@pytest.mark.full
def test_run_tells_what_drafts_were_worth(smollm2_path):
    """Catches --speculation ignored, or a mistyped kind that is found after the model is loaded."""
    command = (
        "run",
        "Say a a a a a a a a a a a a a a.",
        "-m",
        str(smollm2_path),
        "-n",
        "40",
        "--ignore-eos",
        *GREEDY,
    )
    answers = {kind: run(*command, "--json", "--speculation", kind).stdout for kind in ("ngram", "off")}
    ngram, off = json.loads(answers["ngram"]), json.loads(answers["off"])
    assert ngram["token_ids"] == off["token_ids"]
    assert 0 < ngram["timings"]["n_accepted"] <= ngram["timings"]["n_drafted"]
    assert off["timings"]["n_drafted"] == 0
    drafted = json.loads(run(*command, "--json", "--draft-model", str(smollm2_path)).stdout)
    assert drafted["token_ids"] == off["token_ids"]
    told = run(*command, "--stats")
    assert re.search(rb"\d+ of \d+ drafts accepted\n$", told.stderr)
    wrong = call("run", "Hi", "-m", "/nowhere.gguf", "--speculation", "magic")
    assert_one_line_error(wrong, "--speculation must be one of ngram, draft, off")


@pytest.mark.full
def test_run_raw_continues_the_text(smollm2_path):
    """Catches --raw that still wraps the prompt into a chat."""
    command = ("run", "1, 2, 3, 4,", "-m", str(smollm2_path), "-n", "4", "--json", *GREEDY)
    raw = json.loads(run(*command, "--raw").stdout)
    chat = json.loads(run(*command).stdout)
    assert raw["n_prompt_tokens"] < chat["n_prompt_tokens"]
    assert "5" in raw["text"]


@pytest.mark.full
def test_run_system_message_reaches_the_model(smollm2_path):
    """Catches --system being accepted and dropped."""
    plain = json.loads(run("run", QUESTION, "-m", str(smollm2_path), "-n", "1", "--json").stdout)
    pirate = run(
        "run", QUESTION, "-s", "Speak like a pirate. " * 20, "-m", str(smollm2_path), "-n", "1", "--json"
    )
    assert json.loads(pirate.stdout)["n_prompt_tokens"] > plain["n_prompt_tokens"] + 60


@pytest.mark.full
def test_run_stats_go_to_stderr(smollm2_path):
    """Catches counts that end up in a redirected answer."""
    done = run("run", QUESTION, "-m", str(smollm2_path), "-t", "0", "-n", "4", "--stats")
    assert done.stdout == b"The capital of France\n"
    assert "answer 4 tokens" in done.stderr.decode()


@pytest.mark.full
def test_a_seed_repeats_a_sampled_answer(smollm2_path):
    """Catches sampling options that never reach the sampler."""
    options = ("run", "Tell me a story.", "-m", str(smollm2_path), "-n", "12", "-t", "1.5", "--seed")
    answers = [run(*options, seed).stdout for seed in ("1", "1", "2")]
    assert answers[0] == answers[1] != answers[2]


# --- errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", ""], ["prompt must not be empty"]),
        (["run", " \n"], ["prompt must not be empty"]),
        (["run"], ["a prompt is required"]),
        (["run", "hi", "-t", "-1"], ["temperature", "-1"]),
        (["run", "hi", "-t", "nan"], ["temperature", "nan"]),
        (["run", "hi", "--top-p", "2"], ["top_p"]),
        (["run", "hi", "-n", "0"], ["max_tokens"]),
        (["run", "hi", "--stop", ""], ["stop"]),
        (["run", "hi", "--raw", "--system", "x"], ["--system"]),
        (["run", "hi", "-m", "nowhere/model.gguf"], ["nowhere/model.gguf", "was not found"]),
        (["run", "hi", "-m", "/"], ["is a directory"]),
        (["run", "hi", "-m", "smolm2-135m"], ["smolm2-135m", "did you mean smollm2-135m"]),
        (["run", "hi", "--threads", "0", "-m", "{model}"], ["n_threads"]),
        (["chat", "-t", "-1"], ["temperature"]),
        (["inspect", "nowhere.gguf"], ["nowhere.gguf", "was not found"]),
        (["pull", "gpt-9"], ["gpt-9", "kukri list --all"]),
        (["run", "hi\udcff", "-m", "{model}"], ["UTF-8"]),
    ],
    ids=lambda value: (
        " ".join(value).encode("ascii", "replace").decode() if isinstance(value, list) else None
    ),
)
def test_errors_are_one_line(smollm2_path, arguments, words):
    """Catches tracebacks, and messages that do not name what was wrong."""
    assert_one_line_error(call(*(word.replace("{model}", str(smollm2_path)) for word in arguments)), *words)


@pytest.mark.parametrize("command", [["run", "hi", "-m"], ["inspect"], ["bench", "-m"]], ids=lambda c: c[0])
def test_a_safetensors_file_is_not_a_model(not_a_model, command):
    """Catches bytes of another format read as tensor counts."""
    assert_one_line_error(call(*command, str(not_a_model)), "renamed.gguf")


def test_stdin_that_is_not_text_is_refused():
    """Catches a UnicodeDecodeError's traceback, and bytes replaced in silence."""
    assert_one_line_error(run("run", stdin=b"caf\xe9"), "must be UTF-8", "0xe9", "offset 3")


def test_an_empty_pipe_is_refused():
    """Catches an answer to nothing when the command before the pipe failed."""
    assert_one_line_error(run("run", stdin=b"\n"), "prompt must not be empty")


def test_too_long_a_prompt_carries_both_numbers(smollm2_path):
    """Catches silent truncation."""
    done = call("run", "word " * 200, "-m", str(smollm2_path), "--max-context", "64")
    assert_one_line_error(done, "64")
    assert re.search(r"2\d\d tokens", done.stderr)


def test_an_error_is_one_line_even_if_its_file_name_is_not():
    """Catches a newline or escape sequence in a path steering the terminal."""
    assert_one_line_error(call("inspect", "a\n\x1b[31m/b.gguf"), r"\x1b[31m")


def test_debug_shows_the_traceback():
    """Catches --debug being swallowed by the error line."""
    done = run("--debug", "inspect", "nowhere.gguf")
    assert done.returncode == 1
    assert b"Traceback" in done.stderr
    assert b"MissingFileError" in done.stderr


@pytest.mark.full(only=["arguments1"])
@pytest.mark.representative(3)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize(
    "arguments", [["run", "Hi", "-n", "2"], ["run", "Hi", "-n", "2", "--json"], ["--help"]]
)
def test_a_full_disk_is_one_line(arguments, smollm2_path):
    """Catches a traceback, or "Exception ignored" while Python shuts down."""
    model = ["-m", str(smollm2_path)] if arguments[0] == "run" else []
    with Path("/dev/full").open("wb") as full:
        process = start(*arguments, *model, stdout=full)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.decode() == "error: cannot write the output: No space left on device\n"


def test_usage_errors_exit_with_2():
    """Catches a usage error that a script takes for success."""
    done = call("run", "hi", "--no-such-option")
    assert done.exit_code == 2
    assert "--no-such-option" in done.stderr


@pytest.mark.representative(4)
def test_ctrl_c_ends_a_run_with_130(smollm2_path):
    """Catches a traceback, or an exit code that tells a shell script to continue."""
    process = start("run", "Count to a million.", "-m", str(smollm2_path), "-n", "5000", "--ignore-eos")
    os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert not errors.strip()


@pytest.mark.full
def test_a_closed_pipe_is_quiet(smollm2_path):
    """Catches BrokenPipeError noise from `kukri run … | head -1`."""
    process = start("run", "Count to a million.", "-m", str(smollm2_path), "-n", "2000", "--ignore-eos")
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 141, errors
    assert not errors


# --- looking at models and machines


def test_inspect_counts_the_parameters(smollm2_path):
    """Catches a tensor left out of the table or a tied embedding counted twice."""
    report = json.loads(call("inspect", str(smollm2_path), "--json").stdout)
    assert report["n_parameters"] == 134_515_008
    assert sum(row["n_parameters"] for row in report["layers"]) == 134_515_008
    assert sum(row["n_parameters"] for row in report["types"]) == 134_515_008
    assert {row["type"]: row["n_bytes"] for row in report["types"]} == {
        "Q4_1": 66_355_200,
        "Q8_0": 30_081_024,
        "F32": 140_544,
    }
    assert [row["layer"] for row in report["layers"]] == ["embed_tokens", *map(str, range(30)), "norm"]
    for row in report["layers"]:
        kinds = ("embedding", "attention", "mlp", "norm", "head", "other")
        assert sum(row[kind] for kind in kinds) == row["n_parameters"]
    assert report["kv_bytes_per_token"] == 23_040
    assert report["config"]["n_layers"] == 30


def test_inspect_shows_whole_numbers(smollm2_path):
    """Catches numbers cut to the width of a terminal that is not there."""
    text = call("inspect", str(smollm2_path), "--tensors").stdout
    assert "134,515,008" in text
    assert "23,040 bytes per token" in text
    assert "blk.29.ffn_up.weight" in text
    assert "…" not in text


def test_inspect_shows_models_it_cannot_run(tmp_path):
    """Catches a file of another architecture being refused where its tensors could be shown."""
    import numpy as np

    from kukri.formats.gguf.writer import write_gguf
    from kukri.quant.types import QUANT_TYPES

    path = tmp_path / "other.gguf"
    tensor = (QUANT_TYPES["F32"], np.zeros((2, 3), np.float32), (2, 3))
    write_gguf(path, {"general.architecture": "other\x1b[31m"}, {"blk.0.attn_q.weight": tensor})
    report = json.loads(call("inspect", str(path), "--json").stdout)
    assert report["config"] is None
    assert report["n_parameters"] == 6
    text = call("inspect", str(path)).stdout
    assert "not runnable" in text
    assert "\x1b" not in text


def test_doctor_reports_the_machine():
    """Catches a field that is missing just where somebody asks for help."""
    report = json.loads(call("doctor", "--json").stdout)
    assert report["kukri"] == kukri.__version__
    assert report["cpu"]["n_cores"] >= 1
    assert report["kernels"]["int8_dot"] in ("avx512vnni", "avxvnni", "avx2", "generic")
    assert "numba" in report["packages"]
    text = call("doctor").stdout
    for word in ("cpu", "kernels", "jit cache", "models", "packages"):
        assert word in text


def test_pull_prints_the_path(smollm2_path, tmp_path, monkeypatch):
    """Catches output that `$(kukri pull)` cannot use."""
    monkeypatch.setenv("KUKRI_CACHE_DIR", str(tmp_path))
    cached = tmp_path / "models" / Path(MODELS[DEFAULT_MODEL].member).name
    cached.parent.mkdir()
    cached.symlink_to(smollm2_path)
    assert call("pull").stdout == f"{cached}\n"
    facts = json.loads(call("pull", "smollm2-135m", "--verify", "--json").stdout)
    assert facts == {"name": "smollm2-135m", "path": str(cached), "n_bytes": 98_362_432}


def test_help_is_a_command():
    """Catches `No such command 'help'`, and another text than --help prints."""
    assert call("help").stdout == call("--help").stdout
    assert call("help", "plot").stdout == call("plot", "--help").stdout
    assert " KIND" in call("help", "plot").stdout


def test_the_version_is_the_packages():
    """Catches two versions that drift apart."""
    assert call("--version").stdout == f"kukri {kukri.__version__}\n"


@pytest.mark.parametrize("command", ["run", "chat", "serve", "pull", "bench", "inspect", "doctor"])
def test_every_command_has_help(command):
    """Catches a signature that typer cannot read, and options without a word."""
    done = call(command, "--help")
    assert done.exit_code == 0
    assert "--help" in done.stdout


# --- a chat in a real terminal


@pytest.fixture
def terminal(smollm2_path, tmp_path, monkeypatch):
    """A chat at its first prompt, with a home of its own for what it writes."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")))
    monkeypatch.setenv("HOME", str(tmp_path))
    terminal = Terminal("-m", "kukri", "chat", "-m", str(smollm2_path), "-t", "0")
    try:
        terminal.wait_for(r"\n> ")
        yield terminal
    finally:
        terminal.close()


@pytest.mark.full
def test_chat_remembers_and_leaves_on_ctrl_d(terminal, tmp_path):
    """Catches a chat whose model never sees the earlier turns, and /save of something else than was said."""
    terminal.type(f"{QUESTION}\n")
    assert "Paris" in terminal.wait_for(r"\n> ")
    terminal.type("/stats\n")
    first = int(re.search(r"context (\d+) of 8192", terminal.wait_for(r"\n> "))[1])
    terminal.type('"""And of\nItaly?"""\n')
    terminal.wait_for(r"\n> ")
    terminal.type("/stats\n")
    assert int(re.search(r"context (\d+) of 8192", terminal.wait_for(r"\n> "))[1]) > first + 10
    terminal.type(f"/save {tmp_path}/talk.json\n")
    terminal.wait_for(r"saved 5 messages.*\n> ")
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", *["user", "assistant"] * 2]
    assert saved[3]["content"] == "And of\nItaly?"
    terminal.type("\x04")
    assert terminal.exit_code() == 0


@pytest.mark.full
def test_ctrl_c_stops_the_answer_and_not_the_chat(terminal):
    """Catches a chat that dies on Ctrl-C, or that continues writing."""
    terminal.type("Write a very long story about the sea, with many chapters.\n")
    terminal.wait_for(r"sea, with many chapters\.\n(.|\n){20}")
    terminal.type("\x03")
    terminal.wait_for(r"\(stopped\)\n> ")
    terminal.type(f"/reset\n{QUESTION}\n")
    assert "Paris" in terminal.wait_for(r"Paris")
    terminal.wait_for(r"\n> ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    time.sleep(0.5)  # CPython's input() misses a signal that comes between a key and its next select
    terminal.type("\x03")
    terminal.wait_for(r"Ctrl-D or /exit leaves\)\n> ")
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0


@pytest.mark.full
def test_typed_ahead_keys_stay_out_of_the_answer(terminal):
    """Catches keys echoed into an answer, lost, or a terminal left without echo."""
    terminal.type("Count from one to twenty in words.\n")
    terminal.wait_for(r"twenty in words\.\n(.|\n){10}")
    terminal.type("/stats\n")
    answer = terminal.wait_for(r"\n> ")
    assert "/stats" not in answer
    assert "context" in terminal.wait_for(r"context \d+ of 8192 tokens\n> ")
    terminal.type("/he\t")
    terminal.wait_for(r"/help")
    terminal.type("\n")
    assert "/save FILE" in terminal.wait_for(r"\n> ")


@pytest.mark.representative(4)
def test_chat_works_through_a_pipe(smollm2_path):
    """Catches prompts, banners or a readline error in scripted use."""
    done = run("chat", "-m", str(smollm2_path), "-t", "0", stdin=f"{QUESTION}\n/exit\nnever\n".encode())
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().startswith("The capital of France is Paris.")
    assert b"> " not in done.stdout
