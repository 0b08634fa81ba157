"""What each technique of the engine buys: one function per technique, which gives rows of a table."""
