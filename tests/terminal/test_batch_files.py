"""`kukri batch`: results in order, whatever stops it, and nothing done twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kukri import LLM
from kukri.calls.batch_files import Results, read_batch
from kukri.cli import app
from kukri.errors import ConfigError

NAME = "smol"


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": NAME} | body}


def write(path: Path, *lines: dict[str, Any] | str) -> None:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "kukri", "batch", *map(str, arguments)]


def kukri_batch(source: Path, target: Path, model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    arguments = (source, target, "-m", model, "--max-context", "512", "--alias", NAME, *options)
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)


def results_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.full
def test_results_come_in_order_and_bad_lines_are_error_lines(smollm2_path, tmp_path):
    """Catches an order of arrival, a line that ends the run, an answer that is not the model's."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    greedy = {"temperature": 0, "max_tokens": 8}
    write(
        source,
        request("long", prompt="Once upon a time", temperature=0, max_tokens=60, ignore_eos=True),
        request("chat", "/v1/chat/completions", messages=question, **greedy),
        "{broken",
        "",
        request("vector", "/v1/embeddings", input=["a", "b"]),
        request("response", "/v1/responses", input="Hi", temperature=0, max_output_tokens=3),
        request("chat", "/v1/chat/completions", messages=question),
        request("other", model="gpt-9", prompt="a"),
        request("field", prompt="a", suffix="b"),
        request("stream", prompt="a", stream=True),
        request("url", "/v1/files"),
        {**request("get", prompt="a"), "method": "GET"},
        {**request("more", prompt="a"), "more": 1},
        {**request("body"), "body": []},
        [1],
        request("last", prompt="1, 2, 3,", **greedy),
    )
    done = kukri_batch(source, target, smollm2_path, "--json")
    assert done.returncode == 0, done.stderr
    found = results_of(target)
    ids = [line["custom_id"] for line in found]
    first = ["long", "chat", None, "vector", "response", "chat", "other", "field", "stream", "url", "get"]
    assert ids == [*first, "more", "body", None, "last"]
    assert len({line["id"] for line in found}) == len(found)
    with LLM(smollm2_path, max_context=512) as llm:
        answers = [found[i]["response"]["body"]["choices"][0] for i in (0, 1, -1)]
        assert (
            answers[0]["text"]
            == llm.generate("Once upon a time", temperature=0, max_tokens=60, ignore_eos=True).text
        )
        assert answers[1]["message"]["content"] == llm.chat(question, **greedy).text
        assert answers[2]["text"] == llm.generate("1, 2, 3,", **greedy).text
        vectors = [item["embedding"] for item in found[3]["response"]["body"]["data"]]
        assert vectors == llm.embed(["a", "b"]).tolist()
    statuses = [line["response"] and line["response"]["status_code"] for line in found]
    assert statuses == [200, 200, None, 200, 200, None, 404, 400, *[None] * 6, 200]
    codes = [line["error"] and line["error"]["code"] for line in found]
    invalid = "invalid_line"
    assert codes[2:3] + codes[5:6] + codes[8:14] == [
        "invalid_json", "duplicate_custom_id", invalid, "invalid_url", "invalid_method", invalid, invalid,
        invalid,
    ]  # fmt: skip
    assert all((line["response"] is None) != (line["error"] is None) for line in found)
    assert all(line["response"]["request_id"].startswith("req_") for line in found if line["response"])
    report = json.loads(done.stdout)
    assert (report["n_lines"], report["n_failed"], report["n_done_before"]) == (15, 10, 0)
    assert report["n_generated"] == 60 + 8 + 3 + 8
    assert sorted(tmp_path.iterdir()) == [source, target]

    before = target.read_bytes()
    again = kukri_batch(source, target, smollm2_path)
    assert again.returncode == 0, again.stderr
    assert target.read_bytes() == before, "nothing is asked twice"
    assert "15, 7 of them before; 10 with an error" in again.stdout
    write(source, request("new", prompt="a", max_tokens=1), *source.read_text().splitlines()[:1])
    assert kukri_batch(source, target, smollm2_path).returncode == 2, "the output has others' results"
    assert target.read_bytes() == before


