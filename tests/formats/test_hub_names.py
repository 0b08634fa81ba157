"""Names of repositories, and fetching them from a small hub on the loopback interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kukri import LLM
from kukri.errors import FormatError, UnsupportedError
from kukri.formats import hub
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.split import find_mmproj
from kukri.formats.repos import SHORT_NAMES, RepoName, choose, parse_name, untagged
from tests.fake_hub import TOKEN, Hub, running
from tests.formats.test_gguf_split import split
from tests.test_llm_safetensors import make
from tests.tiny_gguf import write_tiny

DIRECTORY = {
    "README.md": b"x" * 1000,
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"pickle",
}
SHARDED = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": b"{}",
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "original/model-00001-of-00001.safetensors": b"other",
}
GGUF = {
    "README.md": b"x",
    "Tiny-1B-Q4_K_M.gguf": b"GGUF q4km",
    "Tiny-1B-Q4_K_S.gguf": b"GGUF q4ks",
    "Tiny-1B-Q8_0.gguf": b"GGUF q8",
    "mmproj-Tiny-F16.gguf": b"GGUF projector",
}


ENCODER = {
    **DIRECTORY,
    "modules.json": b"[]",
    "sentence_bert_config.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "2_Dense/config.json": b"{}",
    "2_Dense/model.safetensors": b"dense",
    "2_Dense/pytorch_model.bin": b"pickle",
    "onnx/config.json": b"{}",
}


@pytest.fixture
def fake(tmp_path):
    """The hub; `resolve` below points huggingface_hub at it alone."""
    made = Hub(
        {
            **{"org/dir": DIRECTORY, "org/shards": SHARDED, "org/encoder": ENCODER},
            **{"org/tiny-GGUF": GGUF, "org/gated": dict(DIRECTORY)},
        }
    )
    made.gated.add("org/gated")
    made.home = str(tmp_path / "hf")
    with running(made):
        yield made


def resolve(fake: Hub, model: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`hub.resolve` in a process of its own, since huggingface_hub reads its settings once."""
    code = (
        "import sys; from kukri.errors import KukriError; from kukri.formats import hub\n"
        "try: print(hub.resolve(sys.argv[1]))\n"
        "except KukriError as error: print(type(error).__name__, error)"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_ENDPOINT": fake.url, "HF_HOME": fake.home, "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    command = [sys.executable, "-c", code, model]
    return subprocess.run(command, env={**kept, **settings}, capture_output=True, text=True, check=True)


def resolved(fake: Hub, model: str, **environment: str) -> Path:
    done = resolve(fake, model, **environment)
    assert Path(done.stdout.strip()).exists(), done.stdout + done.stderr
    return Path(done.stdout.strip())


def refused(fake: Hub, model: str, **environment: str) -> str:
    done = resolve(fake, model, **environment)
    assert done.stdout.count("\n") == 1, done.stdout
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("org/repo", RepoName("org/repo")),
        ("hf:org/repo", RepoName("org/repo")),
        ("hf://org/repo", RepoName("org/repo")),
        ("https://huggingface.co/org/repo/", RepoName("org/repo")),
        ("org/re.po-1:Q4_K_M", RepoName("org/re.po-1", choice="Q4_K_M")),
        ("org/repo@v1.0:a/b.gguf", RepoName("org/repo", "v1.0", "a/b.gguf")),
        ("org/repo:x.gguf", RepoName("org/repo", choice="x.gguf")),
        ("hf:org/m.gguf", RepoName("org/m.gguf")),
        ("nowhere/m.gguf", None),
        ("smollm2-135m", None),
        ("./org/repo", None),
        ("../repo", None),
        ("org/..", None),
        ("/org/repo", None),
        ("a/b/c", None),
        ("org/repo:", None),
        ("", None),
    ],
)
def test_names_are_read(text, want):
    """Catches a path taken for a repository, or the other way round."""
    assert parse_name(text) == want


@pytest.mark.full
def test_an_encoder_comes_with_its_pooling_and_dense_layers(fake):
    """Without them, another pooling than the checkpoint's would be computed, and no error said so."""
    directory = resolved(fake, "org/encoder")
    found = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    unwanted = {"README.md", "consolidated.safetensors", "pytorch_model.bin", "2_Dense/pytorch_model.bin"}
    assert found == set(ENCODER) - unwanted - {"onnx/config.json"}


