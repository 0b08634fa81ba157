"""The API of llama.cpp's own server: completion, infill, props and slots."""
