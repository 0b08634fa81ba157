"""What the commands do: read from a terminal or pipe, show on one. `kukri.cli` says how to ask for it."""

# After the one that SmolLM2's template puts in, some plain questions are near ties that rounding decides (docs/log.md)
DEFAULT_SYSTEM = "You are a helpful AI assistant."