def test_code_of_a_repository_is_neither_fetched_nor_run(tmp_path):
    """Catches what `trust_remote_code` does: a class of config.json's auto_map that is imported."""
    files = [*DIRECTORY, "modeling_evil.py", "configuration_evil.py", "tokenizer.py", "training_args.bin"]
    assert not [file for file in choose(RepoName("org/repo"), files) if file.endswith((".py", ".bin"))]
    directory, _ = make(tmp_path / "model", "llama")
    mark = tmp_path / "ran"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py"):
        (directory / name).write_text(f"open({str(mark)!r}, 'w').write('ran')\n")
    for name in ("config.json", "tokenizer_config.json"):
        stated = json.loads((directory / name).read_text())
        classes = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
        stated["auto_map"] = {one: ["configuration_evil.A", "modeling_evil.B"] for one in classes}
        (directory / name).write_text(json.dumps({**stated, "trust_remote_code": True}))
    with LLM(directory, backend="reference") as llm:
        assert llm.generate("a", temperature=0, max_tokens=2).token_ids
    assert not mark.exists()
    assert not [name for name in sys.modules if "evil" in name]


def test_short_names_are_repositories():
    """Catches a typing error in the table, and a name that hides one of our own."""
    for name, repo in SHORT_NAMES.items():
        assert parse_name(name) == RepoName(repo)
        assert name not in hub.MODELS
        assert name == name.lower()


