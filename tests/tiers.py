"""Two tiers of tests by what they cost: `pytest` runs the first, `pytest -m full` the second.

The mark `full` puts a test into the second tier, `full(but=[...])` all of its parameters but those whose ids
match a pattern, `full(only=[...])` those that match. Whoever names a file, a test or `-k` gets both tiers.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest

EITHER = "not slow and not ray"  # as in pyproject.toml's addopts
FIRST, SECOND = f"{EITHER} and not full", f"full and {EITHER}"
# What is cheap and often fails: layers, English, docs, fields, lists of ops.
EARLY = (
    "tests/test_architecture.py",
    "tests/test_plain_english.py",
    "tests/test_docs_site.py",
    "tests/test_adding_a_model.py",
    "tests/sampling/test_fields.py",
    "tests/kernels/test_plan.py",
    "tests/kernels/test_torch_ops.py",
)


DEAR_FIXTURES = {"browser"}  # tests that use one belong to the second tier unless they are representative


def is_whole(config: pytest.Config) -> bool:
    """True if a run has all tests of a tier: the limits and budgets of `processor_time` are meant for it."""
    return config.option.markexpr in (FIRST, SECOND)


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the tier; the processes of a run are told by the one that starts them."""
    if hasattr(config, "workerinput"):
        config.option.markexpr = config.workerinput["markexpr"]
        return
    asked = config.option.markexpr
    names_some = config.args_source != pytest.Config.ArgsSource.TESTPATHS or config.option.keyword
    # `--lf` runs what failed, of whichever tier
    cache = getattr(config, "cache", None)
    runs_failed = config.getoption("lf", False) and bool(cache and cache.get("cache/lastfailed", {}))
    if asked == "full":
        config.option.markexpr = EITHER if runs_failed else SECOND
    elif asked == EITHER and not names_some and not runs_failed:
        config.option.markexpr = FIRST


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes the mark from parameters that stay in the first tier, and puts early tests in front."""
    unused: set[tuple[str, str]] = set()
    used: set[tuple[str, str]] = set()
    n_full = 0
    for item in items:
        is_dear = not DEAR_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        if is_dear and item.get_closest_marker("representative") is None:
            item.add_marker("full")
        mark = item.get_closest_marker("full")
        if mark is None:
            continue
        if patterns := _patterns(mark):
            test, _, rest = item.nodeid.partition("[")
            matching = [one for one in patterns if fnmatchcase(rest.removesuffix("]"), one)]
            used |= {(test, one) for one in matching}
            unused |= {(test, one) for one in patterns}
            if bool(matching) == ("but" in mark.kwargs):
                item.own_markers = [one for one in item.own_markers if one.name != "full"]
        if {one.name for one in item.iter_markers()} & {"full", "slow", "ray"} == {"full"}:
            n_full += 1
    if is_whole(config) and unused - used:
        listed = "\n".join(f"{test}: {pattern}" for test, pattern in sorted(unused - used))
        raise pytest.UsageError(f"patterns of the mark full match no parameter:\n{listed}")
    order = {file: place for place, file in enumerate(EARLY)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))
    _output(config)["n_full"] = n_full


def _patterns(mark: pytest.Mark) -> list[str]:
    return [*mark.kwargs.get("but", ()), *mark.kwargs.get("only", ())]


def _output(config: pytest.Config) -> dict[str, Any]:
    """What a process tells the one that started it; in one process, a place to keep it."""
    if hasattr(config, "workeroutput"):
        return config.workeroutput  # type: ignore[no-any-return]
    return config.stash.setdefault(_kept, {})


_kept = pytest.StashKey[dict[str, Any]]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a process which tests are chosen: it reads the command line again by itself."""
    node.workerinput["markexpr"] = node.config.option.markexpr


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keeps what a process told; all count the same tests."""
    if hasattr(node, "workeroutput") and "n_full" in node.workeroutput:
        _output(node.config)["n_full"] = node.workeroutput["n_full"]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Says in the last line how many tests a bare `pytest` leaves out."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    n_full = _output(config).get("n_full", 0)
    if reporter is None or not n_full or config.option.markexpr not in (FIRST, EITHER):
        return
    if config.option.markexpr == FIRST:
        reporter.write_line(f"{n_full} tests of the second tier were left out: `pytest -m full` runs them")
    else:
        reporter.write_line(f"both tiers ran: a bare `pytest` leaves out {n_full} of these tests")
