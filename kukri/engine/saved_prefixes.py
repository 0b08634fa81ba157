"""KV pages on disk: full pages that requests computed, read back after a restart or by another process.

A page is a file, named by its key (`pages.py`): the hash of its tokens, of all those before it, and of what
else its numbers depend on. So is a recurrent state, by the key of the page that it is the state after. A file
begins with a SHA-256 of key and contents, so a damaged or exchanged file
is found out, removed, and computed again. Files are written by a thread of their own, first under another
name, and renamed when they are safe on the disk: a crash leaves whole files only. Several processes may share
a directory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from itertools import count, repeat, takewhile
from pathlib import Path
from tempfile import mkstemp
from typing import NamedTuple

from kukri.engine.pages import PageKey
from kukri.errors import ConfigError
from kukri.host.files import clear, remove_file, replace_file
from kukri.host.hardware import available_bytes
from kukri.host.os_calls import sync_directory
from kukri.host.private_files import make_private, open_private
from kukri.kernels.cache import Cache
from kukri.kernels.paged_kv import state_bytes

logger = logging.getLogger("kukri.prefixes")

_MAGIC = b"kukri KV page 1\n"
_HEADER_BYTES = len(_MAGIC) + 32
_SUFFIX, _UNFINISHED = ".page", ".new-"
_ABANDONED_S = 3600.0  # the age at which an unfinished file is one that a killed process left
# what may wait to be written, or this part of the free memory if that is more: a long prompt's pages and
# states come all at once, with its first token. What comes on top is not saved this time
_LEAST_QUEUED_BYTES, _QUEUED_PART = 256 << 20, 4
_STEP_BYTES = 32 << 20  # read between two steps
_BATCH = 64  # pages that are made safe on the disk together
_PAUSE_S = 60.0  # after a disk that was full, or broken
_AGE_S = 0.1  # by which a page counts as older than the one before it, which is of use without it
_KEPT_SHARE = 15 / 16  # share of the budget that is kept once it is used up
_N_READERS = 2


class SavedState(NamedTuple):
    """The contents of a state after `n_pages` pages of a sequence, which had `n_known` before; or None."""

    n_pages: int
    contents: memoryview | None
    n_known: int


class SavedPrefixes:
    """The saved pages and states of one cache in a directory: `max_bytes`, the least recently used removed
    first.

    The engine's thread calls everything here; `_write_all` and what it calls run on the writing thread.
    `depth` is a page's place in its sequence, or the place of the first of several.
    """

    def __init__(self, cache: Cache, directory: Path, max_bytes: int) -> None:
        """Makes the directory, readable by this user only. Raises ConfigError if it cannot be made or
        trusted.
        """
        self._cache, self.directory, self.max_bytes = cache, directory, max_bytes
        self._page_bytes, self._state_bytes = len(cache.page_data([0])), state_bytes(cache.layout)
        least = max(self._page_bytes, self._state_bytes)
        if max_bytes < least + _HEADER_BYTES:
            raise ConfigError(
                f"saved prefixes must have room for a page or state of {least} bytes, not {max_bytes}: "
                "raise --prefix-size (prefix_bytes)"
            )
        self.pages_per_step = max(_STEP_BYTES // self._page_bytes, 1)
        self.n_damaged = 0
        self._lock = threading.Lock()  # guards what follows
        self._files: dict[str, tuple[int, float]] = {}  # name -> bytes, when it was used (since the epoch)
        self._queue: deque[tuple[str, bytes, float]] = deque()  # name, contents, when it was used
        self._queued: set[str] = set()
        self._queued_bytes = self._most_queued_bytes = 0
        self._thread: threading.Thread | None = None
        self._paused_until_s = 0.0
        self._n_written_bytes = 0  # since the directory was read, to see what other processes wrote
        self._readers = ThreadPoolExecutor(_N_READERS, thread_name_prefix="kukri-prefixes")
        try:
            make_private(directory)
            self._scan()
        except OSError as error:
            raise ConfigError(f"prefixes cannot be saved in {directory}: {error.strerror}") from None

    def save(self, page: int, key: PageKey, depth: int) -> None:
        """Copies a page, to be written soon; notes its use if it is saved already.

        It is not saved this time if too much waits to be written, or if the disk has just failed.
        """
        self._save(key.hex(), self._page_bytes, lambda: self._cache.page_data([page]), depth)

    def save_state(self, slot: int, key: PageKey, depth: int) -> None:
        """Copies the state after a page, as `save` does the page."""
        self._save(_state_name(key), self._state_bytes, lambda: self._cache.state_data(slot), depth)

    def _save(self, name: str, n_bytes: int, contents: Callable[[], bytes], depth: int) -> None:
        used_s = time.time() - _AGE_S * depth
        with self._lock:
            if name in self._files:
                self._files[name] = self._files[name][0], used_s
                return
            if name in self._queued or time.monotonic() < self._paused_until_s or not self._has_room(n_bytes):
                return
            self._queue.append((name, contents(), used_s))
            self._queued.add(name)
            self._queued_bytes += n_bytes
            if self._thread is None:
                # no daemon, so that a program that ends waits until its pages are written
                self._thread = threading.Thread(target=self._write_all, name="kukri-save-prefixes")
                self._thread.start()

    def _has_room(self, n_bytes: int) -> bool:
        """True if `n_bytes` more may wait. Free memory is looked up once while more waits than always may."""
        n_queued = self._queued_bytes + n_bytes
        if n_queued <= _LEAST_QUEUED_BYTES:
            self._most_queued_bytes = 0
            return True
        self._most_queued_bytes = self._most_queued_bytes or available_bytes() // _QUEUED_PART
        return n_queued <= self._most_queued_bytes

    def read(self, keys: Sequence[PageKey], depth: int) -> Iterator[memoryview]:
        """The contents of pages that follow each other, verified, up to the first that is not there."""
        names = [key.hex() for key in keys[: self.n_saved(keys)]]
        pages = self._readers.map(self._read, names, count(depth), repeat(self._page_bytes)) if names else ()
        for contents in pages:
            if contents is None:
                return
            yield contents

    def n_saved(self, keys: Sequence[PageKey]) -> int:
        """How many of the first of these pages are there."""
        return sum(1 for _ in takewhile(lambda key: self._is_there(key.hex()), keys))

    def last_state(self, keys: Sequence[PageKey], depth: int) -> SavedState:
        """The state after the most of these pages that are there, verified."""
        for n in range(self.n_saved(keys), 0, -1):
            name = _state_name(keys[n - 1])
            if self._is_there(name):
                contents = self._read(name, depth + n - 1, self._state_bytes)
                if contents is not None:
                    return SavedState(depth + n, contents, depth)
        return SavedState(depth, None, depth)

    def _is_there(self, name: str) -> bool:
        return name in self._files or self._path(name).exists()

    def write(self, page: int, contents: memoryview) -> None:
        """Fills a page of the cache with what `read` gave."""
        self._cache.set_page_data([page], contents)

    def close(self) -> None:
        """Waits until all that was saved is on the disk."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()
        self._readers.shutdown()

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}{_SUFFIX}"

    def _read(self, name: str, depth: int, n_bytes: int) -> memoryview | None:
        """The contents of a page or state; None if its file is gone, or cannot be used and is removed."""
        path, used_s = self._path(name), time.time() - _AGE_S * depth
        try:
            with open_private(path) as file:
                data = file.read(_HEADER_BYTES + n_bytes + 1)
            contents = memoryview(data)[_HEADER_BYTES:]
            if len(contents) != n_bytes or data[:_HEADER_BYTES] != _header(name, contents):
                raise ConfigError(f"{path} is damaged")
        except FileNotFoundError:
            pass
        except (OSError, ConfigError) as error:
            self.n_damaged += 1
            logger.warning("a saved prefix is removed and computed again: %s", error)
            clear(path)
        else:
            with suppress(OSError):
                os.utime(path, (used_s, used_s))  # for the next process
            with self._lock:
                self._files[name] = len(data), used_s
            return contents
        with self._lock:
            self._files.pop(name, None)
        return None

    def _write_all(self) -> None:
        while True:
            with self._lock:
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH))]
                self._queued_bytes -= sum(len(contents) for _, contents, _ in batch)
                if not batch:
                    self._thread = None
                    return
            try:
                self._write(batch)
                self._remove_beyond_budget()
            except Exception as error:  # the thread that ends by one would leave the queue to nobody
                is_bug = not isinstance(error, OSError)
                message = "saving prefixes is paused for %.0f s: %s: %s"
                logger.warning(message, _PAUSE_S, self.directory, error, exc_info=is_bug)
                with self._lock:
                    self._paused_until_s = time.monotonic() + _PAUSE_S
                    batch += self._queue
                    self._queue.clear()
                    self._queued_bytes = 0
            finally:
                with self._lock:
                    self._queued.difference_update(name for name, _, _ in batch)

    def _write(self, batch: Sequence[tuple[str, bytes, float]]) -> None:
        """Writes pages: first all contents, safe on the disk, then all names."""
        unfinished: deque[str] = deque()
        try:
            for name, contents, used_s in batch:
                handle, temporary = mkstemp(prefix=_UNFINISHED, dir=self.directory)  # with mode 0600
                unfinished.append(temporary)
                with os.fdopen(handle, "wb") as file:
                    file.write(_header(name, contents))
                    file.write(contents)
                    file.flush()
                    os.utime(file.fileno(), (used_s, used_s))
                    os.fsync(file.fileno())
            for name, contents, used_s in batch:
                replace_file(unfinished[0], self._path(name))
                unfinished.popleft()
                with self._lock:
                    self._files[name] = _HEADER_BYTES + len(contents), used_s
                    self._n_written_bytes += _HEADER_BYTES + len(contents)
            sync_directory(self.directory)
        finally:
            for temporary in unfinished:
                clear(Path(temporary))

    def _remove_beyond_budget(self) -> None:
        """Removes the files that were used longest ago, once all of them take more than the budget."""
        if self._n_written_bytes > self.max_bytes // 16:
            self._scan()
        with self._lock:
            left = sum(size for size, _ in self._files.values())
            if left <= self.max_bytes:
                return
            oldest = deque(sorted(self._files, key=lambda name: self._files[name][1]))
            removed = []
            while left > self.max_bytes * _KEPT_SHARE:
                removed.append(oldest.popleft())
                left -= self._files.pop(removed[-1])[0]
        for name in removed:
            remove_file(self._path(name))

    def _scan(self) -> None:
        """Reads what is in the directory, by other processes too."""
        found: dict[str, tuple[int, float]] = {}
        for entry in os.scandir(self.directory):
            with suppress(FileNotFoundError):  # removed meanwhile
                stat = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_SUFFIX):
                    found[entry.name.removesuffix(_SUFFIX)] = stat.st_size, stat.st_mtime
                elif entry.name.startswith(_UNFINISHED) and time.time() - stat.st_ctime > _ABANDONED_S:
                    remove_file(entry.path)
        with self._lock:
            for name, (size, used_s) in found.items():
                _, known_s = self._files.get(name, (0, 0.0))
                found[name] = size, max(used_s, known_s)
            self._files, self._n_written_bytes = found, 0


def _state_name(key: PageKey) -> str:
    return f"{key.hex()}-state"


def _header(name: str, contents: bytes | memoryview) -> bytes:
    """The first bytes of a page's file."""
    digest = sha256(_MAGIC + name.encode())
    digest.update(contents)
    return _MAGIC + digest.digest()
