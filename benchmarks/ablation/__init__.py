"""Measurements of the engine's techniques: one function per technique, which yields rows of a table."""
