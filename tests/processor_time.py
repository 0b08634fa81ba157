"""What each test costs in processor seconds, children and threads counted; wall time counts nowhere.

Kept apart from a test's own seconds, because they fall on whichever test comes first: modules that are
imported for the first time, kernels that are compiled, fixtures that several tests share, and collections of
garbage, which walk all that the process holds. A test that seems too dear is run once more alone and the
cheaper run counts, because threads and children that an earlier test left behind may have worked too. A run
of a whole tier fails a test of the first tier that takes more than a second, and on CI a folder that exceeds
its budget in `budgets.toml`; limits hold for a machine whose yardstick (`stopwatch.py`) takes a millisecond.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import resource
import sys
import threading
import tomllib
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests import tiers
from tests.stopwatch import slowness

LIMIT_S = 1.0  # for a test of the first tier; a mark `representative(seconds)` states another
# On CI, whose machines are shared and cold, a test may take half as much again: a landing fails for a test
# that is too dear, not for a neighbour's load.
LENIENCE = 1.5 if os.environ.get("CI") else 1.0
FEW_S = 10.0  # more than a folder's budget are let pass, because one test that happens to be slow takes them
BUDGETS = Path(__file__).with_name("budgets.toml")
KERNELS = Path(__file__).with_name("kernels") / "first_tier_kernels.txt"
_YARDSTICK_EVERY = 100  # tests
_TOO_DEAR = """\
This test took {seconds:.1f} s of processor time in the cheaper of two runs; a test of the first tier may take
{limit:g} (of a machine {slowness:.1f} times as fast as this one is now). Make it cheaper, or mark it `full`,
so that `pytest -m full` runs it. If it is the one of an expensive family that the first tier should have,
mark it `representative(seconds)`."""


@dataclass
class Cost:
    """Processor seconds that passed while one test ran, by what they were spent on."""

    test: float = 0.0
    imports: float = 0.0
    kernels: float = 0.0
    fixtures: float = 0.0
    garbage: float = 0.0


def processor_seconds() -> float:
    """Processor seconds of this process, all its threads, and its children, ended or not."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used) + _descendants_ticks(os.getpid()) / _TICKS_PER_S


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _descendants_ticks(pid: int) -> int:
    """Clock ticks of a process's children that nobody has waited for yet, by Linux's /proc; 0 elsewhere.

    The system adds a child's time to its parent's only once it is waited for, which may be in another test.
    """
    ticks = 0
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                for child in file.read().split():
                    with suppress(OSError), open(f"/proc/{child}/stat") as facts:
                        # user and system time of the child, and of those that it has waited for
                        ticks += sum(map(int, facts.read().rpartition(")")[2].split()[11:15]))
                        ticks += _descendants_ticks(int(child))
    return ticks


