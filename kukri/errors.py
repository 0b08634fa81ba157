"""The exception tree. Everything kukri raises on purpose is a `KukriError`.

KukriError
├── ConfigError              a model or engine configuration that makes no sense: a ValueError too
├── FormatError              a model file that is broken; names file, offset and tensor
│   ├── MissingFileError     … that was not found: a FileNotFoundError too
│   └── UnusedTensorError    a checkpoint holds tensors that no layer took
├── UnsupportedError         valid, but not something kukri runs; says what is supported
│   └── MissingKernelError   a backend has no kernel for an op and type
├── RequestError             the caller's request is wrong (HTTP 400): a ValueError too
│   ├── ContextLengthError   the prompt does not fit into the context
│   └── ActivationLimitError the activations wanted are larger than allowed (HTTP 413)
├── CapacityError            no room now, try again later (HTTP 503)
├── DownloadError            a model could not be fetched or verified
├── StageError               a stage of a pipeline was lost; its requests begin again
├── HookError                a hook raised or returned something unusable
└── ShapeError               a bug of ours: an array has an unexpected shape
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self


class KukriError(Exception):
    """Base of every error kukri raises on purpose; its text is one line that says what to do.

    An error comes back equal from another process, with its text and those attributes that are plain values:
    neither a prompt's arrays nor an engine travels with it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {name: value for name, value in vars(self).items() if _is_plain(value)}
        return _made_again, (type(self), str(self), kept)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bytes | int | float)


def _made_again(kind: type[KukriError], text: str, attributes: dict[str, Any]) -> KukriError:
    """An error as it was, whatever its constructor takes."""
    error = kind.__new__(kind, text)
    error.args = (text,)  # OSError sets `args` in its constructor alone
    vars(error).update(attributes)
    return error


def failure_of(what: str, error: BaseException) -> KukriError:
    """The error of a request by whose `what` an exception was raised, which is its cause.

    Raises again what is to end the program or the task instead. A panic of a library in Rust is no Exception.
    """
    if isinstance(error, KukriError):
        return error
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    text = " ".join(str(error).split())
    made = KukriError(f"{what} failed: {type(error).__name__}{f': {text:.200}' if text else ''}")
    made.__cause__ = error
    return made


class ConfigError(KukriError, ValueError):
    """A model or engine configuration is inconsistent."""


# A message that begins with one of these has the file as its subject.
_VERBS = (
    "appears ", "cannot ", "claims ", "differs ", "has ", "holds ", "is ", "must ", "names ", "overlaps ",
    "requires ", "takes ", "updates ", "was ",
)  # fmt: skip


class FormatError(KukriError):
    """A model file is broken.

    Attributes: path (str), offset (bytes from the start of the file, or None), tensor (name, or None).
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        offset: int | None = None,
        tensor: str | None = None,
    ) -> None:
        self.path, self.offset, self.tensor = str(path) if path is not None else None, offset, tensor
        where = [self.path] if self.path is not None else []
        if offset is not None:
            where.append(f"byte {offset}")
        if tensor is not None:
            where.append(f"tensor {tensor!r}")
        is_sentence = message.startswith(_VERBS) and (offset is None or tensor is not None)
        super().__init__(f"{', '.join(where)}{'' if is_sentence else ':'} {message}" if where else message)


class MissingFileError(FormatError, FileNotFoundError):
    """A file or a directory of a model or an adapter was not found."""


class UnusedTensorError(FormatError):
    """A checkpoint holds tensors that no layer of the architecture took."""


class UnsupportedError(KukriError):
    """Valid input of a kind that kukri does not run; the text lists what it does."""


class MissingKernelError(UnsupportedError):
    """A backend has no kernel for this op and weight type."""


class RequestError(KukriError, ValueError):
    """A request is wrong. `param` and `code` are fields of an OpenAI error body."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.param, self.code = param, code
        super().__init__(message)

    @classmethod
    def of(cls, param: str, problem: str, *, code: str | None = None) -> Self:
        """Return the error of a field, which the text names in quotes: `of("n", "must be at least 1")`."""
        return cls(f"{param!r} {problem}", param=param, code=code)


class ContextLengthError(RequestError):
    """A prompt is longer than the context. Attributes: n_tokens, max_context (tokens)."""

    def __init__(self, n_tokens: int, max_context: int, *, at_least: bool = False) -> None:
        self.n_tokens, self.max_context = n_tokens, max_context
        count = f"at least {n_tokens}" if at_least else f"{n_tokens}"
        super().__init__(
            f"the prompt has {count} tokens and the context holds {max_context}: shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )


class ActivationLimitError(RequestError):
    """The activations that a request wants take more bytes than it may have."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            f"the activations are larger than {max_bytes} bytes: name fewer, or send a shorter text",
            param="names",
            code="activations_too_large",
        )


class CapacityError(KukriError):
    """No room for this request now; trying later may work."""


class DownloadError(KukriError):
    """A model could not be fetched or did not have the expected contents."""


class StageError(KukriError):
    """A stage of a pipeline was lost, and with it the keys and values of its layers."""


class HookError(KukriError):
    """A hook raised, or returned an array of another shape or dtype."""


class ShapeError(KukriError):
    """An array has an unexpected shape: a bug of kukri, please report it."""


@contextmanager
def reading(
    path: str | os.PathLike[str] | None, key: Callable[[], str | None] = lambda: None
) -> Iterator[None]:
    """Whatever goes wrong while a file is read is one FormatError with its path, and the key read last.

    A file may hold anything, and what Python or a library makes of it follows no contract: division by zero,
    a number too large, a panic of Rust, which is not an Exception. Errors of kukri's own pass, with the
    path; a ConfigError, of values that make no sense together, is a FormatError too.
    """
    try:
        yield
    except ConfigError as error:
        raise FormatError(_short(str(error)), path=path) from error
    except UnsupportedError as error:
        if path is None or str(path) in str(error):
            raise
        raise type(error)(f"{path}: {_short(str(error))}") from error
    except (KukriError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror or error}", path=path) from error
    except BaseException as error:
        last = key()
        what = "holds something" if last is None else f"key {brief(last)}, or one before it, holds something"
        reason = _short(f"{type(error).__name__}: {error}", 120)
        raise FormatError(f"{what} that kukri cannot read ({reason})", path=path) from error


def _short(text: str, most: int = 400) -> str:
    """A text on one line, cut where it holds what a file holds."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}..."


def printable(text: str) -> str:
    """The text with everything but visible characters and spaces spelled out as an escape."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def brief(value: object) -> str:
    """A file's text or value as an error message shows it: quoted, on one line, short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def brief_list(texts: list[str], most: int = 8) -> str:
    """The first of some texts, separated by commas, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def close_matches(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name: ': did you mean …?', or nothing."""
    from difflib import get_close_matches  # a start without such an error does without

    close = get_close_matches(str(name), names, n=3)
    return f": did you mean {' or '.join(close)}?" if close else ""
