"""Places and conditions: which tokens an intervention edits, said in data."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import RequestError
from kukri.interp import Probe
from kukri.interp.interventions.positions import Prompt, Spans, find_places
from kukri.sampling import SamplingParams
from tests.interp.interventions.test_interventions import sae_files
from tests.tiny_gguf import write_tiny

PIECES = [b"<s>", b"The", b" Par", b"is", b" of", b" \xc3", b"\xa9", b" Paris", b"", b" end"]
PROMPT = Prompt(np.arange(len(PIECES), dtype=np.int32), PIECES.__getitem__)
N = len(PIECES)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
D = 64
DIRECTION = np.random.default_rng(3).standard_normal(D).astype(np.float32)
PROBE = Probe(
    "blocks.0.hook_resid_post", np.random.default_rng(4).standard_normal((2, D)), None, ["yes", "no"]
)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("all", [*range(14)]),
        ("prompt", [*range(N)]),
        ("last", [N - 1]),
        ("generated", [10, 11, 12, 13]),
        (3, [3]),
        (-1, [N - 1]),
        (12, [12]),
        ([0, -2, [3, 6], [5, 7]], [0, 3, 4, 5, 6, 8]),
        ([[-2, None]], [8, 9, 10, 11, 12, 13]),
        ([[2, -6]], [2, 3]),
        ({"text": "Paris"}, [2, 3, 7]),
        ({"text": "Paris", "tokens": "last"}, [3, 7]),
        ({"text": "Paris", "tokens": "first"}, [2, 7]),
        ({"text": "Paris", "occurrence": 0}, [2, 3]),
        ({"text": "Paris", "occurrence": -1, "tokens": "last"}, [7]),
        ({"text": "\u00e9"}, [5, 6]),
        ({"text": "s>The P"}, [0, 1, 2]),
        ({"steps": 0}, [N - 1]),
        ({"steps": [1, 3]}, [10, 11]),
        ({"steps": [2, None]}, [11, 12, 13]),
    ],
    ids=str,
)  # fmt: skip
def test_positions_of_a_place(given, wanted):
    """A span one too long, a negative number of another end, a text in several tokens or in part of one."""
    spans = find_places(given, PROMPT)
    assert np.flatnonzero(spans.mask(0, 14)).tolist() == wanted
    pieces = np.concatenate([spans.mask(start, 3) for start in range(0, 15, 3)])
    assert np.flatnonzero(pieces[:14]).tolist() == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("first", "'positions' must be one of all"),
        (True, "'positions' must be"),
        ([], "'positions' must be"),
        (None, "'positions' must be"),
        (1.5, "'positions' must be"),
        ([1.5], "a position must be a number or "),
        ([[1, 2, 3]], "a position must be a number or "),
        ([True], "a position must be a number or "),
        (-N - 1, "must be within the prompt of 10"),
        (1 << 31, "must be within the prompt of 10"),
        ([[5, 5]], "must have positions"),
        ({"steps": -1}, "must be within the prompt"),
        ({"text": "London"}, "was not found in the prompt"),
        ({"text": ""}, "1 to 1000 characters"),
        ({"text": "x" * 1001}, "1 to 1000 characters"),
        ({"text": "Paris", "tokens": "some"}, "'tokens' must be"),
        ({"text": "Paris", "occurrence": 2}, "'occurrence' must be a number within 2"),
        ({"text": "Paris", "occurrence": "1"}, "'occurrence' must be a number within 2"),
        ({"word": "Paris"}, "must have text or steps"),
        ([0] * 4097, "at most 4096"),
    ],
)  # fmt: skip
def test_what_is_no_place(given, message):
    """A place that is taken for another, or fails as something of Python's."""
    with pytest.raises(RequestError, match=message):
        find_places(given, PROMPT)


def test_spans_are_merged():
    """A position that is edited twice because two spans have it."""
    assert Spans([(4, 6), (0, 2), (5, 9), (2, 3), (3, 3)]).spans == ((0, 3), (4, 9))


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(request, tmp_path_factory):
    path = write_tiny(tmp_path_factory.mktemp("places") / "tiny.gguf")
    options = {"n_threads": 2, "max_step_tokens": 24, "max_requests": 8, "probes": {"truth": PROBE}}
    with LLM(path, backend=request.param, **options) as opened:
        yield opened


