"""Images: what an encoder takes, the prompts they stand in, and the encoders that make embeddings of them."""
