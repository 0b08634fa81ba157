"""LangChain with `kukri serve`: a chain, a stream, and an answer of a given form.

Needs LangChain's client for OpenAI's API: `pip install langchain-openai`.
"""

from typing import Literal

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

llm = ChatOpenAI(
    base_url="http://127.0.0.1:8000/v1", api_key="none", model="smollm2-135m", temperature=0, max_tokens=40
)


class Capital(BaseModel):
    """A capital and where it is."""

    city: Literal["London", "Paris", "Rome"]
    country: Literal["England", "France", "Italy"]


prompt = ChatPromptTemplate.from_messages(
    [("system", "You are a helpful AI assistant."), ("user", "What is the capital of {country}?")]
)
answer = (prompt | llm).invoke({"country": "France"})
print(answer.content, answer.usage_metadata["output_tokens"], "tokens")

for chunk in (prompt | llm).stream({"country": "Japan"}):
    print(chunk.content, end="|", flush=True)
print()

print((prompt | llm.with_structured_output(Capital, method="json_schema")).invoke({"country": "France"}))
