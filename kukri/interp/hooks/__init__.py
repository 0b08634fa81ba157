"""Names of activations, and what taps and weights give for them."""
