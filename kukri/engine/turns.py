"""Several threads on one engine: a thread that waits for an answer steps the engine for all that wait.

One thread at a time holds the *turn*; the others sleep until their answer has come or the turn is handed to
them, first come, first served. So concurrent calls share the engine's batches, no thread polls, and a program
with one thread pays for two uncontended locks a call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

try:  # without the enums of `signal`, whose conversions cost 10 us a step
    import _signal as signal  # type: ignore[import-not-found]
except ImportError:
    import signal

from kukri.errors import KukriError


class _Waiter:
    """A thread asleep until `is_ready()`, or, if that is None, until it holds the turn."""

    __slots__ = ("asleep", "is_ready", "thread")

    def __init__(self, is_ready: Callable[[], bool] | None) -> None:
        self.is_ready, self.thread = is_ready, threading.get_ident()
        self.asleep = threading.Lock()
        self.asleep.acquire()


class EngineTurns:
    """Hands one engine from thread to thread.

    `step` runs one step of the engine and stores its results; it is only called by the holder of the turn, as
    are submitted commands. It must end at least one wait, sooner or later.
    """

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._commands: deque[Callable[[], None]] = deque()  # to run before the next step, in order
        self._mutex = threading.Lock()  # guards the next two; never held while anything else runs
        self._holder: int | None = None  # ident of the thread that holds the turn
        self._waiters: deque[_Waiter] = deque()  # empty unless a thread holds the turn

    def submit(self, command: Callable[[], None]) -> None:
        """Runs a command between two steps: now if the turn is free, else before the next step.

        Never blocks, so a finalizer may call it at any point of any thread. The command must be quick and
        must not raise.
        """
        self._commands.append(command)
        with DeferredInterrupt():
            self._run_if_free()

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Returns once `is_ready()`, which a step or command has to bring about.

        Steps the engine while no other thread does. Raises what `step` raises, and KukriError if the calling
        thread is inside a step already.
        """
        while not is_ready():
            self._check_not_inside()
            try:
                if self._acquire(is_ready):
                    with DeferredInterrupt() as interrupt:
                        self._step_for_all(is_ready, interrupt)
                        self._hand_over()
            finally:
                self._release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block no step runs. Raises KukriError if the calling thread is inside a step."""
        self._check_not_inside()
        try:
            self._acquire(None)
            self._run_commands()
            yield
        finally:
            self._release()

    def _step_for_all(self, is_ready: Callable[[], bool], interrupt: DeferredInterrupt) -> None:
        """Steps until ready, interrupted, or until another thread wants the engine alone."""
        self._run_commands()
        while not is_ready():
            self._step()
            is_wanted = bool(self._waiters) and self._wake_ready()
            if is_wanted or interrupt.noted is not None:
                return
            if self._commands:
                self._run_commands()

    def _check_not_inside(self) -> None:
        if self._holder == threading.get_ident():
            raise KukriError("a hook or logits processor cannot call the LLM that runs it: call later")

    def _acquire(self, is_ready: Callable[[], bool] | None) -> bool:
        """Waits for the turn, or until `is_ready()`; True if the thread holds the turn now."""
        with self._mutex:
            if self._holder is None:
                self._holder = threading.get_ident()
                return True
        waiter = _Waiter(is_ready)
        try:
            with self._mutex:
                if self._holder is None:
                    self._holder = threading.get_ident()
                    return True
                self._waiters.append(waiter)
                if is_ready is not None and is_ready():  # by a step that ended before this thread was listed
                    self._waiters.pop()
                    return False
            waiter.asleep.acquire()
        except BaseException:
            with self._mutex:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
            raise
        return self._holder == threading.get_ident()

    def _release(self) -> None:
        """Hands the turn over if the thread still holds it."""
        if self._holder == threading.get_ident():
            with DeferredInterrupt():
                self._hand_over()

    def _hand_over(self) -> None:
        """Gives the turn to the first waiter; frees it, with no command left over, if nobody waits."""
        with self._mutex:
            if self._waiters:
                waiter = self._waiters.popleft()
                self._holder = waiter.thread
                waiter.asleep.release()
                return
            self._holder = None
        self._run_if_free()

    def _run_if_free(self) -> None:
        """Runs the commands unless another thread holds the turn, and so runs them.

        Does not wait for the mutex: the thread that has it takes or frees the turn, and then looks here too.
        """
        while self._commands and self._mutex.acquire(blocking=False):
            is_free = self._holder is None
            if is_free:
                self._holder = threading.get_ident()
            self._mutex.release()
            if not is_free:
                return
            try:
                self._run_commands()
            finally:
                self._hand_over()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _wake_ready(self) -> bool:
        """Wakes the threads that need not wait any more; True if one of the others wants the engine alone."""
        is_wanted = False
        with self._mutex:
            for _ in range(len(self._waiters)):
                waiter = self._waiters.popleft()
                if waiter.is_ready is not None and waiter.is_ready():
                    waiter.asleep.release()
                else:
                    self._waiters.append(waiter)
                    is_wanted = is_wanted or waiter.is_ready is None
        return is_wanted


class DeferredInterrupt:
    """Within the `with` block Ctrl-C is noted, and acted on at its end: a step is never torn.

    A second Ctrl-C acts at once. Does nothing in threads other than the main one: only that gets signals.
    """

    def __init__(self) -> None:
        self._before: Any = None  # the handler outside the block
        self.noted: tuple[int, FrameType | None] | None = None  # the signal, after Ctrl-C

    def __enter__(self) -> DeferredInterrupt:
        if threading.get_ident() == threading.main_thread().ident:
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self.noted is not None:
                self._before(*self.noted)

    def _note(self, signal_number: int, frame: FrameType | None) -> None:
        if self.noted is not None:
            self._before(signal_number, frame)
        self.noted = signal_number, frame
