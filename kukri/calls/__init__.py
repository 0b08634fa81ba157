"""A call from its prompts to its results: texts as tokens come, results, files of batches."""

MAX_ROUNDS = 8  # rounds of calls of tools, before an answer has to come
