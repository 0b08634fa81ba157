"""How model families write reasoning and tool calls: one `Dialect` a family, and parsers that stream."""