def test_the_right_files_are_chosen():
    """Catches weights fetched twice, Q4_K taken for Q4_K_M, a projector or a part taken for a model."""
    assert choose(RepoName("o/r"), DIRECTORY) == ["config.json", "tokenizer.json", "model.safetensors"]
    assert choose(RepoName("o/r"), ENCODER) == [
        *("config.json", "tokenizer.json", "modules.json", "sentence_bert_config.json"),
        *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
        "model.safetensors",
    ]
    assert choose(RepoName("o/r"), SHARDED)[2:] == [
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    for choice in ("Q4_K_M", "q4_k_m", "Tiny-1B-Q4_K_M.gguf"):
        assert choose(RepoName("o/r", choice=choice), GGUF) == ["Tiny-1B-Q4_K_M.gguf", "mmproj-Tiny-F16.gguf"]
    several = ["q/m-Q8_0.gguf", "q/mmproj-F32.gguf", "q/mmproj-BF16.gguf", "mmproj-F16.gguf"]
    assert choose(RepoName("o/r"), several) == ["q/m-Q8_0.gguf", "q/mmproj-BF16.gguf"]
    with pytest.raises(
        UnsupportedError, match="o/r:Q4_K has no Q4_K: choose one of o/r:Q4_K_M, o/r:Q4_K_S, o/r:Q8_0"
    ):
        choose(RepoName("o/r", choice="Q4_K"), GGUF)
    with pytest.raises(UnsupportedError, match="o/r holds several models: choose one of o/r:Q4_K_M, "):
        choose(RepoName("o/r"), GGUF)
    two = ["a-Q8_0.gguf", "b-Q8_0.gguf"]
    with pytest.raises(
        UnsupportedError, match=r"several models: choose one of o/r:a-Q8_0\.gguf, o/r:b-Q8_0\.gguf"
    ):
        choose(RepoName("o/r", choice="Q8_0"), two)
    parts = ["m-Q8_0-00002-of-00002.gguf", "m-Q8_0-00001-of-00002.gguf"]
    assert choose(RepoName("o/r"), parts) == parts[::-1]
    with pytest.raises(
        UnsupportedError, match=r"a supported \.gguf file or model\.safetensors was not found"
    ):
        choose(RepoName("o/r"), ["README.md", "config.json", "pytorch_model.bin"])


@pytest.mark.full
def test_a_directory_is_fetched_once_and_read_without_the_hub(fake):
    """Catches files fetched that nobody reads, or again; and a cached model that needs a network."""
    path = resolved(fake, "org/dir")
    assert sorted(os.listdir(path)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert fake.n_downloads == 3
    assert resolved(fake, "hf:org/dir") == path
    assert fake.n_downloads == 3
    asked = len(fake.requests)
    assert resolved(fake, "org/dir", HF_HUB_OFFLINE="1") == path
    assert len(fake.requests) == asked
    assert resolved(fake, "org/dir", HF_ENDPOINT="http://127.0.0.1:9") == path
    fake.status = 500
    assert resolved(fake, "org/dir") == path


@pytest.mark.full
def test_shards_come_with_their_index(fake):
    """Catches a sharded checkpoint of one shard."""
    path = resolved(fake, "org/shards@main")
    assert sorted(os.listdir(path)) == sorted(name for name in SHARDED if "/" not in name)


@pytest.mark.representative(2)
def test_one_file_of_a_gguf_repository(fake):
    """Catches all types fetched for one, a model without its encoder, or a bar drawn into a pipe."""
    done = resolve(fake, "org/tiny-GGUF:q8_0")
    path = Path(done.stdout.strip())
    assert path.read_bytes() == b"GGUF q8"
    encoder = find_mmproj(path)
    assert encoder is not None
    assert encoder.read_bytes() == b"GGUF projector"
    assert fake.n_downloads == 2
    assert "choose one of org/tiny-GGUF:Q4_K_M, org/tiny-GGUF:Q4_K_S, org/tiny-GGUF:Q8_0" in refused(
        fake, "org/tiny-GGUF"
    )


@pytest.mark.full
def test_all_parts_of_a_split_model(fake, tmp_path):
    """Catches a model that opens from a directory and not from the hub's cache, where files are links."""
    (tmp_path / "parts").mkdir()
    whole = write_tiny(tmp_path / "tiny.gguf")
    parts = split(whole, tmp_path / "parts", split_max_tensors=7)
    names = [f"q/{path.name.replace('m-', 'm-F32-', 1)}" for path in parts]
    fake.repos["org/split"] = {
        **{name: path.read_bytes() for name, path in zip(names, parts)},
        "m-Q8_0.gguf": b"another",
    }
    path = resolved(fake, "org/split:F32")
    assert path.name == "m-F32-00001-of-00003.gguf"
    assert fake.n_downloads == 3
    with GGUFFile(path) as model, GGUFFile(whole) as single:
        assert model.tensors.keys() == single.tensors.keys()
        assert len(model.files) == 3
    del fake.repos["org/split"][names[1]]
    assert "incomplete: its part q/m-F32-00002-of-00003.gguf was not found" in refused(fake, "org/split:F32")


@pytest.mark.full
def test_the_token_reaches_the_hub(fake):
    """Catches a gated model that cannot be had with a token, or a word about it without one."""
    message = refused(fake, "org/gated")
    assert message.startswith(f"DownloadError org/gated is gated: accept its terms at {fake.url}/org/gated")
    assert (resolved(fake, "org/gated", HF_TOKEN=TOKEN) / "config.json").is_file()


@pytest.mark.full
def test_what_is_not_there_is_one_clear_line(fake):
    """Catches a traceback of huggingface_hub's, or minutes of retries."""
    assert f"the repository org/nothing or its file was not found at {fake.url}" in refused(
        fake, "org/nothing"
    )
    assert "the revision 'v9' of org/dir was not found" in refused(fake, "org/dir@v9")
    del fake.repos["org/shards"]["tokenizer.json"]
    offline = refused(fake, "org/dir", HF_HUB_OFFLINE="1")
    assert "not in the cache" in offline
    assert "unset HF_HUB_OFFLINE" in offline
    down = refused(fake, "org/dir", HF_ENDPOINT="http://127.0.0.1:9")
    assert "cannot fetch org/dir from http://127.0.0.1:9 and it is not in the cache" in down
    assert "check the network and HF_ENDPOINT" in down
    fake.status = 500
    assert "try again later" in refused(fake, "org/dir")


def test_an_unknown_name_says_where_names_are():
    """Catches a short name that nobody can find, and an error that is a list of all of them."""
    with pytest.raises(UnsupportedError, match="'smolm3-3b' was not found: did you mean smollm3-3b"):
        hub.resolve("smolm3-3b")
    with pytest.raises(UnsupportedError, match="`kukri list --all` shows, org/repo") as caught:
        hub.resolve("zzzz")
    assert len(str(caught.value)) < 120
    with pytest.raises(FormatError, match="was not found"):
        hub.resolve(Path("org/repo"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("qwen3:0.6b", "qwen3-0.6b"),
        ("llama3.2:1b", "llama-3.2-1b"),
        ("gemma3:270m", "gemma-3-270m"),
        ("gpt-oss:20b", "gpt-oss-20b"),
        ("smollm2:135m", "smollm2-135m"),
        ("gemma:31b", "gemma:31b"),  # not gemma-3-1b
        ("qwen3:", "qwen3:"),
        ("qwen3:7b", "qwen3:7b"),
        ("org/qwen3:0.6b", "org/qwen3:0.6b"),
    ],
)
def test_ollamas_names_are_known(text, name):
    """Catches a tag that is not read, or stands for another size."""
    assert untagged(text, [*hub.MODELS, *SHORT_NAMES]) == name
    assert hub.is_known(text) == (name != text)
    if name in SHORT_NAMES:
        assert parse_name(text) == parse_name(name)
