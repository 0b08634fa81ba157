"""SamplingParams: what is refused, and what is stored."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import runpy
import typing
from pathlib import Path

import numpy as np
import pytest

from kukri.errors import RequestError
from kukri.sampling import SamplingOptions, SamplingParams

NAN, INF = math.nan, math.inf

WRONG = [
    *[("temperature", v) for v in (-0.1, -1, NAN, INF, -INF, True, "1", None, 1j, 10**400)],
    *[("top_p", v) for v in (-0.01, 1.01, NAN, INF, False, "0.9", None)],
    *[("min_p", v) for v in (-0.01, 1.01, NAN, True, None)],
    *[("repetition_penalty", v) for v in (0, -1, 0.001, 101, NAN, INF, True, "1")],
    *[("presence_penalty", v) for v in (-2.1, 2.1, NAN, INF, True, None)],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, NAN, -INF, True, None)],
    *[("top_k", v) for v in (-(2**31), 2**31, 1.0, 0.5, True, "40", None, NAN)],
    *[("min_tokens", v) for v in (-1, 1.5, True, None)],
    *[("max_tokens", v) for v in (0, -1, 16.0, True, "16", NAN)],
    *[("seed", v) for v in (1.0, True, "7", 2**64, -(2**63) - 1)],
    *[("logprobs", v) for v in (-1, True, 1001, 1.0, "5")],
    *[("dynatemp_range", v) for v in (-0.1, NAN, True, None)],
    *[("dynatemp_exponent", v) for v in (-0.1, INF, "1")],
    *[("typical_p", v) for v in (-0.01, 1.01, NAN, True, None)],
    *[("top_n_sigma", v) for v in (-1.5, NAN, INF, None)],
    *[("xtc_probability", v) for v in (-0.1, 1.1, NAN, True)],
    *[("xtc_threshold", v) for v in (-0.1, 1.1, None)],
    *[("mirostat", v) for v in (-1, 3, 1.0, True, None)],
    *[("mirostat_tau", v) for v in (-1, 101, NAN)],
    *[("mirostat_eta", v) for v in (-0.1, 1.1, None)],
    *[("repeat_last_n", v) for v in (-2, 1.5, None)],
    *[("dry_multiplier", v) for v in (-1, NAN, INF, None)],
    *[("dry_base", v) for v in (0.9, NAN, None)],
    *[("dry_allowed_length", v) for v in (0, 1.5, None)],
    *[("dry_penalty_last_n", v) for v in (-2, None)],
    *[("dry_sequence_breakers", v) for v in ("ab", [""], [[]], [[-1]], [1], 5, [b"x"], [[1.0]])],
    *[("bad_words", v) for v in ("ab", [""], [[]], [[-1]], [1], 5, [b"x"], ["a"] * 1001, [[1] * 65])],
    *[("logits_processors", v) for v in (None, 5, [None], [1], print)],
    *[("samplers", v) for v in ("top_k", ["top_q"], ["top_k", "top_k"], [1], None, [[]])],
    *[("n", v) for v in (0, -1, 129, 1.0, True, None)],
    *[("best_of", v) for v in (0, 129, 1.0, True)],
    *[("prompt_logprobs", v) for v in (-1, True, 1001, 1.0)],
    *[("ignore_eos", v) for v in (1, 0, None, "yes")],
    *[
        ("logit_bias", v)
        for v in ([1], {"1": 1.0}, {1: "x"}, {1: NAN}, {1: 101}, {-1: 1.0}, {True: 1.0}, {1: True})
    ],
    *[("stop", v) for v in ("", ["a", ""], 5, [1.5], [True], [-1], b"x", [None], {"a"})],
    *[("stop", v) for v in (["a" * 1001], [f"{i}" for i in range(65)])],
    *[("stop_token_ids", v) for v in (list(range(1001)), [2**31])],
    *[("dry_sequence_breakers", v) for v in ([f"{i}" for i in range(65)], ["a" * 1001], [[2**31]])],
    *[("bad_words", v) for v in ([f"{i}" for i in range(501)], ["a" * 1001], [[2**63]])],
    *[("logit_bias", v) for v in (dict.fromkeys(range(2**15 + 1), 1.0), {2**31: 1.0})],
    *[("stop_token_ids", v) for v in ([-1], [1.0], [True], ["a"], 3, None)],
]


def test_wrong_values_are_refused() -> None:
    """Would catch a value that passes unchecked and fails, or silently changes meaning, inside the engine."""
    faults = []
    for name, value in WRONG:
        try:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        except RequestError as error:
            text = str(error)
            is_right = error.param == name and text.startswith(f"'{name}' must be ")
            if not is_right or "\n" in text or len(text) >= 250:
                faults.append(f"{name}={value!r:.60}: {error.param}: {text}")
        else:
            faults.append(f"{name}={value!r:.60} passes")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", np.float32(0.5)),
        ("top_k", np.int64(40)),
        ("top_p", 0.0),
        ("top_p", 1),
        ("min_p", 1.0),
        ("repetition_penalty", 1.3),
        ("presence_penalty", -2),
        ("frequency_penalty", 2.0),
        ("seed", 0),
        ("seed", -1),
        ("seed", 2**64 - 1),
        ("max_tokens", None),
        ("logprobs", 0),
        ("logit_bias", {5: -100, np.int32(7): np.float32(1.5)}),
        ("logit_bias", {}),
    ],
)
def test_limits_are_inside(name: str, value: object) -> None:
    """Would catch an off-by-one range, and NumPy numbers being refused."""
    stored = getattr(SamplingParams(**{name: value}), name)  # type: ignore[arg-type]
    assert stored == value
    assert type(stored).__module__ == "builtins"


def test_min_tokens_above_max_tokens_is_refused() -> None:
    """Would catch a request that can never satisfy both."""
    with pytest.raises(RequestError, match="at most 'max_tokens', 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_best_of_is_at_least_n() -> None:
    """Would catch a request for more answers than are generated."""
    with pytest.raises(RequestError, match="'best_of' must be from n \\(3\\) to 128"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=3).n_generated_answers == 3
    assert SamplingParams(n=3, best_of=5).n_generated_answers == 5


def test_a_parameter_without_effect_is_refused() -> None:
    """Would catch a filter that is set and ignored: left out of `samplers`, or replaced by mirostat."""
    with pytest.raises(RequestError, match="'samplers' must be a list that names top_k") as caught:
        SamplingParams(top_k=5, samplers=["temperature"])
    assert caught.value.param == "samplers"
    with pytest.raises(RequestError, match="'mirostat' must be 0 where min_p is set"):
        SamplingParams(min_p=0.1, mirostat=2)
    SamplingParams(mirostat=1, temperature=0.5, dry_multiplier=1.0, presence_penalty=1.0)
    SamplingParams(samplers=[], temperature=0)


def test_stages_that_change_nothing_are_left_out() -> None:
    """Would catch a default that costs each step a pass over the logits."""
    assert SamplingParams().active_stages == ()
    params = SamplingParams(
        samplers=["temperature", "xtc", "top_k"], top_k=1, temperature=2, xtc_probability=1
    )
    assert params.active_stages == ("temperature", "xtc", "top_k")
    off = {"repeat_last_n": 0, "dry_penalty_last_n": 0, "xtc_threshold": 0.6, "top_n_sigma": -1}
    params = SamplingParams(repetition_penalty=2, dry_multiplier=1, xtc_probability=1, **off)  # type: ignore[arg-type]
    assert params.active_stages == ()


def test_phrases_are_stored_as_tuples() -> None:
    """Would catch a list that its caller changes later, and params that are not hashable."""
    params = SamplingParams(bad_words=["a", [1, 2], [1, 2]], dry_sequence_breakers=None)  # type: ignore[arg-type]
    assert params.bad_words == ("a", (1, 2))
    assert params.dry_sequence_breakers == ()
    hash(params)


def test_stop_is_sorted_into_strings_and_ids() -> None:
    """Would catch ids in `stop` that are compared with text, and a single string split into letters."""
    params = SamplingParams(stop=["\n\n", 7, "END", 2, "END"], stop_token_ids=[2, 0])
    assert params.stop == params.stop_strings == ("\n\n", "END")
    assert params.stop_token_ids == (2, 0, 7)
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=None).stop_strings == ()


def test_params_are_frozen_hashable_keyword_only_and_replaceable() -> None:
    """Would catch a request that changes under a running engine through its caller's dict or list."""
    bias, stop = {3: 1.0}, ["a", 9]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[3], stop[0] = 5.0, "b"
    assert params.logit_bias == {3: 1.0}
    assert params.stop == ("a",)
    assert len({params, dataclasses.replace(params)}) == 1
    assert dataclasses.replace(params, temperature=0.0).stop_token_ids == (9,)
    assert dataclasses.asdict(params)["logit_bias"] == {3: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[misc]


def test_defaults_draw_from_the_model() -> None:
    """Would catch a default that filters or penalizes without being asked."""
    params = SamplingParams()
    assert not params.is_greedy
    assert (params.top_k, params.top_p, params.min_p, params.temperature) == (0, 1.0, 0.0, 1.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.logit_bias is None
    assert params.seed is None
    assert params.max_tokens == 256


def test_the_options_are_the_fields():
    """Keyword arguments that editors know by other names or types than SamplingParams takes."""
    fields = [field.name for field in dataclasses.fields(SamplingParams)]
    assert list(SamplingOptions.__annotations__) == fields
    assert typing.get_type_hints(SamplingOptions) == typing.get_type_hints(SamplingParams)
    assert not SamplingOptions.__required_keys__


def test_the_options_are_written_by_their_script():
    """Catches options that were changed by hand: a type checker would know another type than the field's."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "packaging" / "sampling_options.py"))
    source = script["SOURCE"].read_text(encoding="utf-8")
    assert script["written"](source) == source, "run python packaging/sampling_options.py"
    assert script["written"](source.replace("    top_p: float\n", "")) == source


def test_help_describes_every_field():
    """A field without a description, or a description of a field that is gone."""
    _, attributes = inspect.getdoc(SamplingParams).split("Attributes:\n")
    described = re.findall(r"^    (\w+): \S", attributes, re.MULTILINE)
    assert described == [field.name for field in dataclasses.fields(SamplingParams)]
