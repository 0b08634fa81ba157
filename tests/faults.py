"""Put faults into the package, one at a time, and say which tier of the suite catches each.

    python -m tests.faults faults.json [--seed 50] [--drawn 40] [--minutes 180]

Forty faults are drawn by a seed from all statements of the package, twenty are chosen by hand. Each is put
into a copy of the checkout, and the tests that import the changed module run first. What they do not catch
runs against a whole tier, all such faults at once; each is then tried alone against the tests that failed.
The file keeps what was found, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Not as tests.tiers writes them: what a test costs is not judged here
FIRST, SECOND = "(not slow and not ray and not full)", "(full and not slow and not ray)"
_LIMIT_S = 1800.0  # a fault that makes tests wait for ever is caught
_SWAPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "and": "or", "or": "and"}
_SWAPPED |= {"+": "-", "-": "+", "*": "+", "//": "*", "is": "is not", "is not": "is", "not in": "in"}
_SWAPPED |= {"min": "max", "max": "min"}
_OPERATOR = re.compile(
    r"(?<= )(?:<=|>=|==|!=|<|>|and|or|\+|-|\*|//|is not|is|not in)(?= )|\b(?:min|max)(?=\()"
)
_NUMBER = re.compile(r"(?<![\w.\"'])\d+(?![\w.\"'])")


@dataclass(frozen=True)
class Fault:
    """A piece of a file, which occurs there once, and what stands in its place."""

    file: str
    old: str
    new: str
    kind: str


# A lock, a bound, a field, a byte on the wire: what statements drawn at random seldom are.
BY_HAND: tuple[tuple[str, str, str], ...] = (
    (
        'kukri/engine/pages.py',
        'return sha256(before + tokens.tobytes() + rows).digest()',
        'return sha256(before + tokens.tobytes()).digest()',
    ),
    (
        'kukri/engine/request.py',
        'self.sequence.prefix_root = sha256(self.sequence.prefix_root + digest).digest()',
        'self.sequence.prefix_root = sha256(self.sequence.prefix_root).digest()',
    ),
    (
        'kukri/engine/saved_prefixes.py',
        '            self._queued_bytes += n_bytes\n',
        '            self._queued_bytes += 0\n',
    ),
    (
        'kukri/server/keys.py',
        '                if hmac.compare_digest(digest, known):',
        '                if digest[:1] == known[:1]:',
    ),
    (
        'kukri/server/answers/reply.py',
        'DONE = b"data: [DONE]\\n\\n"',
        'DONE = b"data: [DONE]\\n"',
    ),
    (
        'kukri/kernels/reference.py',
        'first = 0 if spec.window is None else position + 1 - spec.window',
        'first = 0 if spec.window is None else position - spec.window',
    ),
    (
        'kukri/server/chat/image_urls.py',
        '    return found.is_global and not found.is_multicast',
        '    return not found.is_multicast',
    ),
    (
        'kukri/server/anthropic/messages.py',
        '"input_tokens": call.n_prompt_tokens - call.n_cached_tokens,',
        '"input_tokens": call.n_prompt_tokens,',
    ),
    (
        'kukri/server/openai/responses.py',
        '"output_tokens_details": {"reasoning_tokens": self._choice.n_reasoning},',
        '"output_tokens_details": {"reasoning_tokens": 0},',
    ),
    (
        'kukri/server/ollama/answers.py',
        '"done_reason": "length" if reason == "length" else "stop",',
        '"done_reason": "stop",',
    ),
    (
        'kukri/host/typed_input.py',
        '            os.chmod(history, 0o600)  # prompts are private\n',
        '',
    ),
    (
        'kukri/host/private_files.py',
        '    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):',
        '    if found.st_mode & stat.S_IWOTH:',
    ),
    (
        'kukri/formats/gguf/reader.py',
        '    n_tensors = _count(cursor, "tensors", MAX_TENSORS, least_bytes=32)',
        '    n_tensors = _count(cursor, "tensors", MAX_TENSORS, least_bytes=0)',
    ),
    (
        'kukri/server/errors.py',
        'headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}',
        'headers: dict[str, str] = {}',
    ),
    (
        'kukri/kernels/sampling_stages.py',
        '        ("repetition_penalty", "presence_penalty", "frequency_penalty"),\n',
        '        ("repetition_penalty",),\n',
    ),
    (
        'kukri/terminal/serve_options.py',
        'default="127.0.0.1", metavar="ADDRESS"',
        'default="0.0.0.0", metavar="ADDRESS"',
    ),
    (
        'kukri/engine/pages.py',
        '        for page in reversed(pages):\n            assert self._n_owners[page] > 0',
        '        for page in pages:\n            assert self._n_owners[page] > 0',
    ),
    (
        'kukri/stages/greeting.py',
        '        if not hmac.compare_digest(proof, _proof(self._token, who, self._own, theirs)):\n'
        '            return b"", False\n',
        '',
    ),
    (
        'kukri/engine/scheduler.py',
        '        elif request.sequence.n_tokens >= request.max_length:',
        '        elif request.sequence.n_tokens > request.max_length:',
    ),
    (
        'kukri/engine/adapters.py',
        '        with self._lock:\n            found = self._find(name)\n            request.use_adapter',
        '        if True:\n            found = self._find(name)\n            request.use_adapter',
    ),
)  # fmt: skip


def drawn(seed: int, n: int) -> list[Fault]:
    """Return `n` faults in statements that are drawn from the whole package, each by one of four means."""
    rng = random.Random(seed)
    statements = [
        (file.relative_to(ROOT).as_posix(), lines)
        for file in sorted((ROOT / "kukri").rglob("*.py"))
        for lines in _statements(file.read_text())
    ]
    found: list[Fault] = []
    while len(found) < n:
        file, (first, last) = rng.choice(statements)
        text = (ROOT / file).read_text()
        lines = text.splitlines(keepends=True)
        old = "".join(lines[first:last])
        made = list(_made(old, rng))
        if text.count(old) == 1 and made:
            kind, new = rng.choice(made)
            with suppress(SyntaxError):
                ast.parse(text.replace(old, new))
                found.append(Fault(file, old, new, kind))
    return found


def _statements(text: str) -> Iterator[tuple[int, int]]:
    """Yield the first line and the line after the last of each statement, of a block that of its head."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno
        if last is not None and last >= node.lineno:
            yield node.lineno - 1, last


