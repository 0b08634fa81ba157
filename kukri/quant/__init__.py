"""Weight types: their properties (`types`), and reading and writing of their blocks (`blocks`)."""
