"""A program as users write it, which `mypy --strict` has to accept against the installed wheel."""

from __future__ import annotations

from kukri import LLM, Chunk, Result, SamplingParams
from kukri.errors import KukriError


def answer(llm: LLM, question: str) -> str:
    """The answer to a question."""
    params = SamplingParams(temperature=0.0, max_tokens=16)
    result: Result = llm.chat([{"role": "user", "content": question}], params)
    return result.text


def stream(llm: LLM, prompt: str) -> int:
    """Streams a continuation and counts its tokens."""
    n_tokens = 0
    chunk: Chunk
    for chunk in llm.stream(prompt, max_tokens=8):
        n_tokens += len(chunk.token_ids)
    return n_tokens


def main() -> None:
    """Runs both."""
    try:
        with LLM() as llm:
            print(answer(llm, "Name a color."), stream(llm, "One, two,"))
    except KukriError as error:
        print(f"kukri: {error}")


if __name__ == "__main__":
    main()
