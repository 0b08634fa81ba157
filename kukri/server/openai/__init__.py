"""OpenAI's API, with vLLM's additions: chat, text completions, responses, embeddings, rankings, batches."""
