"""The server's log on stderr: a dated line for each event, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from io import TextIOBase
from typing import Any

from kukri.errors import printable

log = logging.getLogger("kukri.server")
_BUILT_IN = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}

_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING}


def configure_logs(*, as_json: bool, level: str) -> None:
    """Sends the logs of kukri and uvicorn to stderr, in one form; as JSON, plain lines too become events."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    for name in ("kukri", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel("WARNING" if level == "info" else level.upper())
    if as_json:
        sys.stderr = LoggedLines()


class LoggedLines(TextIOBase):
    """A stderr whose lines become events of the log: notices while a model loads, errors at the end."""

    def __init__(self) -> None:
        self._held = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Logs the lines that are complete."""
        with self._lock:
            *lines, self._held = (self._held + text).split("\n")
        for line in filter(str.strip, lines):
            kind, _, rest = line.partition(": ")
            level = _LEVELS.get(kind)
            log.log(level or logging.INFO, "%s", rest if level else line)
        return len(text)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, event and the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        entry = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """Date and time (UTC), level, event, then key=value."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        time = _time(record).strftime("%Y-%m-%dT%H:%M:%SZ")
        fields = "".join(
            f" {name}={value if str(value).isalnum() else json.dumps(value, default=str)}"
            for name, value in _fields(record).items()
        )
        line = f"{time} {record.levelname.lower()} {printable(record.getMessage())}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {
        name: value for name, value in record.__dict__.items() if name not in _BUILT_IN and value is not None
    }
