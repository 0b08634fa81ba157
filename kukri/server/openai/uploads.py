"""Forms with a file (multipart/form-data), whose file is written somewhere else as it arrives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any, Protocol

from kukri.dataclass import dataclass, field
from kukri.errors import RequestError

_NAME = re.compile(rb'[; ]name="([^"]*)"')
_FILENAME = re.compile(rb'[; ]filename="([^"]*)"')
_MAX_HEAD_BYTES = 1 << 14  # in a part's header
_MAX_FIELD_BYTES = 1 << 12  # in a field that is not the file
_MAX_FIELDS = 32
_WRITTEN_AT_ONCE = 1 << 20


class Target(Protocol):
    """What a form's file is written to."""

    def write(self, data: bytes, /) -> object:
        """Takes the next bytes. Raises OSError, or CapacityError if there is no room for them."""


@dataclass
class Form:
    """What a form had besides its file: texts of the fields, the file's name and its size.

    A field whose name ends with `[]` is here without them, as a list.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    filename: str | None = None
    n_bytes: int = 0
    has_file: bool = False


class FormReader:
    """Reads a form from pieces of any size: `feed` each, then `finish`. Its file goes to `target`."""

    def __init__(self, content_type: str, target: Target, max_bytes: int) -> None:
        """Raises RequestError if the type is not a form's."""
        match = re.search(r'boundary="?([^";]{1,200})"?', content_type)
        if not content_type.startswith("multipart/form-data") or match is None:
            raise RequestError("the body must be multipart/form-data, with the field 'file'")
        self.form = Form()
        self._target, self._max_bytes = target, max_bytes
        self._delimiter = b"\r\n--" + match[1].encode("latin-1", "replace")
        self._left = bytearray(b"\r\n")  # not read yet; the first delimiter may stand at the beginning
        self._name: str | None = None  # the part whose data is read; None in a header
        self._is_file = self._has_begun = self._has_ended = False
        self._n_fields = 0
        self._value = bytearray()  # a field's text

    def feed(self, piece: bytes) -> None:
        """Takes the next bytes. Raises RequestError, and what writing them raises."""
        self._left += piece
        while not self._has_ended and (self._read_data() if self._name is not None else self._read_head()):
            pass

    def finish(self) -> Form:
        """The form. Raises RequestError if it is cut short, or lacks the file."""
        if not self._has_ended:
            raise RequestError("the form must not be cut off before its end")
        if not self.form.has_file:
            raise RequestError.of("file", "is required")
        return self.form

    def _read_head(self) -> bool:
        """Reads a delimiter and the header after it; False if more bytes are needed."""
        n = len(self._delimiter)
        if not self._has_begun:
            if len(self._left) < n:
                return False
            self._has_begun = True
            if not self._left.startswith(self._delimiter):
                raise RequestError("the form must begin with its boundary")
            del self._left[:n]
        if self._left.startswith(b"--"):
            self._has_ended = True
            return False
        end = self._left.find(b"\r\n\r\n")
        if end < 0:
            if len(self._left) > _MAX_HEAD_BYTES:
                raise RequestError("a part of the form must have a shorter header")
            return False
        head = bytes(self._left[:end])
        del self._left[: end + 4]
        name, filename = _NAME.search(head), _FILENAME.search(head)
        if name is None:
            raise RequestError("a part of the form must have a name")
        self._name = name[1].decode("utf-8", "replace")
        self._is_file = self._name == "file"
        self._value.clear()
        if self._is_file:
            if self.form.has_file:
                raise RequestError("the form must have a single file: upload one at a time", param="file")
            self.form.has_file = True
            self.form.filename = None if filename is None else filename[1].decode("utf-8", "replace")
        else:
            self._n_fields += 1
            if self._n_fields > _MAX_FIELDS:
                raise RequestError(f"the form must have at most {_MAX_FIELDS} fields")
        return True

    def _read_data(self) -> bool:
        """Reads data up to the next delimiter, or as far as it cannot be one; False if more is needed."""
        end = self._left.find(self._delimiter)
        n = end if end >= 0 else max(len(self._left) - len(self._delimiter) + 1, 0)
        self._take(bytes(self._left[:n]))
        del self._left[: n + (len(self._delimiter) if end >= 0 else 0)]
        if end >= 0:
            if not self._is_file:
                name, text = str(self._name), self._value.decode("utf-8", "replace")
                if name.endswith("[]"):
                    self.form.fields.setdefault(name[:-2], []).append(text)
                else:
                    self.form.fields[name] = text
            self._name = None
        return end >= 0

    def _take(self, data: bytes) -> None:
        if not self._is_file:
            self._value += data
            if len(self._value) > _MAX_FIELD_BYTES:
                message = f"the field {str(self._name)[:100]!r} must be at most {_MAX_FIELD_BYTES} bytes"
                raise RequestError(message, param=str(self._name)[:100])
            return
        self.form.n_bytes += len(data)
        if self.form.n_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        self._target.write(data)


def too_large(max_bytes: int) -> RequestError:
    """The error of a file that is larger than `--max-upload`, or than its kind may be."""
    return RequestError(
        f"the file must be at most {max_bytes} bytes (--max-upload): divide it",
        param="file",
        code="file_too_large",
    )


async def read_form(content_type: str, pieces: AsyncIterator[bytes], target: Target, max_bytes: int) -> Form:
    """Reads a form, and writes its file to `target` off the event loop. Raises RequestError, OSError."""
    reader = FormReader(content_type, target, max_bytes)
    waiting = bytearray()
    async for piece in pieces:
        waiting += piece
        if len(waiting) >= _WRITTEN_AT_ONCE:
            await asyncio.to_thread(reader.feed, bytes(waiting))
            waiting.clear()
    await asyncio.to_thread(reader.feed, bytes(waiting))
    return reader.finish()