def ids_of(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, n).tolist()


def edited(llm, ids, hook, name="blocks.0.hook_resid_post"):
    """Tokens with a hook of Python, given the value and the positions of its tokens."""

    def at(value, hook_point):
        hook(value[0], hook_point.start + np.arange(value.shape[1]))

    hooks = [(name, lambda value, hook: at(value, hook))]
    return llm.generate_with_hooks(ids, GREEDY, fwd_hooks=hooks)[0].token_ids


def test_edits_at_places_are_those_of_hooks(llm):
    """Positions of a chunk taken for those of the prompt: 30 tokens are two steps here."""
    ids = ids_of(30, 1)
    chosen = {0, 22, 25, 26, 29, 31, 32}
    place = [0, 22, [25, 27], -1, [31, 33]]

    def add(value, positions):
        value[np.isin(positions, list(chosen))] += 3 * DIRECTION

    edit = {"op": "add", "name": "resid_post0", "vector": DIRECTION, "strength": 3, "positions": place}
    result = llm.generate(ids, GREEDY, interventions=[edit])
    assert result.token_ids == edited(llm, ids, add) != llm.generate(ids, GREEDY).token_ids


@pytest.mark.parametrize("op", ["add", "replace"])
def test_vectors_of_the_rows_length(llm, op):
    """A vector of its own length, or of another row's."""
    ids = ids_of(30, 2)
    unit = DIRECTION / np.linalg.norm(DIRECTION)
    strength, more = (2, {"strength": 2}) if op == "add" else (1, {})

    def edit(value, positions):
        lengths = np.linalg.norm(value, axis=-1, keepdims=True)
        value[...] = (value if op == "add" else 0) + strength * lengths * unit

    given = {"op": op, "name": "resid_post0", "vector": DIRECTION, "match_norm": True} | more
    result = llm.generate(ids, GREEDY, interventions=[given])
    assert result.token_ids == edited(llm, ids, edit)


@pytest.mark.parametrize("limit", ["above", "below"])
def test_edits_while_a_probe_says_so(llm, limit):
    """A condition read of another token, of the edited value, or of the step before."""
    ids = ids_of(30, 3)

    def edit(value, positions):
        holds = PROBE.scores(value)[:, 1] > 0.5
        value[holds if limit == "above" else ~holds] += 2 * DIRECTION

    when = {"probe": "truth", "label": "no", limit: 0.5}
    given = {"op": "add", "name": "resid_post0", "vector": DIRECTION, "strength": 2, "when": when}
    result = llm.generate(ids, GREEDY, interventions=[given])
    assert result.token_ids == edited(llm, ids, edit) != llm.generate(ids, GREEDY).token_ids


def test_a_condition_of_an_earlier_layer(llm):
    """A mask of one layer that another layer's edit does not see."""
    ids = ids_of(30, 4)
    seen = {}

    def keep(value, hook):
        seen[hook.start] = PROBE.scores(value[0])[:, 0] > 0

    def edit(value, hook):
        value[0][seen[hook.start]] = 0

    hooks = [("blocks.0.hook_resid_post", keep), ("blocks.1.hook_mlp_out", edit)]
    wanted = llm.generate_with_hooks(ids, GREEDY, fwd_hooks=hooks)[0].token_ids
    when = {"probe": "truth", "label": "yes", "above": 0}
    given = {"op": "ablate", "name": "mlp_out1", "when": when}
    assert llm.generate(ids, GREEDY, interventions=[given]).token_ids == wanted


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ({"probe": "truth", "above": 0}, "requires a label of the probe: 'yes, no'"),
        ({"probe": "lies", "above": 0}, "the probe .* was not found"),
        ({"probe": "truth", "label": "yes"}, "'when' requires above or below, a number"),
        ({"probe": "truth", "label": "yes", "above": "0"}, "'when' requires above or below, a number"),
        ({"label": "yes", "above": 0}, "requires a probe, an sae"),
        ({"probe": "truth", "feature": 1, "label": "yes", "above": 0}, "requires a label of the probe"),
        ({"sae": "s", "feature": 0, "above": 0}, "the sae .* was not found"),
        ("truth > 0", "'when' must have probe and label, or sae and feature, and"),
    ],
)  # fmt: skip
def test_what_is_no_condition(llm, when, message):
    """A condition that never holds, instead of an error."""
    edit = {"op": "ablate", "name": "resid_post1", "when": when}
    with pytest.raises(RequestError, match=message):
        llm.generate([5, 6], GREEDY, interventions=[edit])


