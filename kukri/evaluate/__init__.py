"""What a model is worth, and what a change of its weights costs."""
