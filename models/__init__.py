"""Model definitions in Flax nnx, their configuration, and loading of their weights."""
