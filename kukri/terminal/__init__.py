"""The commands: read from a terminal or pipe, show on one. `kukri.cli` has their options."""

# After the one that SmolLM2's template puts in, plain questions may be near ties that rounding decides:
# see docs/log.md
DEFAULT_SYSTEM = "You are a helpful AI assistant."
