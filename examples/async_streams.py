"""Several streams at a time on one engine, in one thread of asyncio."""

import asyncio

from kukri import AsyncLLM, SamplingParams

PROMPTS = ["The capital of France is", "The first three primes are", "Water boils at"]
params = SamplingParams(temperature=0, max_tokens=16)


async def answer(llm: AsyncLLM, prompt: str) -> int:
    pieces = [prompt]
    n_tokens = 0
    async for chunk in llm.stream(prompt, params):
        pieces.append(chunk.text)
        n_tokens += len(chunk.token_ids)
    print("".join(pieces).replace("\n", " "))
    return n_tokens


async def main() -> None:
    async with AsyncLLM() as llm:
        counts = await asyncio.gather(*(answer(llm, prompt) for prompt in PROMPTS))
    print(f"{len(counts)} answers, {sum(counts)} tokens")


asyncio.run(main())
