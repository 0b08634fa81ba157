"""The commands: read from a terminal or pipe, show on one. `kukri.cli` has their options."""
