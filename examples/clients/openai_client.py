"""OpenAI's own client with `kukri serve`: an answer, a stream, and an answer of a given form.

Needs OpenAI's client: `pip install openai`.
"""

from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id


class Capital(BaseModel):
    city: Literal["London", "Paris", "Rome"]
    country: Literal["England", "France", "Italy"]


question = [
    {"role": "system", "content": "You are a helpful AI assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]
answer = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=40)
print(answer.choices[0].message.content)

with client.chat.completions.stream(
    model=model, messages=question, temperature=0, max_tokens=40, response_format=Capital
) as stream:
    for event in stream:
        if event.type == "content.delta":
            print(event.delta, end="|", flush=True)
    print("\n", stream.get_final_completion().choices[0].message.parsed)
