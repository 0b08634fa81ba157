"""What the answers of every API have: replies, rows of a model, vectors, log-probabilities, counts, times."""
