"""The Python of the pages runs block by block, as a reader would run it, and prints what the page shows."""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import typer.main
from PIL import Image
from safetensors.numpy import save_file

from benchmarks.harness import served
from benchmarks.pictures import picture
from kukri.cli import app

ROOT = Path(__file__).parents[1]
WIDTH, LAYERS, FEATURES = 576, 30, 128  # the default model's, and of autoencoders made here

CLIENT = "from openai import OpenAI\nclient = OpenAI(base_url='http://127.0.0.1:8000/v1', api_key='none')"
MESSAGES = "messages = [{'role': 'user', 'content': 'Hi'}]"
LLM = "from kukri import LLM\nllm = LLM()"
NAMES = """
import numpy as np
prompt, corrupted, clean = (
    llm.tokenizer.encode(f"The capital of {country} is") for country in ("France", "Italy", "France")
)
direction = np.zeros(576, np.float32)
mary, john = llm.tokenizer.encode(" Mary")[0], llm.tokenizer.encode(" John")[0]
"""
SEEING = """
import numpy as np
from kukri import LLM
llm = LLM("seeing")
yes = 5
by_probe = lambda seen: (seen.sum(), np.ones_like(seen))
"""
STORE = """
from kukri.interp.store import write_store
write_store(llm, ["A text of eight tokens or so. " * 40], ["blocks.14.hook_resid_post"], "store", context=64)
train = len
"""
# What a page's text gives its reader: code that runs before the page's first block, or a section's.
GIVEN = {
    "docs/forward-and-heads.md": f"{LLM}\ntoken_ids = [[1, 2, 3]]",
    "docs/howto/structured-output.md": CLIENT,
    "docs/howto/agents.md": CLIENT,
    "docs/howto/tools.md": CLIENT,
    "docs/interp/gradients.md": f"{LLM}\n{NAMES}",
    "docs/interp/gradients.md#Activation stores": STORE,
    "docs/interp/graphs.md": f"{LLM}\nnode = 0\n{NAMES}",
    "docs/interp/images.md": SEEING,
    "docs/interp/over-http.md": f"{CLIENT}\n{MESSAGES}",
    "docs/interp/patching.md": f"{LLM}\n{NAMES}",
    "docs/interp/steer.md": f"{LLM}\n{NAMES}",
    "docs/lora.md": LLM.partition("\n")[0],
    "docs/serving/batches.md": CLIENT,
    "docs/serving/drafts.md": f"{CLIENT}\nsource = 'def parse(x): ...'",
    "docs/serving/embeddings.md": CLIENT,
}
# Models and files that the pages name, and ours.
OURS = {
    "qwen3-1.7b": "smollm2-135m",
    "path/to/SmolVLM-256M-Instruct": "seeing",
    "path/to/colbert": "colbert",
    "path/to/whisper-base": "hearing",
    "path/to/adapter": "adapter",
    "path/to/third": "adapter",
    "path/to/oracle": "adapter",
    "other.gguf": "adapter",
    "model.gguf": "smollm2-135m",
}


class Block(NamedTuple):
    """A block of Python on a page."""

    line: int
    section: str
    code: str
    shown: str | None  # the output that the page shows after it


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text("utf-8")
    pattern = r"^( *)```python\n(.*?)^\1```(?:\n+(?:It prints:\n+)?\1```\n(.*?)^\1```)?|^## (.+?)$"
    found, section = [], ""
    for match in re.finditer(pattern, text, re.S | re.M):
        if match[4]:
            section = match[4]
        else:
            line = text[: match.start()].count("\n") + 2
            shown = textwrap.dedent(match[3]) if match[3] else None
            found.append(Block(line, section, textwrap.dedent(match[2]), shown))
    return found


