"""The shortest program: a model, a question, an answer."""

from kukri import LLM

with LLM() as llm:
    result = llm.generate("The capital of France is", temperature=0, max_tokens=8)
    print(result.text)
    print(f"{result.timings.decode_tokens_per_s:.0f} tokens/s, ended by {result.finish_reason}")
