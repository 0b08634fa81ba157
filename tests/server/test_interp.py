"""Steering, readouts and activations over HTTP: who may, how much, and what is refused."""

from __future__ import annotations

import base64
import json
import random
import string
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from kukri import LLM
from kukri.errors import ConfigError
from kukri.interp import Probe
from kukri.sampling import SamplingParams
from kukri.server.keys import KeyRing
from kukri.server.settings import ServerSettings
from tests.lazy_imports import lazy_imports
from tests.server.bodies import check_error
from tests.server.live_server import serving
from tests.tiny_gguf import write_tiny

with lazy_imports():
    import openai

D = 64
DIRECTION = np.random.default_rng(0).standard_normal(D).astype(np.float32) * 8
KEYS = ("plain", "alice researcher scope=interp")
ALLOWED = {"authorization": "Bearer researcher"}
ASK = {"model": "smol", "prompt": [5, 6, 7, 8, 9], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
STEER = [{"op": "add", "control_vector": "happy", "strength": 2.5}]
READ = [{"op": "read", "probe": "truth"}]


@pytest.fixture(scope="module")
def open_llm(tmp_path_factory):
    """Opens the model: an engine belongs to a server, or to who calls it."""
    path = write_tiny(tmp_path_factory.mktemp("served") / "tiny.gguf")
    folder, rng = tmp_path_factory.mktemp("transcoder"), np.random.default_rng(1)
    matrices = {name: rng.standard_normal((30, D)).astype(np.float32) for name in ("W_enc", "W_dec")}
    zeros = {"b_enc": np.zeros(30, np.float32), "b_dec": np.zeros(D, np.float32)}
    safetensors.numpy.save_file(matrices | zeros, folder / "layer_1.safetensors")
    probe = Probe("blocks.0.hook_resid_post", np.ones((1, D)))
    return lambda: LLM(
        path,
        backend="reference",
        max_requests=4,
        control_vectors={"happy": {1: DIRECTION}},
        probes={"truth": probe},
        transcoders={"t": folder},
    )


@pytest.fixture(scope="module")
def llm(open_llm):
    """The same model without a server: what answers have to be."""
    with open_llm() as opened:
        yield opened


@pytest.fixture(scope="module")
def served(open_llm):
    with (
        open_llm() as llm,
        serving(llm, api_keys=KEYS, has_interp=True, max_activation_bytes=200_000) as server,
    ):
        yield server


def ask(served, path="/v1/completions", headers=ALLOWED, **fields):
    with served.http() as http:
        return http.post(path, json={**ASK, **fields}, headers=headers)


def test_the_openai_client_steers_by_extra_body(served, llm):
    """Fields that the client's own form has no place for, lost on the way in or out."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="researcher", max_retries=0)
    expected = llm.generate(ASK["prompt"], temperature=0, max_tokens=6, ignore_eos=True, interventions=STEER)
    plain = llm.generate(ASK["prompt"], temperature=0, max_tokens=6, ignore_eos=True)
    assert expected.text != plain.text
    fields = {name: ASK[name] for name in ("model", "prompt", "max_tokens", "temperature")}
    own = {"ignore_eos": True}
    found = client.completions.create(**fields, extra_body={**own, "interventions": STEER})
    assert found.choices[0].text == expected.text
    assert client.completions.create(**fields, extra_body=own).choices[0].text == plain.text
    vector = base64.b64encode((2.5 * DIRECTION).astype("<f4").tobytes()).decode()
    by_vector = [{"op": "add", "name": "blocks.1.hook_resid_post", "vector": vector}]
    found = client.completions.create(**fields, extra_body={**own, "interventions": by_vector})
    assert found.choices[0].text == expected.text
    two = [vector, (-2.5 * DIRECTION).tolist()]  # one for each position
    by_vectors = [{"op": "add", "name": "blocks.1.hook_resid_post", "vector": two, "positions": [0, -1]}]
    found = client.completions.create(**fields, extra_body={**own, "interventions": by_vectors})
    each = [
        {
            "op": "add",
            "name": "blocks.1.hook_resid_post",
            "vector": sign * 2.5 * DIRECTION,
            "positions": place,
        }
        for sign, place in ((1, 0), (-1, -1))
    ]
    wanted = llm.generate(ASK["prompt"], temperature=0, max_tokens=6, ignore_eos=True, interventions=each)
    assert found.choices[0].text == wanted.text
    messages = [{"role": "user", "content": "Hi"}]
    body = {**own, "interventions": [*STEER, *READ]}
    chat = client.chat.completions.create(
        model="smol", messages=messages, max_tokens=5, temperature=0, extra_body=body
    )
    steered = llm.chat(messages, temperature=0, max_tokens=5, ignore_eos=True, interventions=[*STEER, *READ])
    assert chat.choices[0].message.content == steered.text
    n_prompt = chat.usage.prompt_tokens
    assert [one["position"] for one in chat.choices[0].readouts] == list(range(n_prompt + 4))
    chunks = list(
        client.chat.completions.create(
            model="smol", messages=messages, max_tokens=5, temperature=0, stream=True, extra_body=body
        )
    )
    streamed = [one for chunk in chunks for one in getattr(chunk.choices[0], "readouts", [])]
    whole = chat.choices[0].readouts
    assert [(one["position"], one["token_id"]) for one in streamed] == [
        (one["position"], one["token_id"]) for one in whole
    ]
    values = [one.values["truth"]["score"] for one in steered.readouts]
    np.testing.assert_allclose([one["values"]["truth"]["score"] for one in streamed], values, rtol=1e-5)


MESSAGES = [{"role": "user", "content": "Hi"}]
CALM = {"temperature": 0, "max_tokens": 5}
OTHERS = {  # the other chats: a body, and where the text of an answer is
    "/v1/responses": (
        {"input": MESSAGES, "temperature": 0, "max_output_tokens": 5},
        lambda body: body["output"][0]["content"][0]["text"],
    ),
    "/v1/messages": ({"messages": MESSAGES, **CALM}, lambda body: body["content"][0]["text"]),
    "/api/chat": (
        {"messages": MESSAGES, "options": {"temperature": 0, "num_predict": 5}},
        lambda body: body["message"]["content"],
    ),
    "/api/generate": (
        {"prompt": "Hi", "options": {"temperature": 0, "num_predict": 5}},
        lambda body: body["response"],
    ),
}


@pytest.mark.parametrize(
    "one",
    [
        {"op": "clamp", "transcoder": "t", "layer": 1, "features": [3, 4], "strength": 30},
        {"op": "replace", "transcoder": "t", "layers": [1, 1]},
        {"op": "scale", "transcoder": "t", "features": list(range(30)), "strength": -9},
    ],
)
def test_features_over_http(served, llm, one):
    """A field of features that the body has no place for, and a request that changes its neighbours."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    plain, steered = (llm.generate(ASK["prompt"], params, interventions=given) for given in ([], [one]))
    read = {"op": "read", "transcoder": "t", "layer": 1, "top_k": 2}
    with ThreadPoolExecutor(3) as threads:
        answers = [*threads.map(lambda i: ask(served, interventions=i).json(), ([one], [], [read]))]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == [steered.text, plain.text, plain.text]
    assert steered.token_ids != plain.token_ids
    readouts = answers[2]["choices"][0]["readouts"]
    assert len(readouts) == 10
    assert all(len(one["values"]["t.1"]) == 2 for one in readouts)
    wrong = ask(served, interventions=[one | {"features": [30]}])
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "interventions[0]"


def last_of(text: str, stream: bool) -> dict[str, Any]:
    """The whole answer, or what the last event or line that has captures says of it."""
    if not stream:
        return json.loads(text)
    lines = [line.removeprefix("data: ") for line in text.splitlines() if "activations" in line]
    assert len(lines) == 1
    found = json.loads(lines[0])
    return found["response"] if found.get("type") == "response.incomplete" else found


@pytest.mark.parametrize("path", OTHERS)
def test_the_other_chats_are_steered(served, llm, path):
    """Interventions that one API drops, does for anybody, or whose findings it does not give back."""
    asked, text_of = OTHERS[path]
    wanted = [*STEER, *READ, {"op": "capture", "name": "z0"}]
    body = {"model": "smol", "stream": False, **asked}
    steered = llm.chat(MESSAGES, **CALM, interventions=wanted)
    assert steered.text != llm.chat(MESSAGES, **CALM).text
    with served.http(headers=ALLOWED) as http:
        answer = http.post(path, json={**body, "interventions": wanted})
        assert answer.status_code == 200, answer.text
        assert text_of(answer.json()) == steered.text
        streamed = http.post(path, json={**body, "stream": True, "interventions": wanted})
        for found in (last_of(answer.text, False), last_of(streamed.text, True)):
            assert [one["position"] for one in found["readouts"]] == [r.position for r in steered.readouts]
            z = safetensors.numpy.load(base64.b64decode(found["activations"]["data"]))
            expected = steered.activations["blocks.0.attn.hook_z"]
            np.testing.assert_allclose(z["blocks.0.attn.hook_z"], expected, rtol=1e-4, atol=1e-5)
        assert text_of(http.post(path, json=body).json()) == llm.chat(MESSAGES, **CALM).text
        wrong = http.post(path, json={**body, "interventions": [{"op": "add", "name": "z9"}]})
        assert wrong.status_code == 400
        assert "z9" in wrong.text or "hook_z" in wrong.text
        many = [
            {"op": "capture", "name": f"{part}{i}"} for part in ("pattern", "attn_scores") for i in (0, 1)
        ]
        long = json.loads(json.dumps(body).replace("Hi", "Hi " * 28))
        assert http.post(path, json={**long, "interventions": many}).status_code == 413
    with served.http(headers={"authorization": "Bearer plain"}) as http:
        refused = http.post(path, json={**body, "interventions": STEER})
        assert refused.status_code == 403
        assert "scope" in refused.text


@pytest.mark.parametrize(
    "place",
    [
        {"positions": [0, -2, [5, None]]},
        {"positions": {"steps": [1, 3]}},
        {"positions": -1, "match_norm": True},
        {"when": {"probe": "truth", "above": 0}},
    ],
    ids=str,
)
def test_places_over_http(served, llm, place):
    """A place or a condition that a schema drops or turns into another."""
    edit = {"op": "add", "name": "resid_post0", "vector": DIRECTION.tolist(), "strength": 3.0, **place}
    expected = llm.generate(ASK["prompt"], temperature=0, max_tokens=6, ignore_eos=True, interventions=[edit])
    answer = ask(served, interventions=[edit])
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected.text
    wrong = ask(served, interventions=[edit | {"positions": {"text": "nowhere to be found"}}])
    assert wrong.status_code == 400
    assert "was not found in the prompt" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_captures_come_as_safetensors(served, llm, stream):
    """Captures of a stream that are lost, rows of another answer."""
    names = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z"]
    captures = [
        {"op": "capture", "name": names[0]},
        {"op": "capture", "name": "z1", "positions": "generated"},
    ]
    answer = ask(served, interventions=captures, stream=stream)
    assert answer.status_code == 200
    if stream:
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
        choices = [json.loads(line)["choices"][0] for line in lines if line and line != "[DONE]"]
        (choice,) = [choice for choice in choices if "activations" in choice]
    else:
        choice = answer.json()["choices"][0]
    found = safetensors.numpy.load(base64.b64decode(choice["activations"]["data"]))
    assert choice["activations"]["names"] == names
    assert found.keys() == set(names)
    plain = llm.generate(ASK["prompt"], temperature=0, max_tokens=6, ignore_eos=True)
    _, cache = llm.run_with_cache([*ASK["prompt"], *plain.token_ids[:-1]], names=names)
    np.testing.assert_allclose(found[names[0]], cache[names[0]], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[names[1]], cache[names[1]][:, 5:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_activations_of_texts(served, llm, dtype):
    """Padding in the wrong place, texts that are mixed up, numbers that lose more than their type loses."""
    names = ["resid_post0", "pattern1", "blocks.1.attn.hook_q", "ln_final.hook_normalized"]
    with served.http(headers=ALLOWED) as http:
        body = {"model": "smol", "input": ["Once upon", "a time there was"], "names": names, "dtype": dtype}
        response = http.post("/v1/activations", json=body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/vnd.safetensors"
        found = safetensors.numpy.load(response.content)
        single = http.post("/v1/activations", json={"model": "smol", "input": [5, 6, 7], "names": ["z0"]})
        assert safetensors.numpy.load(single.content)["blocks.0.attn.hook_z"].shape == (1, 3, 4, 16)
    _, cache = llm.run_with_cache(["Once upon", "a time there was"], names=names)
    np.testing.assert_array_equal(found["tokens"], cache.tokens)
    np.testing.assert_array_equal(found["lengths"], cache.lengths)
    for name in cache:
        assert found[name].dtype == dtype
        np.testing.assert_allclose(found[name], cache[name], rtol=2e-3, atol=2e-3, err_msg=name)
    assert found.keys() == {*cache, "tokens", "lengths"}


def test_the_scope_is_needed(served, open_llm):
    """Strangers who read activations, keys that may ask and not steer, a server that was never told to."""
    body = {"model": "smol", "input": "Hi", "names": ["z0"]}
    for path, fields in [("/v1/activations", body), ("/v1/completions", ASK | {"interventions": STEER})]:
        with served.http() as http:
            check_error(http.post(path, json=fields), 401)
            wrong = {"authorization": "Bearer scope=interp"}
            check_error(http.post(path, json=fields, headers=wrong), 401)
            plain = http.post(path, json=fields, headers={"authorization": "Bearer plain"})
            check_error(plain, 403)
            assert plain.json()["error"]["code"] == "missing_scope"
            assert http.post(path, json=fields, headers=ALLOWED).status_code == 200
    assert ask(served, headers={"authorization": "Bearer plain"}).status_code == 200
    with open_llm() as llm, serving(llm, api_keys=KEYS) as off, off.http(headers=ALLOWED) as http:
        for path, fields in [("/v1/activations", body), ("/v1/completions", ASK | {"interventions": STEER})]:
            refused = http.post(path, json=fields)
            check_error(refused, 403)
            assert refused.json()["error"]["code"] == "interp_disabled"
    with open_llm() as llm, serving(llm, has_interp=True) as keyless, keyless.http() as http:
        assert http.post("/v1/activations", json=body).status_code == 200


def test_activations_beyond_the_limit_are_refused(served):
    """An answer that takes all memory, and a limit that takes others with it."""
    with served.http(headers=ALLOWED) as http:
        for fields in (
            {"input": [[5] * 100] * 40, "names": ["z0"]},
            {"input": [5] * 120, "names": ["pattern0"]},
            {
                "input": [5] * 125,
                "names": [f"{part}{i}" for part in ("resid_pre", "mlp_out", "post") for i in (0, 1)],
            },
        ):
            response = http.post("/v1/activations", json={"model": "smol", **fields})
            check_error(response, 413)
            assert response.json()["error"]["code"] == "activations_too_large"
    captures = [
        {"op": "capture", "name": f"{part}{i}"} for part in ("z", "q", "post", "mlp_out") for i in (0, 1)
    ]
    check_error(ask(served, prompt=[5] * 110, interventions=captures), 413)
    check_error(ask(served, prompt=[5] * 120, interventions=[{"op": "capture", "name": "pattern0"}]), 413)
    assert ask(served, interventions=STEER).status_code == 200


@pytest.mark.parametrize(
    ("interventions", "param"),
    [
        ([{"op": "exec", "name": "z0"}], "interventions[0].op"),
        ([{"op": "add", "name": "z0", "code": "x"}], "interventions[0].code"),
        ([{"op": "add", "name": "resid_post1", "vector": [1e39, *[0] * 63]}], "interventions[0].vector[0]"),
        ([{"op": "add", "name": "resid_post1", "vector": "!!!!"}], "interventions"),
        ([{"op": "add", "name": "resid_post1", "vector": "AAAAA==="}], "interventions"),
        ([{"op": "add", "name": "resid_post1", "vector": "AAAA"}], "interventions"),
        ([STEER[0], {"op": "add", "control_vector": "../../etc/passwd"}], "interventions[1]"),
        ([{"op": "capture", "name": "blocks.9.hook_resid_post"}], "interventions[0]"),
        ([{"op": "scale", "name": "z0", "heads": [10**30]}], "interventions[0].heads[0]"),
        ([{"op": "scale", "name": "z0", "strength": 1e300}], "interventions[0].strength"),
        ([STEER[0]] * 65, "interventions"),
        ("all", "interventions"),
    ],
)
def test_wrong_interventions_are_a_400(served, interventions, param):
    """An error of the server for a mistake of the client, or one that names nothing."""
    response = ask(served, interventions=interventions)
    check_error(response, 400)
    assert response.json()["error"]["param"] == param


def test_hostile_names_and_shapes(served):
    """A request that ends the engine, or is an error of the server."""
    rng = random.Random(0)
    pieces = [
        "blocks",
        ".",
        "0",
        "-1",
        "99999999999",
        "hook_",
        "z",
        "resid_post",
        "attn",
        "{}",
        "\u0000",
        "é",
        "a" * 80,
    ]
    shapes = [{"text": "x"}, {"steps": 1}, [[0, None]], {"probe": "truth", "above": 0}]
    shapes += [[], [[]], [1e308], [0.5] * 64, ["x"], [None], [True], 3, {}, "AAAA", "=", [0.5] * 5000]

    def value():
        return rng.choice(
            [
                "".join(rng.choice(pieces) for _ in range(rng.randrange(6))),
                "".join(rng.choice(string.printable) for _ in range(rng.randrange(30))),
                rng.choice(["z0", "resid_post1", "pattern0", "happy", "truth", "all", "last", "prompt"]),
                rng.choice(shapes),
                rng.randrange(-5, 70),
                1e308,
                None,
            ]
        )

    fields = ["name", "vector", "strength", "heads", "positions", "control_vector", "layers", "probe", "sae"]
    fields += ["top_k", "features", "when", "match_norm", "else"]
    with served.http(headers=ALLOWED) as http:
        for _ in range(50):
            op = rng.choice(["capture", "add", "scale", "replace", "ablate", "read", value()])
            one = {"op": op} | {name: value() for name in rng.sample(fields, rng.randrange(1, 4))}
            response = http.post("/v1/completions", json=ASK | {"max_tokens": 1, "interventions": [one]})
            assert response.status_code in (200, 400, 413), (one, response.text)
            names = [value() for _ in range(rng.randrange(3))]
            response = http.post("/v1/activations", json={"model": "smol", "input": value(), "names": names})
            assert response.status_code in (200, 400, 413), (names, response.text)
        assert http.get("/health").json() == {"status": "ok"}
    assert served.pages_used() == 0


def test_keys_and_scopes():
    """A scope that becomes a part of the key, a name with spaces that is cut, one that every key has."""
    lines = [
        "k",
        "my laptop l scope=interp",
        "m priority=5 scope=interp",
        "n scope=interp priority=5",
        "scope=interp",
    ]
    ring = KeyRing(lines)
    assert [ring.find(f"Bearer {key}") for key in ("k", "l", "m", "n", "scope=interp")] == ring.clients
    assert [bool(client.scopes) for client in ring.clients] == [False, True, True, True, False]
    assert [client.first_priority for client in ring.clients] == [None, None, 5, 5, None]
    assert ring.clients[1].name == "key my laptop"
    with pytest.raises(ConfigError, match="the scope 'admin' of an API key is not supported"):
        ServerSettings(("m",), api_keys=("k scope=admin",))
