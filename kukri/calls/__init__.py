"""A call from its prompts to its results: texts as tokens come, results, files of batches."""
