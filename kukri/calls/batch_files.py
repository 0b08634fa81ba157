"""The files of a batch: requests in OpenAI's form, one per line, and the results so far.

A result is appended to `OUTPUT.part` as soon as there is one; when all are there, they become OUTPUT, in the
order of the requests. A result's id is made from the model's name and the request's line, so that a later run
knows what is done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kukri.dataclass import dataclass
from kukri.errors import ConfigError
from kukri.host.files import clear, remove_file, replace_file

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/responses")
_FIELDS = {"custom_id", "method", "url", "body"}


class BatchFileError(ConfigError):
    """The system cannot read or write a file of a batch now: a later run may continue."""


class Place(NamedTuple):
    """The location of a line: a file and a range of bytes."""

    path: Path
    start: int
    n_bytes: int

    def read(self) -> bytes:
        """The bytes there. Raises OSError."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            return file.read(self.n_bytes)


@dataclass(frozen=True)
class BatchLine:
    """A line of the input: a request, or its error. Its body stays in the file until it is asked for."""

    id: str  # the result's own
    custom_id: str | None
    url: str = ""
    place: Place | None = None  # without an error
    error: tuple[str, str] | None = None  # code and message

    def read_body(self) -> Mapping[str, Any]:
        """The body of the request. Raises ConfigError if the file was changed since it was read."""
        assert self.place is not None, "a line with an error has no body"
        try:
            raw = self.place.read()
        except OSError as error:
            raise BatchFileError(f"{self.place.path} cannot be read: {error.strerror}") from None
        if _digest(raw) not in self.id:
            raise ConfigError(f"{self.place.path} must not change while it is answered: run this again")
        body: Mapping[str, Any] = json.loads(raw)["body"]
        return body

    def result(self, response: Mapping[str, Any] | None) -> dict[str, Any]:
        """The line of the output: the response, or the error of this line."""
        error = None if self.error is None else {"code": self.error[0], "message": self.error[1]}
        return {"id": self.id, "custom_id": self.custom_id, "response": response, "error": error}


def read_batch(
    path: Path, model: str, *, max_lines: int | None = None, max_line_bytes: int | None = None
) -> list[BatchLine]:
    """The lines of an input file; empty ones are left out. Reads one after another, and keeps no bodies.

    Raises ConfigError if the file cannot be read, holds no requests, or more than `max_lines` of them; a line
    of more than `max_line_bytes` has an error of its own.
    """
    lines: list[BatchLine] = []
    ids: set[str] = set()
    custom_ids: set[str] = set()
    most = -1 if max_line_bytes is None else max_line_bytes + 2  # and its end
    try:
        with open(path, "rb") as file:
            for number, (place, raw) in enumerate(_raw_lines(path, file, most), 1):
                if not raw.strip():
                    continue
                if len(lines) == max_lines:
                    raise ConfigError(f"{path} must have at most {max_lines} requests: divide it")
                result_id = _new_id(model, raw, ids)
                if max_line_bytes is not None and place.n_bytes > max_line_bytes + 1:
                    message = f"line {number} must have at most {max_line_bytes} bytes (--max-body)"
                    lines.append(BatchLine(result_id, None, error=("line_too_long", message)))
                else:
                    lines.append(_line(raw, place, number, result_id, custom_ids))
    except OSError as error:
        raise BatchFileError(f"{path} cannot be read: {error.strerror}") from None
    if not lines:
        raise ConfigError(f"{path} must have requests, one per line, as OpenAI's batches have them")
    return lines


def _raw_lines(path: Path, file: BinaryIO, most: int) -> Iterator[tuple[Place, bytes]]:
    """Each line's place, and its bytes without what comes after the first `most`; all with -1."""
    start = 0
    while raw := file.readline(most):
        n_bytes, piece = len(raw), raw
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(most)
            n_bytes += len(piece)
        yield Place(path, start, n_bytes), raw
        start += n_bytes


def _new_id(model: str, raw: bytes, ids: set[str]) -> str:
    first = f"{_of_model(model)}{_digest(raw)}"
    result_id, n = first, 1
    while result_id in ids:  # the same line again
        n += 1
        result_id = f"{first}_{n}"
    ids.add(result_id)
    return result_id


def _digest(raw: bytes) -> str:
    return sha256(raw.strip()).hexdigest()[:20]


def _of_model(model: str) -> str:
    """The prefix of the ids of a model's results."""
    return f"batch_req_{sha256(model.encode()).hexdigest()[:8]}_"


