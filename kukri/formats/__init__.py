"""Model files: GGUF, transformers' directories, conversion between them, and the hub."""