def test_a_condition_after_its_edit(llm):
    """A condition that is not known yet when the edit is made."""
    edit = {"op": "ablate", "name": "resid_pre0", "when": {"probe": "truth", "label": "yes", "above": 0}}
    with pytest.raises(RequestError, match="'when' must read what comes before the edit of"):
        llm.generate([5, 6], GREEDY, interventions=[edit])


def test_runs_of_whole_texts(llm):
    """Edits of another text's rows in a batch of unequal lengths; hooks that see what was there before."""
    texts = [ids_of(9, 6), ids_of(30, 7), ids_of(4, 8)]
    edit = {"op": "add", "name": "resid_post0", "vector": DIRECTION, "positions": [0, -1]}
    seen = []

    def add(value, hook):
        for row, ids in zip(value, texts):
            row[[0, len(ids) - 1]] += DIRECTION

    def look(value, hook):
        seen.append(value.copy())

    hook = ("blocks.0.hook_resid_post", look)
    wanted, cache = llm.run_with_cache(texts, names=["resid_post0"], fwd_hooks=[(hook[0], add)])
    found, same = llm.run_with_cache(texts, names=["resid_post0"], interventions=[edit])
    assert (found == wanted).all()
    assert (same["resid_post0"] == cache["resid_post0"]).all()
    hooked = llm.run_with_hooks(texts, fwd_hooks=[hook], interventions=[edit])
    assert (hooked == wanted).all()
    assert (seen[0] == cache["resid_post0"]).all()
    with pytest.raises(RequestError, match="'interventions' of a run cannot capture: use names"):
        llm.run_with_hooks(texts, interventions=[{"op": "capture", "name": "resid_post0"}])


def test_captures_at_places(llm):
    """Captures of a span where single positions were asked for."""
    ids = ids_of(30, 9)
    given = [{"op": "capture", "name": "resid_post0", "positions": [2, 5, [28, 33]]}]
    every = [{"op": "capture", "name": "resid_post0"}]
    name = "blocks.0.hook_resid_post"
    some = llm.generate(ids, GREEDY, interventions=given).activations[name]
    whole = llm.generate(ids, GREEDY, interventions=every).activations[name]
    assert (some == whole[:, [2, 5, 28, 29, 30, 31, 32]]).all()


def test_the_command_line(tmp_path, capsys):
    """An option that is not passed on, and errors that do not name it."""
    from typer.testing import CliRunner

    from kukri.cli import app

    path = str(write_tiny(tmp_path / "tiny.gguf"))
    run = ["run", "-m", path, "--raw", "--json", "--temperature", "0", "-n", "8", "hello there"]
    edit = {"op": "scale", "name": "resid_post0", "strength": -1, "positions": {"text": "there"}}
    (tmp_path / "edit.json").write_text(json.dumps([edit]))
    plain = CliRunner().invoke(app, run)
    found = [
        CliRunner().invoke(app, [*run, "--intervention", given])
        for given in (json.dumps(edit), f"@{tmp_path / 'edit.json'}")
    ]
    texts = [json.loads(one.stdout)["text"] for one in (plain, *found)]
    assert texts[0] != texts[1] == texts[2]
    sae_files(tmp_path / "sae")
    feature = {"op": "clamp", "sae": "s", "features": [3], "strength": 90}
    steered = [*run, "--sae", f"s={tmp_path / 'sae'}", "--intervention", json.dumps(feature)]
    assert json.loads(CliRunner().invoke(app, steered).stdout)["text"] != texts[0]
    for given, message in (
        ("{", "must be JSON"),
        ("@nowhere", "No such file"),
        ('{"op": "read"}', "adds, scales"),
    ):
        wrong = CliRunner().invoke(app, [*run, "--intervention", given])
        assert wrong.exit_code == 2
        assert "--intervention" in wrong.output
        assert message in wrong.output
