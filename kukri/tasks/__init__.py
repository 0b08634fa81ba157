"""What a model does besides generating text: embeddings, rankings, labels of texts and of tokens."""

from kukri.tasks.heads import Label, Span, TokenLabel

__all__ = ["Label", "Span", "TokenLabel"]
