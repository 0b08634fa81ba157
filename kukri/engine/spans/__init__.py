"""Rows that replace embeddings of a prompt's tokens: what a sequence holds of them, and what makes them."""
