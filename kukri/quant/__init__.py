"""Weight types: what they are (`types`) and how blocks are read and written (`blocks`)."""