def _made(old: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of what can be made of a statement and is still Python."""
    if match := re.match(r"( *)(if|elif|while) (.*):( *#.*)?\n$", old, re.DOTALL):
        yield "negated", f"{match[1]}{match[2]} not ({match[3]}):\n"
    if numbers := list(_NUMBER.finditer(old)):
        match = rng.choice(numbers)
        yield "off by one", f"{old[: match.start()]}{int(match[0]) + 1}{old[match.end() :]}"
    if operators := list(_OPERATOR.finditer(old)):
        match = rng.choice(operators)
        yield "swapped", f"{old[: match.start()]}{_SWAPPED[match[0]]}{old[match.end() :]}"
    if not re.match(r" *(if|elif|else|while|for|with|try|async|match|case|return|@)\b", old):
        yield "dropped", re.match(" *", old)[0] + "pass\n"  # type: ignore[index]


def chosen() -> list[Fault]:
    """Return the faults of `BY_HAND`; each must still be in its file, once."""
    faults = [Fault(file, old, new, "by hand") for file, old, new in BY_HAND]
    lost = [fault for fault in faults if (ROOT / fault.file).read_text().count(fault.old) != 1]
    assert not lost, f"not once in its file: {lost}"
    return faults


class Checkout:
    """A copy of the working tree's tracked files, in which faults stand while the block lasts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, files.decode().split("\0")):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
            target.chmod((ROOT / name).stat().st_mode)

    def failing(
        self, faults: Sequence[Fault], tier: str, tests: Sequence[str], *, all_of_them: bool
    ) -> list[str]:
        """Return tests that fail with the faults: the first, or all; ["?"] if the run itself does."""
        for fault in faults:
            path = self.folder / fault.file
            path.write_text(path.read_text().replace(fault.old, fault.new))
        try:
            return self._run(tier, tests, all_of_them=all_of_them)
        finally:
            for fault in faults:
                (self.folder / fault.file).write_text((ROOT / fault.file).read_text())

    def _run(self, tier: str, tests: Sequence[str], *, all_of_them: bool) -> list[str]:
        stop = [] if all_of_them else ["-x"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", tier, *stop, *tests]
        environment = os.environ | {"PYTHONPATH": str(self.folder)}
        environment.pop("CI", None)  # what cannot be tested here is skipped
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return ["?"]
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        return failed or ["?"] * (done.returncode not in (0, 5))


def importing(file: str) -> list[str]:
    """Return the files of tests that import a module, those of its folder if none does."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    pattern = re.compile(
        rf"^ *(?:from {re.escape(module)} import|import {re.escape(module)}\b|from "
        rf"{re.escape(module.rpartition('.')[0])} import [^\n]*\b{re.escape(module.rpartition('.')[2])}\b)",
        re.MULTILINE,
    )
    tests = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if pattern.search(path.read_text())]
    room = ROOT / "tests" / file.split("/")[1]
    if not tests and room.is_dir():
        return [room.relative_to(ROOT).as_posix()]
    return [path.relative_to(ROOT).as_posix() for path in tests]


def main() -> None:
    """Try the faults, and print how many each tier catches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="where results are kept")
    parser.add_argument("--seed", type=int, default=50)
    parser.add_argument("--drawn", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=180.0, help="begin nothing new after this time")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    faults = [*drawn(options.seed, options.drawn), *chosen()]
    results: dict[str, Any] = json.loads(options.file.read_text()) if options.file.exists() else {}

    def keep(fault: Fault, caught: dict[str, Any]) -> None:
        key = json.dumps(asdict(fault))
        results[key] = results.get(key, {}) | caught
        options.file.write_text(json.dumps(results, indent=1))
        print(f"{fault.kind:10} {fault.file}: {results[key]}", flush=True)

    def known(fault: Fault) -> dict[str, Any]:
        found: dict[str, Any] = results.get(json.dumps(asdict(fault)), {})
        return found

    with tempfile.TemporaryDirectory(prefix="kukri-faults-") as folder:
        checkout = Checkout(Path(folder))
        for fault in faults:
            if not known(fault) and time.monotonic() < deadline and (tests := importing(fault.file)):
                failed = checkout.failing([fault], FIRST, tests, all_of_them=False)
                keep(fault, {"first": failed[0]} if failed else {"near": None})
        for name, tier in (("first", FIRST), ("second", SECOND)):
            left = [fault for fault in faults if not {"first", "second"} & known(fault).keys()]
            left = [fault for fault in left if f"whole {name}" not in known(fault)]
            if not left or time.monotonic() > deadline:
                continue
            failed = checkout.failing(left, tier, [], all_of_them=True)
            assert failed != ["?"], "the run of all faults did not end: try fewer at once, or give it longer"
            for fault in left:
                own = checkout.failing([fault], tier, failed, all_of_them=False) if failed else []
                keep(fault, {name: own[0]} if own else {f"whole {name}": None})

    for kind in ("drawn", "by hand"):
        of_kind = [fault for fault in faults if (fault.kind == "by hand") == (kind == "by hand")]
        n_first = sum("first" in known(fault) for fault in of_kind)
        n_second = sum("second" in known(fault) for fault in of_kind)
        n_survived = sum("whole second" in known(fault) for fault in of_kind)
        print(
            f"{kind}: {len(of_kind)} faults, {n_first} caught by the first tier, {n_second} by the second, "
            f"{n_survived} by neither, {len(of_kind) - n_first - n_second - n_survived} not tried to the end"
        )


if __name__ == "__main__":
    main()