def _line(raw: bytes, place: Place, number: int, result_id: str, custom_ids: set[str]) -> BatchLine:
    """A line, checked; `custom_ids` are those before it."""
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        return BatchLine(result_id, None, error=("invalid_json", f"line {number} must be JSON"))
    custom_id = given.get("custom_id") if isinstance(given, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        message = f"line {number} must be an object with a 'custom_id', which is a text"
        return BatchLine(result_id, None, error=("invalid_line", message))
    problem = _problem(given, custom_id in custom_ids)
    custom_ids.add(custom_id)
    if problem is not None:
        return BatchLine(result_id, custom_id, error=(problem[0], f"line {number}: {problem[1]}"))
    return BatchLine(result_id, custom_id, given["url"], place)


def _problem(given: Mapping[str, Any], is_known: bool) -> tuple[str, str] | None:
    """(code, message) of the error in a line that has a custom_id."""
    unknown = sorted(set(given) - _FIELDS)
    if is_known:
        return "duplicate_custom_id", "'custom_id' must not be the same as in an earlier line"
    if unknown:
        return "invalid_line", f"unknown field {unknown[0]!r}"
    if given.get("method") != "POST":
        return "invalid_method", "'method' must be POST"
    if given.get("url") not in URLS:
        return "invalid_url", f"'url' must be one of {', '.join(URLS)}"
    if not isinstance(given.get("body"), dict):
        return "invalid_line", "'body' must be an object"
    if given["body"].get("stream"):
        return "invalid_line", "'stream' is not supported in a batch"
    return None


def files_of(target: Path) -> tuple[Path, Path, Path]:
    """The paths of the output, of the results so far, and of the file that is renamed to the output."""
    return target, target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.new")


class Results:
    """The results of a batch, in files. Opening it finds the results of earlier runs; `close` it.

    Attributes: n_failed, of the results there are: errors, and statuses of 400 and above. Of earlier results,
    errors and statuses of 500 and above do not count as done. Raises ConfigError if a file cannot
    be read or written, or holds results of something else.
    """

    def __init__(self, target: Path, lines: Sequence[BatchLine], model: str) -> None:
        self.target, self.part, self._new = files_of(target)
        self.n_failed = 0
        self._lines, self._model = lines, model
        self._places: dict[str, Place] = {}
        try:
            for path in (self.target, self.part):
                if path.exists():
                    self._find(path)
            self._file = open(self.part, "ab")  # noqa: SIM115
            self._file.truncate(self._end_of_last_line())
        except OSError as error:
            raise BatchFileError(f"{error.filename or target} cannot be used: {error.strerror}") from None

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, result_id: str) -> bool:
        return result_id in self._places

    def add(self, result: Mapping[str, Any]) -> None:
        """Write a result to the file, for this run and later runs."""
        line = json.dumps(result).encode() + b"\n"
        try:
            start = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise BatchFileError(f"{self.part} cannot be written: {error.strerror}") from None
        self._note(result, Place(self.part, start, len(line)))

    def finish(self) -> None:
        """Makes the output of all results, in the order of the requests; `OUTPUT.part` is gone then."""
        try:
            with open(self._new, "wb") as file:
                for line in self._in_order():
                    file.write(line)
                file.flush()
                os.fsync(file.fileno())  # before the results so far are removed
            replace_file(self._new, self.target)
            self.close()
            remove_file(self.part)
        except OSError as error:
            clear(self._new)
            raise BatchFileError(f"{self.target} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Closes the file; the results added stay."""
        with suppress(OSError):  # it tries again to write the result that `add` could not write
            self._file.close()

    def _find(self, path: Path) -> None:
        """Adds the results of a file. Raises ConfigError if they are another batch's."""
        ids, custom_ids = {line.id for line in self._lines}, {line.custom_id for line in self._lines}
        start = 0
        with open(path, "rb") as file:
            for raw in file:
                place = Place(path, start, len(raw))
                start += len(raw)
                result = _parsed(raw)
                if path == self.part and (result is None or not raw.endswith(b"\n")):
                    continue  # cut off, when the run was
                if result is not None and result["id"] in ids:
                    if result.get("response") is not None and _status(result) < 500:
                        self._note(result, place)
                elif result is None or not self._is_outdated(result, custom_ids):
                    raise ConfigError(
                        f"{path} must hold results of this batch and model only: remove it, or name "
                        "another output"
                    )

    def _is_outdated(self, result: Mapping[str, Any], custom_ids: set[str | None]) -> bool:
        """Return True if a result belongs to this batch and model, and its line was changed since."""
        return result["id"].startswith(_of_model(self._model)) and result.get("custom_id") in custom_ids

    def _note(self, result: Mapping[str, Any], place: Place) -> None:
        if result["id"] not in self._places:
            self._places[result["id"]] = place
            self.n_failed += _status(result) >= 400

    def _in_order(self) -> Iterator[bytes]:
        paths = {place.path for place in self._places.values()}
        with ExitStack() as stack:
            files = {path: stack.enter_context(open(path, "rb")) for path in paths}
            for line in self._lines:
                place = self._places[line.id]
                files[place.path].seek(place.start)
                yield files[place.path].read(place.n_bytes).rstrip(b"\n") + b"\n"

    def _end_of_last_line(self) -> int:
        data_end = 0
        with open(self.part, "rb") as file:
            for raw in file:
                data_end += len(raw) if raw.endswith(b"\n") else 0
        return data_end


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """The result on a line; None if there is none."""
    try:
        result = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) and isinstance(result.get("id"), str) else None


def _status(result: Mapping[str, Any]) -> int:
    """The status of a result; 400 for the error of a line."""
    response = result.get("response")
    status = response.get("status_code") if isinstance(response, dict) else None
    return status if isinstance(status, int) else 400
