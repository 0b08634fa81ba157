"""GGUF files: reader, writer, configuration, tensor names and weights."""
