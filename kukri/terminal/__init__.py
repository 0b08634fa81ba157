"""What the commands do: read from a terminal or pipe, show on one. `kukri.cli` says how to ask for it."""

# Small models answer a plain question better after a plain system message than after their template's own
DEFAULT_SYSTEM = "You are a helpful AI assistant."
