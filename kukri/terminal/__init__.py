"""What the commands do: read from a terminal or pipe, show on one. `kukri.cli` says how to ask for it."""
