"""The plan of a model: ops recorded once, made fewer, and given their places in memory."""
