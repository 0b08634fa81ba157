"""Ollama's API: generate, chat, and the commands that manage models."""