def pages() -> list[str]:
    """README and the pages that have Python."""
    documents = sorted((ROOT / "docs").rglob("*.md"))
    names = [path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", *documents)]
    return [name for name in names if blocks_of(name)]


PAGES = pages()
# half a minute of processor time together without the first two, which take minutes
SLOW = {f"docs/interp/{name}.md" for name in ("gradients", "graphs", "patching", "steer", "images")}


def test_what_is_given_belongs_to_a_page() -> None:
    """Catches code before a section that was renamed."""
    sections = {f"{page}#{block.section}" for page in PAGES for block in blocks_of(page)} | set(PAGES)
    assert set(GIVEN) <= sections


def imported(code: str) -> set[str]:
    """The packages that a program imports, without Python's own."""
    tree = ast.walk(ast.parse(code))
    names = [
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in tree
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


# What `pip install ".[serve]"` brings, which the pages tell first.
BROUGHT = {"kukri", "numpy", "pydantic"}
PACKAGES = {"langchain_openai": "langchain-openai", "langchain_core": "langchain-openai"}


def test_the_packages_that_code_needs_are_named() -> None:
    """Catches an example that ends in ModuleNotFoundError for who did what the page says."""
    examples = [path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.py")]
    wrong = []
    for page in (*PAGES, *examples):
        text = (ROOT / page).read_text("utf-8")
        told = " ".join(re.findall(r"pip install ([^`\n#)]+)", text))
        codes = [text] if page.endswith(".py") else [block.code for block in blocks_of(page)]
        for name in set().union(*map(imported, codes)) - BROUGHT:
            if not re.search(rf"\b{PACKAGES.get(name, name)}\b", told):
                wrong.append(f"{page} imports {name}, and no `pip install` on it names that")
    assert not wrong


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and files that the pages name."""
    from kukri.interp import ControlVector
    from tests.models.tiny_colbert import save_late
    from tests.sound.tiny_whisper import save_noise, save_tiny, tiny_model
    from tests.vision.seeing import save_seeing

    folder = tmp_path_factory.mktemp("pages")
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Any:
        return (rng.standard_normal(shape) / 20).astype(np.float32)

    def features() -> dict[str, Any]:
        arrays = {"W_enc": random(FEATURES, WIDTH), "W_dec": random(FEATURES, WIDTH)}
        return arrays | {"b_enc": random(FEATURES), "b_dec": random(WIDTH)}

    ControlVector({i: random(WIDTH) for i in range(10, 20)}).save(folder / "happy.gguf")
    hook = "blocks.8.hook_resid_post"
    probe = {"weight": random(2, WIDTH), "bias": random(2)}
    save_file(probe, folder / "truth.safetensors", {"hook_name": hook, "labels": '["yes", "no"]'})
    for name in ("sae", "transcoders", "adapter"):
        (folder / name).mkdir()
    sae = features()
    sae["W_enc"] = np.ascontiguousarray(sae["W_enc"].T)
    save_file(sae, folder / "sae" / "sae_weights.safetensors")
    config = {"architecture": "standard", "d_in": WIDTH, "d_sae": FEATURES, "metadata": {"hook_name": hook}}
    (folder / "sae" / "cfg.json").write_text(json.dumps(config))
    arrays = features()
    for layer in range(LAYERS):
        save_file(arrays, folder / "transcoders" / f"layer_{layer}.safetensors")
    matrix = "base_model.model.model.layers.0.self_attn.o_proj"
    lora = {f"{matrix}.lora_A.weight": random(4, WIDTH), f"{matrix}.lora_B.weight": random(WIDTH, 4)}
    peft = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}
    save_file(lora, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(peft))
    save_seeing(folder / "seeing", n_layers=10)
    for name in ("cat.jpg", "dog.jpg"):
        Image.fromarray(picture(30, 40)).save(folder / name)
    save_tiny(folder / "hearing", tiny_model())
    save_noise(folder / "speech.wav")
    save_late(folder / "colbert", "bert", document_length=64, query_length=40)
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    (folder / "in.jsonl").write_text(json.dumps(line | {"body": body}) + "\n")
    return folder


@pytest.fixture(scope="module")
def url(smollm2_path: Path, files: Path) -> Iterator[str]:
    """A server of the default model, which answers to every name."""
    options = ("--alias", "smollm2-135m", "--any-model", "--interp", "--batch-dir", str(files / "batches"))
    with served(smollm2_path, *options, "--control-vector", f"happy={files / 'happy.gguf'}") as (_, found):
        yield found


@pytest.mark.full
@pytest.mark.usefixtures("compiled_kernels", "default_model")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page for page in PAGES],
)
def test_the_pages_code_runs(page: str, url: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches code that the interface has left behind, a name that comes from nowhere, another output."""
    monkeypatch.chdir(files)
    names: dict[str, Any] = {}
    pending = dict(GIVEN)
    for block in blocks_of(page):
        given = (pending.pop(key, "") for key in (page, f"{page}#{block.section}"))
        code = "".join((*(f"{one}\n" for one in given), block.code)).replace("http://127.0.0.1:8000", url)
        for theirs, ours in OURS.items():
            code = code.replace(theirs, ours)
        output = StringIO()
        with redirect_stdout(output):
            exec(compile(code, f"{page}:{block.line}", "exec"), names)
        if block.shown is not None:
            assert output.getvalue() == block.shown, f"{page}:{block.line} prints something else"


GROUP: Any = typer.main.get_command(app)


def commands() -> Iterator[tuple[str, str]]:
    """The command lines of kukri on the pages, in blocks and in sentences, each with its page."""
    documents = sorted((ROOT / "docs").rglob("*.md"))
    for document in (ROOT / "README.md", *documents):
        text = document.read_text("utf-8").replace("\\\n", " ")
        codes = re.findall(r"^ *```[^`\n]*\n(.*?)^ *```$|`([^`\n]+)`|\n\n    ([^\n]+)$", text, re.S | re.M)
        for line in "\n".join(map("".join, codes)).splitlines():
            if match := re.search(r"(?:^ *|\| )(?:[A-Z_]+=\S+ )*kukri ([^|]+)", line.partition("  #")[0]):
                yield document.relative_to(ROOT).as_posix(), match[1]


def options_of(words: list[str]) -> tuple[Any, set[str], set[str]]:
    """The command that words begin with (taken from them), its options, and those that the words name.

    What comes after `--` is for another program.
    """
    command: Any = GROUP
    if "--" in words:
        del words[words.index("--") :]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    return (
        command,
        known | {"--help"},
        {name for word in words for name in re.findall(r"^--[a-z][\w-]*", word)},
    )


def test_advice_in_errors_names_options_that_exist() -> None:
    """Catches an error that sends its reader to an option which its command does not have."""
    wrong, n_seen = [], 0
    for path in sorted((ROOT / "kukri").rglob("*.py")):
        for line in re.findall(
            r"\bkukri ([a-z-]+ [^:;,`'\"\n]*--[a-z][^:;,`'\"\n]*)", path.read_text("utf-8")
        ):
            command, known, options = options_of(line.split())
            n_seen += command is not GROUP
            if command is not GROUP and options - known:
                wrong.append(f"{path.relative_to(ROOT)}: kukri {line} has no {', '.join(options - known)}")
    assert n_seen > 10
    assert not wrong, "\n".join(wrong)


def test_commands_and_options_on_the_pages_exist() -> None:
    """Catches a command line of the documentation that ends in `No such option` or `No such command`."""
    wrong, n_seen = [], 0
    for page, line in commands():
        words = line.split()
        command, known, options = options_of(words)
        n_seen += len(options)
        if command is GROUP and words and words[0].isalpha() and words[0] not in {"help", "COMMAND"}:
            wrong.append(f"{page}: no command {words[0]!r}: kukri {line}")
        wrong += [f"{page}: no option {name}: kukri {line}" for name in options - known]
    assert n_seen > 100
    assert not wrong, "\n".join(wrong)
