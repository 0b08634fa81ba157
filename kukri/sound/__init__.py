"""Sound: files to samples, samples to features, and the encoder of features."""
