"""What all chat APIs share: a request's prompt, its tools, its grammar, and the parts of an answer."""