class Meter:
    """Bills the processor seconds of this process to the test that runs."""

    def __init__(self, config: pytest.Config) -> None:
        self.costs: dict[str, Cost] = {}
        self.compiled: list[str] = []  # in the middle of tests
        self.prepared = (0, 0.0)  # how many kernels were compiled before the first test, and their seconds
        self._config = config
        self._now, self._failed = Cost(), False
        self._nested = 0.0  # what blocks within the current one have taken
        self._slowness: list[float] = []
        self._watch()

    @contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Bills what the block takes to a field of `Cost`, less what blocks within it are billed for."""
        outer, self._nested = self._nested, 0.0
        started = processor_seconds()
        try:
            yield
        finally:
            took = processor_seconds() - started
            setattr(self._now, kind, getattr(self._now, kind) + took - self._nested)
            self._nested = outer + took

    def _watch(self) -> None:
        """Begins to time this process's imports, compilations and collections of garbage."""
        from kukri.kernels.cpu.compile import compiling

        bootstrap: Any = importlib._bootstrap  # type: ignore[attr-defined]
        find_and_load, compile_and_store = bootstrap._find_and_load, compiling._compile_and_store
        main = threading.get_ident()
        is_importing = False

        def timed_import(name: str, import_: Any) -> Any:
            nonlocal is_importing
            # to ask the time takes a millisecond where servers and templates have left thirty processes
            if is_importing or name in sys.modules or threading.get_ident() != main:
                return find_and_load(name, import_)
            is_importing = True
            try:
                with self.spending("imports"):
                    return find_and_load(name, import_)
            finally:
                is_importing = False

        def timed_compile(name: str) -> Any:
            self.compiled.append(name)
            if threading.get_ident() != main:
                return compile_and_store(name)
            with self.spending("kernels"):
                return compile_and_store(name)

        collecting = ExitStack()

        def timed_collection(phase: str, about: Any) -> None:
            if about["generation"] == 2 and threading.get_ident() == main:
                collecting.enter_context(self.spending("garbage")) if phase == "start" else collecting.close()

        bootstrap._find_and_load = timed_import
        compiling._compile_and_store = timed_compile
        gc.callbacks.append(timed_collection)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Compiles the kernels that the first tier needs, in all processes of the run, before its tests."""
        gc.freeze()  # modules and collected tests stay until the end: no collection has to walk them
        if tiers.is_whole(self._config) and not session.config.option.collectonly and session.items:
            started = processor_seconds()
            self.prepared = _compile(first_tier_kernels()), processor_seconds() - started
            self.compiled.clear()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Bills a test, and fails a test of the first tier that is too dear in two runs."""
        if len(self.costs) % _YARDSTICK_EVERY == 0:
            self._slowness.append(slowness())
        cache = _cache_state()
        with self._billing(item) as first:
            result = yield
        limit = self._limit(item)
        if self._failed or first.test < limit or _cache_state() != cache:  # a child compiled kernels
            return result
        with self._billing(item) as second:
            runtestprotocol(item, log=False, nextitem=nextitem)
        took = min(first.test, second.test)
        self.costs[item.nodeid].test = took
        slow = max(slowness(), *self._slowness[-5:])  # what else the machine does comes and goes
        if took >= limit * slow * LENIENCE:
            words = _TOO_DEAR.format(seconds=took, limit=limit, slowness=slow)
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "teardown")
            item.ihook.pytest_runtest_logreport(report=report)
        return result

    @contextmanager
    def _billing(self, item: pytest.Item) -> Iterator[Cost]:
        """Bills what the block takes to a test."""
        self._now = self.costs[item.nodeid] = Cost()
        self._nested, self._failed = 0.0, False
        with self.spending("test"):
            yield self._now

    def _limit(self, item: pytest.Item) -> float:
        """Returns the seconds that a test may take; infinite if it is not one of a whole first tier."""
        if item.get_closest_marker("full") or not tiers.is_whole(self._config):
            return math.inf
        mark = item.get_closest_marker("representative")
        return mark.args[0] if mark else LIMIT_S

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        with self.spending("fixtures"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """After the last test of a file its fixtures end, and what servers and browsers took is known."""
        if nextitem is not None and nextitem.path == item.path:
            return (yield)
        with self.spending("fixtures"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        self._failed |= report.failed
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        found = {
            "costs": {name: astuple(cost) for name, cost in self.costs.items()},
            "compiled": self.compiled,
            "prepared": self.prepared,
            "slowness": self._slowness,
            "seconds": processor_seconds(),
        }
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["processor_time"] = found
        elif self.costs:
            self._config.pluginmanager.get_plugin("processor-time-report").add(found)


def _cache_state() -> list[int]:
    """Numbers that change when a process stores a kernel, for this processor or another."""
    from kukri.kernels.cpu.compile.kernel_cache import cache_root

    try:
        return [entry.stat().st_mtime_ns for entry in os.scandir(cache_root())]
    except OSError:
        return []


def first_tier_kernels() -> list[str]:
    """The kernels that the first tier needs on this processor.

    In a line of the file a name may be followed by the lowerings (`CpuTarget.lowering`) that alone need it.
    """
    from kukri.kernels.cpu.compile.features import cpu_target

    lines = (line.split() for line in KERNELS.read_text().splitlines())
    return [name for name, *lowerings in lines if not lowerings or cpu_target().lowering in lowerings]


def _compile(names: Iterable[str]) -> int:
    """Compiles kernels together with the run's other processes and gives the number of those that it did."""
    from kukri.kernels.cpu.compile import compiling
    from kukri.kernels.cpu.compile.kernel_cache import read_cached
    from kukri.kernels.cpu.compile.shipped_kernels import read_shipped

    missing = [name for name in names if (read_shipped(name) or read_cached(name)) is None]
    compiled: list[str] = []
    compile_and_store = compiling._compile_and_store
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            compiling, "_compile_and_store", lambda name: compiled.append(name) or compile_and_store(name)
        )
        for _ in compiling.compile_kernels(missing):
            pass
    return len(compiled)


class Report:
    """Puts together what the processes of a run measured, prints it, and holds it against the budgets."""

    def __init__(self) -> None:
        self._costs: dict[str, Cost] = {}
        self._found: list[dict[str, Any]] = []
        self._over: list[str] = []

    def add(self, found: dict[str, Any]) -> None:
        """Takes what one process has measured."""
        self._found.append(found)
        self._costs |= {name: Cost(*cost) for name, cost in found["costs"].items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if found := getattr(node, "workeroutput", {}).get("processor_time"):
            self.add(found)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Ends with a failure on CI if tests cost more than the budgets of a tier allow.

        What each test cost stays in pytest's cache, as `processor-time`.
        """
        cache = getattr(session.config, "cache", None)
        if self._costs and cache is not None:
            costs = {name: astuple(cost) for name, cost in self._costs.items()}
            cache.set("processor-time", {"slowness": self._slow(), "costs": costs})
        if os.environ.get("CI") and self._costs and tiers.is_whole(session.config):
            self._over = list(
                self._over_budget("first" if session.config.option.markexpr == tiers.FIRST else "full")
            )
            if self._over and session.exitstatus == 0:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Prints the totals and the ten slowest after the run of a tier."""
        if not self._costs or not tiers.is_whole(config):
            return
        for line in [*self._lines(), *self._over]:
            terminalreporter.write_line(line)

    def _lines(self) -> Iterator[str]:
        spent = {kind: sum(getattr(cost, kind) for cost in self._costs.values()) for kind in vars(Cost())}
        total, slow = sum(found["seconds"] for found in self._found), self._slow()
        n_prepared = sum(found["prepared"][0] for found in self._found)
        prepared = sum(found["prepared"][1] for found in self._found)
        spent["tests"] = spent.pop("test")
        rest = total - sum(spent.values()) - prepared
        parts = [
            *((f"{seconds:.0f} {kind}") for kind, seconds in spent.items()),
            f"{rest:.0f} collection and the rest",
        ]
        yield (
            f"{total:.0f} s of processor time, {total / slow:.0f} where the yardstick takes a millisecond "
            f"({slow:.2f} here): {', '.join(parts)}; {n_prepared} kernels were compiled before the first "
            f"test, in {prepared:.0f} s"
        )
        compiled = sorted({name for found in self._found for name in found["compiled"]})
        if compiled:
            yield f"compiled in the middle of tests ({KERNELS.name} lacks them): {' '.join(compiled)}"
        for name, cost in sorted(self._costs.items(), key=lambda one: -one[1].test)[:10]:
            yield f"{cost.test:6.2f} s  {name}"
        folders = ", ".join(f"{name} {seconds:.0f}" for name, seconds in sorted(self._by_folder().items()))
        yield f"by folder, at a millisecond: {folders}"

    def _slow(self) -> float:
        measured = [one for found in self._found for one in found["slowness"]]
        return sum(measured) / len(measured)

    def _by_folder(self) -> dict[str, float]:
        """Seconds of tests by folder, for a machine whose yardstick takes a millisecond."""
        sums: dict[str, float] = defaultdict(float)
        for name, cost in self._costs.items():
            parts = name.partition("::")[0].split("/")
            sums[parts[1] if len(parts) > 2 else "top"] += (cost.test + cost.fixtures) / self._slow()
        return sums

    def _over_budget(self, tier: str) -> Iterator[str]:
        """Yields a line for each folder that is far over its budget, and one if the sum is over.

        The sum may be a tenth over. A single folder may be half over and `FEW_S` besides, because processors
        differ more in one kind of work than in the mean of all, and a folder of few tests differs most.
        """
        budgets = tomllib.loads(BUDGETS.read_text())[tier]
        spent = self._by_folder()
        for folder, seconds in spent.items():
            if seconds > LENIENCE * budgets.get(folder, 0) + FEW_S:
                yield _over(f"tests/{folder}", seconds, budgets.get(folder, 0))
        if sum(spent.values()) > 1.1 * sum(budgets.values()):
            yield _over(f"The {tier} tier", sum(spent.values()), sum(budgets.values()))


def _over(tests: str, seconds: float, budget: float) -> str:
    return (
        f"{tests} took {seconds:.0f} s of processor time, and its budget is {budget}: "
        f"make its tests cheaper, or raise it in {BUDGETS.name} and say why"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the meter in the process that runs tests, and the report in the one that prints."""
    config.pluginmanager.register(Meter(config), "processor-time")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(), "processor-time-report")
