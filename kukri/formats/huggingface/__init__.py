"""Directories as transformers saves them: configuration, safetensors, weights, tokenizer files."""
