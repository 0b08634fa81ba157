"""The API of Neuronpedia's inference server: activations of features, and steering by them."""
