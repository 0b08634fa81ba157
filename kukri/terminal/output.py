"""Text on its way to a person: nothing a model writes may steer the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kukri.engine import Timings
    from kukri.terminal.markdown import MarkdownStream

# C0 and C1 control characters, escape among them; line feed and tab stay
_CONTROLS = {code: None for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)}


def write_text(text: str, markdown: MarkdownStream | None = None) -> None:
    """Writes text to stdout at once. On a terminal its control characters are left out.

    With `markdown` the formatted text is written.
    """
    text = text.translate(_CONTROLS) if sys.stdout.isatty() else text
    sys.stdout.write(text if markdown is None else markdown.push(text))
    sys.stdout.flush()


def say(text: str) -> None:
    """Print a line to stderr, where what a command tells a person is apart from its output."""
    print(text, file=sys.stderr)


def allow_any_text() -> None:
    """Makes stdout print `?` for characters that its encoding lacks, instead of raising."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def describe_timings(timings: Timings) -> str:
    """Counts and speeds on one line."""
    drafts = f" · {timings.n_accepted} of {timings.n_drafted} drafts accepted" if timings.n_drafted else ""
    return (
        f"prompt {timings.n_prompt_tokens} tokens, {timings.prompt_tokens_per_s:,.0f} tokens/s · "
        f"answer {timings.n_generated} tokens, {timings.decode_tokens_per_s:,.1f} tokens/s · "
        f"first token after {timings.first_token_s * 1000:.0f} ms{drafts}"
    )


def timings_as_dict(timings: Timings) -> dict[str, Any]:
    """The timings for JSON; seconds, tokens per second, and draft tokens."""
    return {
        "queue_s": timings.queue_s,
        "prompt_s": timings.prompt_s,
        "first_token_s": timings.first_token_s,
        "decode_s": timings.decode_s,
        "prompt_tokens_per_s": timings.prompt_tokens_per_s,
        "decode_tokens_per_s": timings.decode_tokens_per_s,
        "n_drafted": timings.n_drafted,
        "n_accepted": timings.n_accepted,
    }


def n_bytes_text(n_bytes: int) -> str:
    """A human-readable size, in powers of ten: 98.4 MB."""
    size = float(n_bytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
