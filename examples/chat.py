"""A conversation: the answers go back in, so that the model knows what was said."""

from kukri import LLM

messages = [{"role": "system", "content": "You are a friendly teacher. Answer in one sentence."}]

with LLM() as llm:
    for question in ("Why is the sky blue?", "And at sunset?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, temperature=0, max_tokens=60).text
        messages.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}\n")
