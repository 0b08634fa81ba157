"""What reads activations out as features: probes, sparse autoencoders, transcoders, control vectors."""
