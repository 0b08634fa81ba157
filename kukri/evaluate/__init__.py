"""Quality of a model, and the loss from a change of its weights."""