@pytest.mark.full
def test_ctrl_c_loses_nothing_and_the_next_run_continues(smollm2_path, tmp_path):
    """Catches results that were held back for their order, and requests that are answered again."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    part = tmp_path / "out.jsonl.part"
    lengths = [200, *[4 + i % 5 for i in range(60)]]
    options = {"temperature": 0, "ignore_eos": True}
    write(
        source,
        *(request(f"r{i}", prompt=f"{i}, {i + 1},", max_tokens=n, **options) for i, n in enumerate(lengths)),
    )
    arguments = (source, target, "-m", smollm2_path, "--max-context", "512", "--alias", NAME)
    process = subprocess.Popen(
        command(*arguments, "--max-requests", "2"), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not part.exists() or part.read_bytes().count(b"\n") < 4:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert "the same command resumes from there" in said
    assert "Traceback" not in said
    assert not target.exists()
    first = results_of(part)
    assert 4 <= len(first) < len(lengths)
    assert "r0" not in [line["custom_id"] for line in first], "the short ones do not wait for the long one"
    with open(part, "ab") as file:
        file.write(b'{"id": "batch_req_cut off')
    done = kukri_batch(source, target, smollm2_path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n_done_before"] == len(first)
    assert not part.exists()
    found = results_of(target)
    assert [line["custom_id"] for line in found] == [f"r{i}" for i in range(len(lengths))]
    by_id = {line["id"]: line for line in found}
    assert all(by_id[line["id"]] == line for line in first), "request ids too: they were not asked again"
    assert [line["response"]["body"]["usage"]["completion_tokens"] for line in found] == lengths


@pytest.mark.full
def test_deep_lines_are_error_lines(smollm2_path, tmp_path):
    """Catches a line that is read with the last of the stack, cannot be sent on, and ends the run."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    depths = range(880, 1000, 6)
    write(
        source,
        *(
            json.dumps(request(f"d{n}", prompt="a", more="X")).replace('"X"', '{"a":' * n + "1" + "}" * n)
            for n in depths
        ),
    )
    done = kukri_batch(source, target, smollm2_path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n_failed"] == len(depths)
    codes = [line["error"] and line["error"]["code"] for line in results_of(target)]
    assert {"invalid_json", None} <= set(codes)
    if sys.version_info < (3, 12):  # later decoders and encoders have a limit of their own
        assert "invalid_line" in codes


def test_what_counts_as_done(tmp_path):
    """Catches a changed line that keeps its old answer, a failure of the server that stays for good."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def opened(*prompts: str, model: str = "m") -> tuple[list[Any], Results]:
        write(source, *(request(str(i), prompt=prompt) for i, prompt in enumerate(prompts)))
        lines = read_batch(source, model)
        return lines, Results(target, lines, model)

    def response(status: int) -> dict[str, Any]:
        return {"status_code": status, "request_id": "r", "body": {}}

    lines, results = opened("a", "b", "c")
    for line, status in zip(lines, (200, 503, 400), strict=True):
        results.add(line.result(response(status)))
    assert results.n_failed == 2
    results.close()
    lines, results = opened("a", "b", "c", "d")
    assert [line.id in results for line in lines] == [True, False, True, False]
    for line in (lines[3], lines[1]):
        results.add(line.result(response(200)))
    results.finish()
    assert [line["custom_id"] for line in results_of(target)] == ["0", "1", "2", "3"]
    lines, results = opened("a", "changed", "c", "d")
    assert [line.id in results for line in lines] == [True, False, True, True]
    results.close()
    for prompts, model in ((("a", "b", "c", "d"), "another"), (("a",), "m")):
        with pytest.raises(ConfigError, match="must hold results of this batch and model only: remove it,"):
            opened(*prompts, model=model)
    target.write_text("notes\n")
    with pytest.raises(ConfigError, match="remove it, or name another output"):
        opened("a")
    assert target.read_text() == "notes\n"


def test_wrong_files_are_named(tmp_path):
    """Catches a model that is loaded for nothing, and an input that is overwritten."""
    source = tmp_path / "in.jsonl"
    source.write_text("\n \n")
    for arguments, message in (
        ((source, source), "must not be the input"),
        ((tmp_path / "a.part", tmp_path / "a"), "must not be the input"),
        ((tmp_path / "a.new", tmp_path / "a"), "must not be the input"),
        ((source, tmp_path / "no" / "out"), "was not found"),
        ((tmp_path / "nothing", tmp_path / "out"), "cannot be read"),
        ((source, tmp_path / "out"), "must have requests, one per line"),
    ):
        done = CliRunner().invoke(app, ["batch", *map(str, arguments)])
        assert done.exit_code == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tmp_path):
    """Catches a traceback, and results that are believed to be written."""
    source = tmp_path / "in.jsonl"
    write(source, request("a", prompt="a"))
    lines = read_batch(source, "m")
    results = Results(tmp_path / "out.jsonl", lines, "m")
    results.close()
    results._file = open("/dev/full", "ab")  # noqa: SIM115
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        results.add(lines[0].result(None))
    assert len(results) == 0
    results.close()
