"""Text as it is generated, drawn with a seed; the last chunk carries the whole result."""

from kukri import LLM, SamplingParams

params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=60, stop="\n\n")

with LLM() as llm:
    for chunk in llm.stream("Once upon a time, in a library by the sea,", params):
        print(chunk.text, end="", flush=True)
        if chunk.result is not None:
            print(f"\n({chunk.result.timings.n_generated} tokens, {chunk.result.finish_reason})")
